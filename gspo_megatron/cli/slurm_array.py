"""Runs of an ablation as a Slurm array, and their report as a job that waits for it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gspo_megatron
from gspo_megatron.errors import UserError

FOLDER = ".slurm"  # below the ablation's; no arm can have such a name
_SBATCH_TIMEOUT_SECONDS = 300
_NTASKS = re.compile(r"-n\d*|--ntasks(-per-\w+)?(=.*)?")


@dataclass(frozen=True)
class Submitted:
    """Numbers of the jobs, and the folder with their arguments and logs."""

    array: str
    report: str
    folder: Path


def submit(
    out: Path,
    runs: Sequence[Sequence[str]],
    report: Sequence[str],
    options: str,
    world_sizes: Sequence[int],
) -> Submitted:
    """Write the arguments of `train` for each run and of `ablate` for the report, one a line, into
    a new folder, and hand both jobs to sbatch with the user's `options` for the array.

    Raises UserError where sbatch is missing or refuses, and where nothing says how many tasks a run
    has.
    """
    words = _split(options)
    script = Path(gspo_megatron.__file__).parents[1] / "slurm" / "ablation.sbatch"
    if not script.is_file():
        raise UserError(f"--slurm: no {script}; run `ablate` from a checkout of the repository")
    asked = ["--array", f"0-{len(runs) - 1}", *_tasks(words, world_sizes), *words]
    folder = _new_folder(out / FOLDER)
    for name, arguments in [*((str(i), run) for i, run in enumerate(runs)), ("report", report)]:
        (folder / name).write_text("".join(f"{word}\n" for word in arguments), encoding="utf-8")
    array = _sbatch([f"--output={folder}/%a.log", *asked, str(script), str(folder)])
    # Of the array's options only those that say where: the report is one process without a GPU.
    where = [word for word in words if re.match(r"--(account|partition|qos|chdir)=", word)]
    after = [f"--dependency=afterany:{array}", "--ntasks=1", f"--output={folder}/report.log"]
    try:
        made = _sbatch([*after, *where, str(script), str(folder), "report"])
    except UserError as error:
        raise UserError(
            f"{error}\nthe runs were submitted before, as job {array}: do not submit them again; "
            "--report-only writes their report when it has ended"
        ) from error
    return Submitted(array, made, folder)


def _split(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise UserError(f"--slurm {options!r}: {error}") from error


def _tasks(words: Sequence[str], world_sizes: Sequence[int]) -> list[str]:
    if any(_NTASKS.fullmatch(word) for word in words):
        return []
    if len(set(world_sizes)) > 1:
        sizes = ", ".join(map(str, sorted(set(world_sizes))))
        raise UserError(
            f"--slurm: the arms' layouts take {sizes} ranks, and the tasks of an array are alike; "
            "submit them one by one with --arms, or say --ntasks=N where their dp is open"
        )
    return [f"--ntasks={world_sizes[0]}"]


def _new_folder(parent: Path) -> Path:
    """Arrays submitted earlier may still be reading theirs."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / str(number)


def _sbatch(arguments: Sequence[str]) -> str:
    command = ["sbatch", "--parsable", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SBATCH_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--slurm: `{shlex.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise UserError(f"--slurm: `{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # a cluster's name may follow
