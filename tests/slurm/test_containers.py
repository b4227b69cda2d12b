"""A job in a container. The tests use a real apptainer, and an image that is made from files of
this machine."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import CALLS_PER_STEP, Run, disturb, signalled
from tests.slurm.packages import Unavailable, apptainer_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_MARK = "/etc/gspo-test-image"  # a file that only the image has


@pytest.fixture(scope="module")
def apptainer(prefix: Path) -> Path:
    """The folder with apptainer and with Slurm's programs."""
    try:
        return apptainer_folder()
    except Unavailable as reason:
        pytest.skip(f"no apptainer: {reason}")


@pytest.fixture(scope="module")
def image(apptainer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image") / "box"
    run_program(ROOT / "tests/slurm/make_image.sh", folder, sys.executable)
    words = (apptainer / "apptainer", "exec", folder, "cat", _MARK)
    try:
        run_program(*words)
    except AssertionError as error:
        pytest.skip(f"apptainer cannot run an image here: {str(error)[-300:]}")
    return folder


def test_the_definition_of_the_image_can_be_built(
    apptainer: Path, image: Path, tmp_path: Path
) -> None:
    """The build starts from the image of these tests, not from Docker's image. The definition's
    own test (%test) is left out, because it needs the package in the image."""
    base = ("--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"IMAGE={image}")
    made, definition = tmp_path / "made", ROOT / "deploy/apptainer.def"
    program = apptainer / "apptainer"
    run_program(program, "build", "--sandbox", "--notest", *base, made, definition)
    said = run_program(program, "exec", made, "sh", "-c", "echo $PYTHONNOUSERSITE; cat " + _MARK)
    assert said.stdout == "1\n"


def test_a_stopped_run_in_a_container_continues_whatever_sbatch_exports(
    cluster: Cluster, run: Run, undisturbed: Run, apptainer: Path, image: Path
) -> None:
    """In this test sbatch passes on only a few variables, as on many clusters. So the settings are
    in site.sh, and the tasks get the variables that the batch script sets. Each start has a log of
    its own."""
    assert not Path(_MARK).exists()
    reward = run.folder / "slurm_test_reward.py"
    reward.write_text(reward.read_text() + f"\nopen({_MARK!r}).close()  # only in the image\n")
    usual = run.environ(cluster)
    said = run_program(apptainer / "apptainer", "exec", image, "env", environ=usual).stdout
    # without the batch script, the variable has the value that the image sets
    assert "OMP_NUM_THREADS=77\n" in said
    settings = {
        **usual,
        "PATH": f"{apptainer}{os.pathsep}{cluster.environ['PATH']}",
        "GSPO_CONTAINER": str(image),
        "GSPO_CONTAINER_MOUNTS": f"{sys.prefix}:{sys.prefix}",
    }
    site = run.folder / "site.sh"
    site.write_text(
        "".join(f"export {name}={shlex.quote(text)}\n" for name, text in settings.items())
    )
    passed = f"--export=PATH,LD_LIBRARY_PATH,SLURM_CONF,GSPO_SITE={site}"
    run.hold(CALLS_PER_STEP + 5)
    number = run.submit(cluster, options=[passed])
    disturb(cluster, run, number, signalled)
    log = cluster.ended(number, "COMPLETED 0:0")
    run.assert_same_as(undisturbed)
    assert "stopped as asked" in log
    first = Path(f"{cluster.job(number)['StdOut']}.0").read_text()
    assert log.startswith(first) and "stopped as asked" in first
    assert f"job {number}, restart 1" not in first
    assert not list(run.folder.glob(".gspo-megatron*"))
