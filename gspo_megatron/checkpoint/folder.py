"""The folder of a run's checkpoints: how one gets into it, whole or not at all, and when it goes.

A checkpoint is written into `.partial-NAME-TOKEN`, and has its own name only once every byte of it
is on the disk. Whatever begins with `.partial-` is what a killed process left behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.checkpoint.manifest import MANIFEST, Files, dump_manifest

CHECKPOINTS = "checkpoints"  # in the run folder
LATEST = "latest"
REFERENCE = "reference"
PHASES = ("pretrain", "sft", "rl")  # in their order

_PARTIAL = ".partial-"
_NAME = re.compile(rf"({'|'.join(PHASES)})_(\d{{8,}})(_rollouts)?")


@dataclass(frozen=True)
class Position:
    """How far a run is: finished steps of a phase, and whether the next one is rolled out."""

    phase: str
    step: int
    rolled_out: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.phase}_{self.step:08d}" + ("_rollouts" if self.rolled_out else "")

    @property
    def order(self) -> tuple[int, int, bool]:
        """What sorts positions as a run passes them."""
        return PHASES.index(self.phase), self.step, self.rolled_out

    @classmethod
    def of_name(cls, name: str) -> Position | None:
        """The position that a folder's name tells, None for the name of anything else."""
        found = _NAME.fullmatch(name)
        return cls(found[1], int(found[2]), found[3] is not None) if found else None


def positions(checkpoints: Path) -> list[Position]:
    """Of all folders there that have a checkpoint's name, the newest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [path.name for path in checkpoints.iterdir() if path.is_dir()]
        found = [p for p in map(Position.of_name, names) if p is not None]
        return sorted(found, key=lambda position: position.order, reverse=True)
    return []


class Publication:
    """One checkpoint on its way into a folder; every rank may write into `folder`."""

    def __init__(self, parent: Path, name: str, token: str | None = None) -> None:
        """`token` is that of the rank that began it, on all others."""
        self.parent, self.name = parent, name
        self.token = secrets.token_hex(4) if token is None else token
        self.folder = parent / f"{_PARTIAL}{name}-{self.token}"

    def begin(self) -> None:
        """Make the folder to write into; one rank does. Raises OSError."""
        self.folder.mkdir(parents=True)

    def publish(self, files: Files) -> Path:
        """Give the checkpoint its name, with `files` for a manifest; they are on the disk already
        (`sync_file`). One rank does. Returns its path. Raises OSError."""
        manifest = self.folder / MANIFEST
        manifest.write_bytes(dump_manifest(files))
        sync_file(manifest)
        for folder in [self.folder, *(p for p in self.folder.rglob("*") if p.is_dir())]:
            sync_folder(folder)
        path = self.parent / self.name
        # What has the name already is damaged: the run was resumed from a checkpoint before it.
        before = hide(path) if path.exists() else None
        self.folder.rename(path)
        sync_folder(self.parent)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return path

    def abandon(self) -> None:
        """Take away what was written; one rank does."""
        shutil.rmtree(self.folder, ignore_errors=True)


def set_latest(checkpoints: Path, name: str) -> None:
    """Let the file `latest` name a checkpoint; it is replaced in one piece. Raises OSError."""
    partial = checkpoints / f"{_PARTIAL}{LATEST}"
    partial.write_text(f"{name}\n")
    sync_file(partial)
    partial.replace(checkpoints / LATEST)
    sync_folder(checkpoints)


def hide(path: Path) -> Path:
    """Take a checkpoint's name away, to remove it: killed half way, that leaves nothing that looks
    like a checkpoint. Returns where it is then. Raises OSError."""
    return path.rename(path.with_name(f"{_PARTIAL}{path.name}-{secrets.token_hex(4)}"))


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove what killed processes left half written or half removed; returns the names."""
    left = sorted(checkpoints.glob(f"{_PARTIAL}*"))
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in left]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one has come."""

    last: int | None  # the newest so many; None: all
    best: int  # those with the highest metric
    every: int  # those whose step is a multiple; 0: none

    def surplus(self, metrics: dict[Position, float | None]) -> list[Position]:
        """Of all checkpoints, each with its metric if it has one, those to be removed. The newest
        is never among them."""
        ordered = sorted(metrics, key=lambda position: position.order)
        if self.last is None:
            return []
        kept = set(ordered[-self.last :])
        whole = [p for p in ordered if not p.rolled_out]
        if self.every:
            kept.update(p for p in whole if p.step and p.step % self.every == 0)
        known = {p: f for p in whole if (f := metrics[p]) is not None and math.isfinite(f)}
        ranked = sorted(known, key=lambda p: (known[p], p.order))
        kept.update(ranked[len(ranked) - min(self.best, len(ranked)) :])
        return [p for p in ordered if p not in kept]


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sync_file(path: Path) -> None:
    """Wait until a file's contents are on the disk. Raises OSError."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


def owned_by(names: Sequence[str], rank: int, world_size: int) -> list[str]:
    """The files of a checkpoint that this rank wrote, by their names: `__3_0.distcp` and
    `rank_00003…` are rank 3's; whatever names no rank is rank 0's."""
    owners = ((name, re.search(r"(?:^|/)(?:__|rank_0*)(\d+)[^/]*$", name)) for name in names)
    return [n for n, found in owners if (int(found[1]) % world_size if found else 0) == rank]


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
