"""The record of a run's rollbacks, a file beside its checkpoints. In a rollback, a run whose policy
has collapsed goes back to an earlier checkpoint.

A rollback happens at one moment: when the record gets its new contents, by a rename. If a run is
killed before that moment, it resumes from its newest checkpoint and comes to the same rollback
again. After that moment the checkpoints in `undone` do not count: `folder.positions` leaves them
out, and the next start of the run removes undone checkpoints that are still there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.files import read_record, sync
from gspo_megatron.observe.history import ROLLBACKS_FILE as IN_RUN_FOLDER

ROLLBACKS_FILE = Path(IN_RUN_FOLDER).name  # in the folder of checkpoints


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
        """Write the record atomically: after a loss of power, the file has either the old or the
        new record. Raises OSError."""
        # if this file is left behind, the next start removes it
        partial = checkpoints / f".partial-{ROLLBACKS_FILE}"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        sync(partial)
        partial.replace(checkpoints / ROLLBACKS_FILE)
        sync(checkpoints)


def read_rollbacks(checkpoints: Path) -> Rollbacks | None:
    """Return the record in a folder of checkpoints, or None if the run never went back. Raises
    DataError if the record is damaged, because without it the run would resume a checkpoint from
    the collapse."""
    return read_record(checkpoints / ROLLBACKS_FILE, Rollbacks, "a run's rollbacks")
