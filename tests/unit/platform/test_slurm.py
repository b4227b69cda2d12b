"""What a process learns of its Slurm job. The real programs: tests/slurm."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from gspo_megatron.platform.slurm import SlurmJob, parse_time_left

TIMES = {
    "9": 9,
    "2:03": 123,
    "10:00": 600,
    "1:00:05": 3605,
    "2-01:00:05": 2 * 86400 + 3605,
    "365-00:00:00": 365 * 86400,
    "0:00": 0,
    **dict.fromkeys(("UNLIMITED", "NOT_SET", "INVALID", "")),
}


@pytest.mark.parametrize("text", TIMES)
def test_time_left_as_squeue_prints_it(text: str) -> None:
    assert parse_time_left(text) == TIMES[text]


def test_the_job_of_the_environment() -> None:
    assert SlurmJob.of({}) is None
    assert SlurmJob.of({"SLURM_JOB_ID": ""}) is None
    assert SlurmJob.of({"SLURM_JOB_ID": "7"}) == SlurmJob("7", 0)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1800000000"}
    assert SlurmJob.of(environ) == SlurmJob("7", 2, 1.8e9)
    assert str(SlurmJob.of(environ)) == "Slurm job 7, restart 2"


def fake_squeue(folder: Path, script: str) -> None:
    path = folder / "squeue"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_squeue_tells_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, 'echo "$*" >"$0.asked"; echo 1:05')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob("7", 0, end=0.0).seconds_left() == 65
    assert (tmp_path / "squeue.asked").read_text() == "--noheader --jobs 7 --format %L\n"


@pytest.mark.parametrize("script", [None, "exit 1"])
def test_without_squeue_the_end_that_was_known_at_the_start_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        fake_squeue(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob("7", 0).seconds_left() is None
    left = SlurmJob("7", 0, end=time.time() + 100).seconds_left()
    assert left is not None and 90 < left <= 100
