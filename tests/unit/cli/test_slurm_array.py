"""The arguments that `ablate --slurm` passes to sbatch. A stand-in for sbatch records these
arguments; tests/slurm uses the real sbatch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_megatron.cli.ablate import submit
from gspo_megatron.errors import UserError
from tests.unit.cli.conftest import Command, ConfigWriter

Asked = Callable[[], list[list[str]]]

_SBATCH = f"""#!{sys.executable}
import json, pathlib, sys
asked = pathlib.Path(__file__).with_name("asked")
lines = asked.read_text().splitlines() if asked.exists() else []
asked.write_text("\\n".join([*lines, json.dumps(sys.argv[1:])]) + "\\n")
if "--refuse" in sys.argv or ("report" in sys.argv and "--partition=short" in sys.argv):
    sys.exit("sbatch: error: no such partition")
print(f"{{100 + len(lines)}};somewhere")
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Install the stand-in. Returns a function that lists the arguments of all calls of the
    stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(_SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    path = folder / "asked"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def words_in(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def test_an_array_and_a_report_that_waits_for_it(tmp_path: Path, asked: Asked) -> None:
    runs = [["c.yaml", "a=1 2"], ["c.yaml", "a='x\ny'"], ["c.yaml"]]
    options = "--partition=gpu --gpus-per-node=8 --comment='two words'"
    array_job, report_job, folder = submit(
        tmp_path / "out", runs, ["c.yaml", "--report-only"], options, [4, 4, 4]
    )
    assert (array_job, report_job) == ("100", "101")
    array, report = asked()
    assert array[:4] == ["--parsable", f"--output={folder}/%a.log", "--array", "0-2"]
    given = ["--ntasks=4", "--partition=gpu", "--gpus-per-node=8", "--comment=two words"]
    assert array[4:8] == given
    assert array[8].endswith("slurm/ablation.sbatch") and array[9:] == [str(folder)]
    assert report[1:3] == ["--dependency=afterany:100", "--ntasks=1"]
    assert "--partition=gpu" in report and "--gpus-per-node=8" not in report
    assert report[-2:] == [str(folder), "report"]
    written = [words_in(folder / str(n)) for n in range(3)]
    assert written == runs
    *_, again = submit(tmp_path / "out", runs, ["c.yaml"], options, [4, 4, 4])
    assert again != folder  # tasks of the first array may still need their files


@pytest.mark.parametrize("said", ["--account=lab -pgpu", "--account lab -p gpu", "-A lab -p gpu"])
def test_the_report_has_the_options_about_accounting(
    tmp_path: Path, asked: Asked, said: str
) -> None:
    submit(tmp_path, [["a"]], ["c"], f"--gpus 8 {said} --comment x", [2])
    _, report = asked()
    after = report.index(f"--output={tmp_path}/.slurm/1/report.log") + 1
    assert report[after:-3] == said.split()


@pytest.mark.parametrize("said", ["-n8", "-n 8", "--ntasks=8", "--nodes=2 --ntasks-per-node=4"])
def test_a_number_of_tasks_that_is_given_counts(tmp_path: Path, asked: Asked, said: str) -> None:
    submit(tmp_path, [["a"], ["b"]], ["c"], said, [2, 4])
    assert "--ntasks=2" not in asked()[0]


def test_arms_of_different_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="take 2, 4 ranks"):
        submit(tmp_path, [["a"], ["b"]], ["c"], "", [2, 4])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--refuse", "no such partition"),
        ("--comment='", "No closing quotation"),
        # the stand-in refuses only the job of the report
        ("--partition=short", "as job 100: do not submit them again; --report-only"),
    ],
)
def test_what_sbatch_says_is_told(tmp_path: Path, asked: Asked, options: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        submit(tmp_path, [["a"]], ["c"], options, [2])


def test_what_a_killed_submission_left_is_not_used(tmp_path: Path, asked: Asked) -> None:
    left = tmp_path / ".slurm" / "1"
    left.mkdir(parents=True)
    (left / "0").write_text("old.yaml\0")
    *_, folder = submit(tmp_path, [["new.yaml"], ["b"]], ["c"], "", [2, 2])
    assert folder == tmp_path / ".slurm" / "2"
    assert all(str(left) not in " ".join(words) for words in asked())
    assert words_in(folder / "0") == ["new.yaml"]
    # The old file stays, because tasks of the old array may still be running.
    assert words_in(left / "0") == ["old.yaml"]


def test_without_slurm_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch"):
        submit(tmp_path, [["a"]], ["c"], "", [2])


def test_the_command_submits_every_run(
    write_config: ConfigWriter, tmp_path: Path, asked: Asked, gspo: Command
) -> None:
    config, out = write_config(), tmp_path / "out"
    words = ["--variants", "gspo", "grpo+r2", "--seeds", "2", "-o", str(out), "--slurm=--nodes=2"]
    code, said, _ = gspo("ablate", config, "training.steps=3", *words)
    assert code == 0 and "job 100: 4 runs" in said
    array, report = asked()
    assert array[2:6] == ["--array", "0-3", "--ntasks=1", "--nodes=2"]
    folder = Path(report[-2])
    first = words_in(folder / "0")
    assert first[:2] == [str(config), "training.steps=3"]
    assert f"logging.dir={out / 'gspo' / 'seed_1'}" in first
    told = words_in(folder / "report")
    assert told == [str(config), "training.steps=3", *words[:-1], "--report-only"]
