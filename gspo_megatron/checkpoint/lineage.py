"""The record of a branch: the run and the step that it comes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.files import read_record, write_atomically
from gspo_megatron.observe.history import BRANCH_FILE


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
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_atomically(folder / BRANCH_FILE, text.encode())


def read_branch(folder: Path) -> RunBranch | None:
    """Return the record in a run folder, or None if the run is no branch. Raises DataError if the
    record is damaged."""
    return read_record(folder / BRANCH_FILE, RunBranch, "a branch")
