"""One or several runs loaded for plots and tables, and which of them differ only by their seed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.errors import DataError
from gspo_megatron.observe.records import RL, Record, read_metrics, series

# "gspo_seed1", "gspo-seed=2", "seed3", "gspo_s4": what of a name tells the seed alone.
_SEED = re.compile(r"(?:^|[-_.])(?:seed[-_=]?|s)\d+(?=$|[-_.])", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A run folder with its metrics."""

    path: Path
    name: str  # distinct among the runs loaded together
    group: str  # the name without its seed; runs of one group are repetitions
    records: tuple[Record, ...]

    def series(self, key: str, phase: str = RL) -> tuple[list[int], list[float]]:
        """Steps and values of one figure."""
        return series(self.records, key, phase)


def load_runs(run_dirs: Sequence[str | Path]) -> list[Run]:
    """Read several runs and name them by what tells their paths apart.

    Raises DataError when a folder holds no run, when a file is damaged, or when one is given twice.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise DataError(f"given twice: {', '.join(twice)}")
    return [
        Run(path, name, group_name(name) or path.parent.name, tuple(read_metrics(path)))
        for path, name in zip(paths, run_names(paths))
    ]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names for runs: their folders' names where those tell them apart, else longer paths."""
    names = [path.name for path in paths]
    if len(paths) > 1 and (len(set(names)) < len(names) or not all(map(group_name, names))):
        # The same folder names under different parents, or bare seeds ("gspo/seed1"): the part
        # of the path that they do not share says which is which.
        common = Path(os.path.commonpath([str(path) for path in paths]))
        names = [path.relative_to(common).as_posix() for path in paths]
    return names


def group_name(name: str) -> str:
    """A run's name without its seed; parts of a path that were nothing but a seed go."""
    parts = (_SEED.sub("", part) for part in name.split("/"))
    return "/".join(part for part in parts if part)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by group, in the order in which the groups first appear."""
    by_group: dict[str, list[Run]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return by_group
