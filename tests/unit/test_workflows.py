"""The workflows of GitHub: their form, and the files and targets that they use. Also the targets
themselves, with stand-ins for the programs of .venv."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import ROOT, run_program

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
PATHS = re.compile(r"(?<![\w./-])((?:tests|tools|requirements)/[\w./-]*\w)")


def workflow(path: Path) -> dict[str, Any]:
    # With BaseLoader, every scalar is a string. So `on` is not read as true.
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}-{name}", job)
        for path in FILES
        for name, job in workflow(path)["jobs"].items()
    ]


def variants(job: dict[str, Any]) -> list[dict[str, str]]:
    """The values of the matrix, as one mapping for each run of the job."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    if "include" in matrix:
        return matrix["include"]
    rows: list[dict[str, str]] = [{}]
    for name, values in matrix.items():
        rows = [row | {name: value} for row in rows for value in values]
    return rows


def scripts(job: dict[str, Any]) -> list[str]:
    """The shell commands of all runs of a job, with the values of the matrix filled in."""
    found = []
    for row in variants(job):
        for step in job["steps"]:
            text = step.get("run", "")
            for name, value in row.items():
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            assert "${{" not in text, "a value from outside in a command"
            found.append(text)
    return [text for text in found if text]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_says_when_it_runs(path: Path) -> None:
    content = workflow(path)
    assert content["on"] and content["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(("name", "job"), jobs(), ids=[name for name, _ in jobs()])
def test_a_job_runs_what_exists(name: str, job: dict[str, Any]) -> None:
    assert job["runs-on"].startswith("ubuntu-") and int(job["timeout-minutes"]) > 0
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for step in job["steps"]:
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:  # a tag can be moved to other code, a commit cannot
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "no commit"
    for script in scripts(job):
        for target in re.findall(r"\bmake ([a-z-]+)", script):
            assert target in targets, target
        for path in PATHS.findall(script):
            assert (ROOT / path).exists(), path


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "shellcheck").exists(), reason="shellcheck is not installed"
)
@pytest.mark.parametrize(("name", "job"), jobs(), ids=[name for name, _ in jobs()])
def test_the_commands_are_sound_shell(name: str, job: dict[str, Any]) -> None:
    for script in scripts(job):
        done = subprocess.run(
            [Path(sys.executable).parent / "shellcheck", "--shell=bash", "-"],
            input=script, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_every_folder_of_tests_runs_somewhere() -> None:
    run = " ".join(script for _, job in jobs() for script in scripts(job))
    folders = {path.parent for path in ROOT.glob("tests/*/**/test_*.py")}
    # these tests need a GPU
    for folder in {path.relative_to(ROOT).parts[1] for path in folders} - {"gpu"}:
        assert f"tests/{folder}" in run, folder


def test_both_lines_of_megatron_core_are_tested() -> None:
    fast = dict(jobs())["ci.yml-fast"]
    versions = set()
    for row in variants(fast):
        pins = ROOT / f"requirements/cpu-py{row['python'].replace('.', '')}.txt"
        versions.update(re.findall(r"^megatron-core==([\d.]+)", pins.read_text(), re.MULTILINE))
    assert versions == {"0.16.1", "0.19.2"}


# Records its name and its arguments in the file `calls`, one call on each line.
_STAND_IN = """#!/bin/bash
printf '%s|' "${0##*/}" "$@" >>calls
echo >>calls
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed; this test runs it")
@pytest.mark.parametrize(
    ("target", "programs"),
    [
        ("docs", ["install.sh", "python"]),
        ("dist", ["install.sh", "python"]),
        ("format", ["install.sh", "ruff", "ruff"]),
        ("lint", ["install.sh", "python", "ruff", "lint-imports", "python", "ty"]),
        ("test", ["install.sh", "python", "ruff", "lint-imports", "python", "ty", "python"]),
    ],
)
def test_make_works_in_a_folder_with_a_blank_in_its_path(
    tmp_path: Path, target: str, programs: list[str]
) -> None:
    folder = tmp_path / "my project"
    places = [folder / "requirements/install.sh"]
    places += [folder / ".venv/bin" / name for name in ("python", "ruff", "lint-imports", "ty")]
    for path in places:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_STAND_IN)
        path.chmod(0o755)
    shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
    # `make test` itself may run these tests, with other values of its variables.
    plain = {"MAKEFLAGS": "", "VENV": ".venv", "PYTHON": ""}
    run_program("make", target, cwd=folder, environ=plain)
    calls = (folder / "calls").read_text().splitlines()
    assert [call.partition("|")[0] for call in calls] == programs
    if "ty" in programs:
        assert f"ty|check|--python|{folder}/.venv|" in calls


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed; this test runs it")
def test_make_clean_removes_no_other_folder(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    folder = tmp_path / "my files"
    folder.mkdir()
    (folder / "file").touch()
    plain = {"MAKEFLAGS": "", "VENV": str(folder), "PYTHON": ""}
    ended = run_program("make", "clean", cwd=tmp_path, environ=plain, expect=2)
    assert "is no virtual environment" in ended.stderr and (folder / "file").exists()
    (folder / "pyvenv.cfg").touch()
    run_program("make", "clean", cwd=tmp_path, environ=plain)
    assert not folder.exists()
