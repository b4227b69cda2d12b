"""The runner of tools/gpu_visit: its limits, the files that it keeps and packs, and the table on
its page."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.programs import ROOT, module_at, run_program

VISIT = ROOT / "tools" / "gpu_visit"


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    return module_at(VISIT / "steps.py")


@pytest.fixture(scope="module")
def run(steps: ModuleType) -> ModuleType:
    return module_at(VISIT / "run.py")


def python(steps: ModuleType, name: str, code: str, **options: Any) -> Any:
    return steps.Step(name, "shown", (sys.executable, "-c", code), 20, 1, **options)


def test_the_others_go_on_after_a_failure_a_hang_and_a_missing_package(
    steps: ModuleType, run: ModuleType, tmp_path: Path
) -> None:
    mark = f"gpu-visit-child-{os.getpid()}"  # a mark that no other process on this machine has
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{mark}']); import time; print('began', flush=True); time.sleep(99)"  # noqa: E501
    chosen = [
        (python(steps, "good", "print('rate=2.5 name=x equal=1')"), 20.0),
        (python(steps, "bad", "raise SystemExit('broken: a cause')"), 20.0),
        (python(steps, "hangs", child), 5.0),
        (python(steps, "absent", "", needs="no_such_package_at_all"), 20.0),
        (python(steps, "cannot", f"print('no GPU'); raise SystemExit({steps.NOT_HERE})"), 20.0),
        (python(steps, "refused", "print('a key is wrong'); raise SystemExit(2)"), 20.0),
        (python(steps, "last", "print('done')"), 20.0),
    ]
    results: dict[str, Any] = {"machine": {}, "steps": {}}
    assert run.run_all(chosen, tmp_path, results, 100.0) == 3
    kept = json.loads((tmp_path / "visit.json").read_text())["steps"]
    assert [kept[name]["status"] for name in kept] == [
        *("ok", "FAILED", "TIME OUT", "left out", "not here", "FAILED", "ok"),
    ]
    assert kept["good"]["figures"] == {"rate": 2.5, "name": "x", "equal": 1.0}
    assert kept["bad"]["says"] == "broken: a cause" and kept["hangs"]["says"] == "began"
    assert "no_such_package_at_all is not installed" in kept["absent"]["says"]
    assert "broken: a cause" in (tmp_path / "logs.txt").read_text()
    assert "TIME OUT" in (tmp_path / "visit.txt").read_text()
    found = psutil.process_iter(["cmdline"])
    left = [process for process in found if mark in (process.info["cmdline"] or [])]
    assert not left


def test_nothing_of_a_step_is_left_after_ctrl_c(
    steps: ModuleType, run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has its own session, so the terminal's Ctrl-C reaches only the runner."""
    began = tmp_path / "began"
    left: list[psutil.Process] = []

    def interrupted(process: subprocess.Popen[str], timeout: float) -> None:
        left.append(psutil.Process(process.pid))
        while not began.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    code = f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(99)"
    with pytest.raises(KeyboardInterrupt):
        run.run_step(python(steps, "runs", code), 20.0, tmp_path / "logs.txt")
    _, alive = psutil.wait_procs(left, timeout=10)
    assert left and not alive


def test_what_was_seen_is_kept_when_the_time_is_over(
    steps: ModuleType, run: ModuleType, tmp_path: Path
) -> None:
    chosen = [(python(steps, n, "import time; time.sleep(2)"), 20.0) for n in ("first", "second")]
    results: dict[str, Any] = {"machine": {}, "steps": {}}
    began = time.monotonic()
    run.run_all(chosen, tmp_path, results, 6.0)
    assert time.monotonic() - began < 30
    kept = json.loads((tmp_path / "visit.json").read_text())["steps"]
    assert kept["first"]["status"] == "ok"
    assert kept["second"]["says"] == "no time was left"


