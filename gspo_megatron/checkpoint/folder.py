"""The folder of a run's checkpoints: how checkpoints are published, and which checkpoints are
removed.

A checkpoint is written to `.partial-NAME-TOKEN` and renamed when all its bytes are on the disk.
Killed processes leave folders whose names begin with `.partial-`. A checkpoint that another one
replaces is called `.replaced-NAME` until the other one has its name.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.checkpoint.lineage import read_rollbacks
from gspo_megatron.checkpoint.manifest import MANIFEST, Files, dump_manifest
from gspo_megatron.files import PARTIAL, REPLACED, sync, sync_folders, write_durably

CHECKPOINTS = "checkpoints"  # in the run folder
LATEST = "latest"
REFERENCE = "reference"  # name of the checkpoint of the weights that RL starts from


def reference_name(step: int) -> str:
    """Return the folder name of a reference policy, which is a copy of the policy after `step`."""
    return REFERENCE if step == 0 else f"{REFERENCE}_{step:08d}"


# in the order in which a model goes through them
PHASES = ("pretrain", "sft", "reward_model", "rl")

_NAME = re.compile(rf"({'|'.join(PHASES)})_(\d{{8,}})(_rollouts)?")


@dataclass(frozen=True)
class Position:
    """How far a run is: the stage, the number of its finished steps, and whether the responses of
    the next step are already generated."""

    phase: str
    step: int
    rolled_out: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.phase}_{self.step:08d}" + ("_rollouts" if self.rolled_out else "")

    @property
    def order(self) -> tuple[int, int, bool]:
        """A key that sorts positions in the order in which a run reaches them."""
        return PHASES.index(self.phase), self.step, self.rolled_out

    @classmethod
    def of_name(cls, name: str) -> Position | None:
        """Return the position of the checkpoint with this name, or None for other names."""
        found = _NAME.fullmatch(name)
        return cls(found[1], int(found[2]), found[3] is not None) if found else None


def checkpoints_in(folder: Path) -> dict[Position, Path]:
    """Return the checkpoints in a folder, the newest first, without the checkpoints that a rollback
    has taken back. If a run was killed while it replaced a checkpoint, the replaced one is found
    under its other name. Raises DataError if the record of rollbacks is damaged."""
    found: dict[Position, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        record = read_rollbacks(folder)
        for path in sorted(folder.iterdir()):  # a replaced checkpoint comes before the new one
            name = path.name.removeprefix(REPLACED)
            position = Position.of_name(name)
            is_undone = record is not None and name in record.undone
            if position is not None and not is_undone and path.is_dir():
                found[position] = path
    return dict(sorted(found.items(), key=lambda each: each[0].order, reverse=True))


def positions(checkpoints: Path) -> list[Position]:
    """Return the positions of `checkpoints_in` a folder."""
    return list(checkpoints_in(checkpoints))


def checkpoints_at(path: Path) -> list[Path]:
    """List the checkpoints at a path, damaged ones too, the newest first. The path may be a
    checkpoint, a run folder or a folder of checkpoints."""
    for folder in (path, path.parent / f"{REPLACED}{path.name}"):
        if (folder / MANIFEST).is_file():
            return [folder]
    return [*(checkpoints_in(path / CHECKPOINTS) or checkpoints_in(path)).values()]


class Publication:
    """A checkpoint that is being written; every rank may write into `folder`."""

    def __init__(self, parent: Path, name: str) -> None:
        self.parent, self.name = parent, name
        self.folder = parent / f"{PARTIAL}{name}-{secrets.token_hex(4)}"

    def begin(self) -> None:
        """Make the folder. Only one rank calls this. Raises OSError."""
        self.folder.mkdir(parents=True)

    def publish(self, files: Files) -> Path:
        """Write a manifest of `files`, which are on the disk already, and give the folder its final
        name. Only one rank calls this. Returns the checkpoint's path. Raises OSError."""
        write_file(self.folder / MANIFEST, dump_manifest(files))
        sync_folders(self.folder)
        path = self.parent / self.name
        # A checkpoint that already has this name may be damaged, because the run was resumed from
        # an older checkpoint. It may also be whole, and the only one, if the evaluation of its step
        # is repeated. So a killed run must find it again: see `put_back`.
        before = self.parent / f"{REPLACED}{self.name}"
        if path.exists():
            path.rename(before)
        self.folder.rename(path)
        sync(self.parent)
        if before.exists():
            shutil.rmtree(hide(before), ignore_errors=True)
        return path

    def abandon(self) -> None:
        """Remove the folder. If `publish` has failed, the checkpoint that was to be replaced gets
        its name back. Only one rank calls this."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            put_back(self.parent)


def set_latest(checkpoints: Path, name: str) -> None:
    """Write a checkpoint's name into the file `latest`. Raises OSError."""
    write_durably(checkpoints / LATEST, f"{name}\n".encode())


