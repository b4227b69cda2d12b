"""The history of a run for its report: where it branched off, and its rollbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.files import object_in
from gspo_megatron.observe.metrics_files import METRICS_FILE

BRANCH_FILE = "branch.json"  # in the folder of a branch; written by checkpoint.lineage
ROLLBACKS_FILE = "checkpoints/rollbacks.json"  # written by checkpoint.lineage


def kept_metrics(number: int) -> str:
    """Return the name of the file that keeps the metrics which a rollback has removed."""
    return Path(METRICS_FILE).with_suffix(f".rollback_{number}.jsonl").name


def history(run: Path) -> list[str]:
    """Return the run's history, one sentence for each event; empty for a run without events."""
    branch, record = object_in(run / BRANCH_FILE), object_in(run / ROLLBACKS_FILE)
    sentences = [_of_branch(branch)] if branch else []
    rollbacks = record.get("rollbacks", [])
    return sentences + [_of_rollback(each) for each in rollbacks]


def _of_branch(branch: Mapping[str, Any]) -> str:
    """Say where a branch, and each branch that it descends from, branched off."""
    lines: Sequence[Mapping[str, Any]] = [branch, *branch.get("lineage", [])]
    places = [f"{each.get('run')} after step {each.get('step')}" for each in lines]
    return f"This run is a branch of {', itself a branch of '.join(places)}."


def _of_rollback(record: Mapping[str, Any]) -> str:
    number, first, last = (record.get(key) for key in ("number", "to_step", "from_step"))
    return (
        f"Rollback {number}: after step {last} the run went back to step {first}, because of a "
        f"collapse ({record.get('text')}). {kept_metrics(int(number or 0))} has the metrics until "
        "then."
    )