def test_results_are_printed_where_they_cannot_be_written(
    steps: ModuleType, run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A folder at the file's path has the effect of a full disk.
    for name in ("visit.json", "visit.txt"):
        (tmp_path / f"{name}.part").mkdir()
    results: dict[str, Any] = {"machine": {}, "steps": {}}
    chosen = [(python(steps, name, f"print('{name}=1')"), 20.0) for name in ("a", "b")]
    assert run.run_all(chosen, tmp_path, results, 60.0) == 0
    told = capsys.readouterr().out
    assert "not written" in told and "a=1" in told and "b=1" in told


def test_visit_and_hour_have_one_list(steps: ModuleType, tmp_path: Path) -> None:
    machine = steps.Machine(tmp_path, 1, 1, False, None)
    listed = steps.all_steps(machine)
    names = [step.name for step in listed]
    assert len(set(names)) == len(names)
    visit = [step for step in listed if step.seconds is not None and step.needs is None]
    assert sum(step.seconds for step in visit) <= 1000 and names[:4] == [
        *("data", "doctor", "tests", "verify"),
    ]
    hour = (ROOT / "tools" / "first_gpu_hour.sh").read_text()
    assert "gpu_visit/run.py" in hour and "--hour" in hour


def test_an_hour_on_several_gpus_compares_layouts(steps: ModuleType, tmp_path: Path) -> None:
    """`verify` without layouts takes those of each kind of parallelism."""
    for gpus, wanted in ((2, steps.GSPO), (1, steps._say("two GPUs are needed"))):
        machine = steps.Machine(tmp_path, gpus, gpus, False, None)
        [step] = [step for step in steps.all_steps(machine) if step.name == "layouts"]
        assert step.command[: len(wanted)] == wanted and step.seconds is None


def test_a_rehearsal_says_what_it_cannot_do(steps: ModuleType, tmp_path: Path) -> None:
    listed = steps.all_steps(steps.Machine(tmp_path, 1, 0, True, None))
    engine = next(step for step in listed if step.name == "fp8")
    done = run_program(*engine.command, expect=steps.NOT_HERE)
    assert done.stdout.strip() == "Transformer Engine needs a GPU"


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ("a=1 b/c=2.5e-3 d=yes", {"a": 1.0, "b/c": 0.0025, "d": "yes"}),
        ("3 steps failed; a=1", {}),
        ("", {}),
        ("x == y", {}),
    ],
)
def test_figures_are_lines_of_pairs_alone(
    run: ModuleType, line: str, figures: dict[str, Any]
) -> None:
    assert run.figures_of(line) == figures


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary with these entries (kind, arch, contents)."""
    body = b""
    for kind, arch, content in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(content)).ljust(28, b"\0")
        body += (header + struct.pack("<I", arch)).ljust(64, b"\0") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_thin_wheel_keeps_the_kernels_of_one_kind_of_gpu(tmp_path: Path) -> None:
    thin = module_at(VISIT / "thin.py")
    other, ours, text = b"o" * 5000, b"k" * 3000, b"t" * 200
    binary = fat_binary((2, 80, other), (2, 90, ours), (1, 90, text))
    content = b"\x7fELF" + bytes(2**20) + binary + b"end" + fat_binary((2, 90, ours))
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lib/engine.so", content)
        archive.writestr("lib/small.py", "x = 1\n")
    made = thin.thin(wheel, tmp_path / "out", 90)
    with zipfile.ZipFile(made) as archive:
        kept = archive.read("lib/engine.so")
        assert archive.read("lib/small.py") == b"x = 1\n"
    assert len(kept) == len(content) and kept.count(ours) == 2
    assert other not in kept and text not in kept and b"end" in kept
    with pytest.raises(SystemExit, match="sm_100"):
        thin.thin(wheel, tmp_path / "none", 100)
    assert not (tmp_path / "none" / wheel.name).exists()


def test_the_table_of_the_page_is_that_of_the_visits() -> None:
    run_program(sys.executable, VISIT / "seen.py", "--check", cwd=ROOT)


def test_kept_visits_name_no_machine() -> None:
    kept = list((ROOT / "docs" / "gpu_visits").glob("*.json"))
    assert kept
    for path in kept:
        visit = json.loads(path.read_text())
        assert not {"host", "command", "slurm"} & visit["machine"].keys()
        assert visit["machine"]["gpu_name"] and '"/' not in path.read_text()


def test_the_best_result_of_a_step_is_shown(tmp_path: Path) -> None:
    seen = module_at(VISIT / "seen.py")

    def visit(date: str, **statuses: str) -> dict[str, Any]:
        records = {n: {"status": s, "says": "said", "shows": "shown"} for n, s in statuses.items()}
        return {"machine": {"date": date, "gpu_name": "G"}, "steps": records}

    text = seen.table(
        [visit("2026-01-01", a="ok", b="FAILED", c="left out"), visit("2026-01-02", a="FAILED")]
    )
    assert "| `a` | yes (G, 2026-01-01) |" in text
    assert "| `b` | no: FAILED (G, 2026-01-01) |" in text and "| `c` | no |" in text