def hide(path: Path) -> Path:
    """Rename a checkpoint that will be removed, so that a partly removed folder does not look like
    a checkpoint. Returns the new path. Raises OSError."""
    return path.rename(path.with_name(f"{PARTIAL}{path.name}-{secrets.token_hex(4)}"))


def finish_rollback(checkpoints: Path) -> None:
    """Hide the checkpoints that the last rollback has taken back, so that the run can use their
    names again. Raises OSError and DataError."""
    record = read_rollbacks(checkpoints)
    if record is None or not record.undone:
        return
    for name in record.undone:
        if (checkpoints / name).exists():
            hide(checkpoints / name)
    record.undone = []
    record.write(checkpoints)


def put_back(checkpoints: Path) -> None:
    """Finish what a run did that was killed while it replaced a checkpoint. If the new checkpoint
    does not have its name yet, the replaced one gets it back. Raises OSError."""
    for before in sorted(checkpoints.glob(f"{REPLACED}*")):
        path = before.with_name(before.name.removeprefix(REPLACED))
        if path.exists():
            hide(before)
        else:
            before.rename(path)


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove the files and folders that killed processes have left. Returns their names."""
    put_back(checkpoints)
    leftovers = sorted(checkpoints.glob(f"{PARTIAL}*"))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def surplus(
    metrics: dict[Position, float | None], last: int | None, best: int, every: int
) -> list[Position]:
    """Return the checkpoints to remove. `metrics` has the metric of every checkpoint, or None if a
    checkpoint has no metric. These checkpoints stay: the `last` newest (None: all), the `best`
    with the highest metric, and all whose step is a multiple of `every` (0: the step does not
    matter)."""
    ordered = sorted(metrics, key=lambda position: position.order)
    if last is None:
        return []
    kept = set(ordered[-last:])
    whole = [p for p in ordered if not p.rolled_out]
    if every:
        kept.update(p for p in whole if p.step and p.step % every == 0)
    metric_of = {p: f for p in whole if (f := metrics[p]) is not None and math.isfinite(f)}
    ranked = sorted(metric_of, key=lambda p: (metric_of[p], p.order))
    kept.update(ranked[len(ranked) - min(best, len(ranked)) :])
    return [p for p in ordered if p not in kept]


def to_go_back_to(found: Sequence[Position], healthy_step: int, healthy: int) -> list[Position]:
    """Return the checkpoints that a rollback needs, at most two. The first is the newest checkpoint
    up to step `healthy_step`: its policy is healthy for sure. The second is the oldest checkpoint
    after that step and up to step `healthy`: its policy looks healthy. Some steps later, the second
    is healthy for sure and takes the place of the first. If only the first were kept, no checkpoint
    could take its place."""
    whole = [p for p in found if p.phase == PHASES[-1] and not p.rolled_out]
    whole.sort(key=lambda position: position.step)
    sure = [p for p in whole if p.step <= healthy_step]
    next_ones = [p for p in whole if healthy_step < p.step <= healthy]
    return [*sure[-1:], *next_ones[:1]]


def free_bytes(folder: Path) -> int:
    """Return the number of free bytes on the disk of a folder. The folder need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. Raises OSError."""
    path.write_bytes(content)
    sync(path)


def owned_by(names: Sequence[str], rank: int, world_size: int) -> list[str]:
    """Return the files of a checkpoint that `rank` wrote. The names of files tell the rank: rank 3
    wrote `__3_0.distcp` and `rank_00003…`. Files without a rank in their name belong to rank 0.
    Fewer ranks may run now, so the rank numbers count modulo `world_size`."""
    owners = ((name, re.search(r"(?:^|/)(?:__|rank_0*)(\d+)[^/]*$", name)) for name in names)
    return [n for n, found in owners if (int(found[1]) % world_size if found else 0) == rank]
