"""The wheel works outside of the repository, in an environment that does not contain the
repository."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gspo_megatron
from tests.programs import ROOT, run_program

PINS = {"3.11": "cpu-py311.txt", "3.12": "cpu-py312.txt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run_program(sys.executable, ROOT / "tools/build_release.py", out)
    [path] = out.glob("*.whl")
    assert path.name == f"gspo_megatron-{gspo_megatron.__version__}-py3-none-any.whl"
    assert (out / f"gspo_megatron-{gspo_megatron.__version__}.tar.gz").is_file()
    return path


def train_two_steps(environment: Path, folder: Path) -> None:
    """Run `new` and `train` of the wheel in a folder outside of the repository."""
    folder.mkdir()
    python, command = environment / "bin/python", environment / "bin/gspo-megatron"
    place = "import gspo_megatron; print(gspo_megatron.__file__)"
    assert str(environment) in run_program(python, "-c", place, cwd=folder).stdout
    version = run_program(command, "--version", cwd=folder).stdout.strip()
    assert version == gspo_megatron.__version__
    run_program(command, "new", "my", cwd=folder)
    run_program(command, "train", "config.yaml", "training.steps=2", cwd=folder / "my", timeout=400)
    lines = (folder / "my/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    assert (folder / "my/run/report.html").is_file()


def test_the_changelog_has_the_version_and_room_for_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", gspo_megatron.__version__]


@pytest.mark.slow
def test_the_wheel_trains_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of the test's environment. The package itself comes from the wheel
    alone."""
    environment = tmp_path / "environment"
    run_program(sys.executable, "-m", "venv", "--without-pip", environment)
    [site] = environment.glob("lib/python*/site-packages")
    # The folder's own .pth files are not read, so an editable installation in it has no effect.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python", "install")
    run_program(*pip, "--quiet", "--no-deps", "--no-index", wheel)
    train_two_steps(environment, tmp_path / "elsewhere")


def interpreter(version: str) -> str | None:
    """A working interpreter of this version. A shim of pyenv may not work."""
    candidates = [f"python{version}"]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        candidates += map(str, Path(root.stdout.strip()).glob(f"versions/{version}.*/bin/python"))
    for path in filter(None, map(shutil.which, candidates)):
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", PINS)
def test_the_wheel_trains_in_a_clean_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no interpreter of Python {version} runs here")
    environment = tmp_path / "environment"
    run_program(python, "-m", "venv", environment)
    pip = (environment / "bin/python", "-m", "pip", "install", "--quiet")
    pins = ROOT / "requirements" / PINS[version]
    run_program(*pip, "--requirement", pins, wheel, timeout=1200)
    train_two_steps(environment, tmp_path / "elsewhere")
