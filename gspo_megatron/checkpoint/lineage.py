"""The records of where a run comes from: the branch that it is, and its rollbacks.

In a rollback, a run whose policy has collapsed goes back to an earlier checkpoint. This happens at
one moment: when the record of rollbacks gets its new contents, by a rename. If a run is killed
before that moment, it resumes from its newest checkpoint and comes to the same rollback again.
After that moment the checkpoints in `undone` do not count: `folder.checkpoints_in` leaves them out,
and the next start of the run removes undone checkpoints that are still there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.files import read_record, write_durably
from gspo_megatron.observe.history import BRANCH_FILE
from gspo_megatron.observe.history import ROLLBACKS_FILE as IN_RUN_FOLDER

ROLLBACKS_FILE = Path(IN_RUN_FOLDER).name  # in the folder of checkpoints


@dataclass(frozen=True)
class RunBranch:
    """A run in a folder of its own that continues from a checkpoint of another run."""

    run: str  # the absolute path of the other run
    step: int  # the RL steps that the other run had finished at the checkpoint
    checkpoint: str  # the checkpoint's name, in both runs
    config: dict[str, Any]  # the checkpoint's configuration, with all sections
    # If `run` is itself a branch: the runs and steps that it comes from, nearest first.
    lineage: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the record into the branch's folder. Raises OSError."""
        write_durably(folder / BRANCH_FILE, f"{json.dumps(asdict(self), indent=1)}\n".encode())


@dataclass
class Rollbacks:
    """All rollbacks of a run."""

    # how many rollbacks there were; in a branch, plus the rollbacks of the run that it continues
    number: int
    to: str  # the checkpoint to which the last rollback went back
    loader: dict[str, Any]  # the position in the data from which the run continues
    prompts: dict[str, Any]  # the settings on which the meaning of `loader` depends
    undone: list[str]  # names of the checkpoints that the last rollback takes back
    # for each rollback a dict with number, from_step, to_step and text
    rollbacks: list[dict[str, Any]] = field(default_factory=list)

    def write(self, checkpoints: Path) -> None:
        """Write the record into a run's folder of checkpoints. Raises OSError."""
        content = f"{json.dumps(asdict(self), indent=1)}\n".encode()
        write_durably(checkpoints / ROLLBACKS_FILE, content)


def read_branch(folder: Path) -> RunBranch | None:
    """Return the record in a run folder, or None if the run is no branch. Raises DataError if the
    record is damaged."""
    return read_record(folder / BRANCH_FILE, RunBranch, "a branch")


def read_rollbacks(checkpoints: Path) -> Rollbacks | None:
    """Return the record in a folder of checkpoints, or None if the run never went back. Raises
    DataError if the record is damaged, because without it the run would resume a checkpoint from
    the collapse."""
    return read_record(checkpoints / ROLLBACKS_FILE, Rollbacks, "a run's rollbacks")
