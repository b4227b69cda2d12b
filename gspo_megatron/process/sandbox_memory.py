"""Puts each program in a sandbox into a memory cgroup, if this machine allows that.

A cgroup limits the memory of all processes of a program together, with buffers of sockets and pipes
and with files in memory. A limit of a single process does not count such buffers and files. The new
cgroup is made inside this process's own cgroup or beside it. That needs root, or a part of the
cgroup tree that was delegated to the user.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "gspo_"
_LEAVE_SECONDS = 0.05  # wait until the kernel has removed ended processes from a cgroup
_TRY_SECONDS = 10.0
# The controller's files, by version: limit, limit with swap, count of processes that were ended
_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.swap.max", "memory.events"),
}


@dataclass(frozen=True)
class Place:
    """Where cgroups can be made."""

    version: int  # of cgroups: 1 or 2
    folder: Path


class Cgroup:
    """One cgroup. It is gone after `close`."""

    def __init__(self, place: Place, limit_bytes: int) -> None:
        """Make the cgroup. Raises OSError."""
        self._version = place.version
        self.folder = Path(tempfile.mkdtemp("", f"{_PREFIX}{os.getpid()}_", place.folder))
        limit, with_swap, _ = _FILES[self._version]
        try:
            (self.folder / limit).write_text(str(limit_bytes))
            if (self.folder / with_swap).exists():
                # In this file, version 1 limits memory and swap together, version 2 swap alone.
                no_swap = limit_bytes if self._version == 1 else 0
                (self.folder / with_swap).write_text(str(no_swap))
        except OSError:
            self.close()
            raise

    @property
    def entrance(self) -> Path:
        """The file to which a process writes 0 to enter the group. Its later children are in the
        group, too."""
        return self.folder / "cgroup.procs"

    @property
    def was_full(self) -> bool:
        """Whether the kernel has ended a process of the group because memory ran out."""
        text = (self.folder / _FILES[self._version][2]).read_text()
        return any(int(line.split()[1]) for line in text.splitlines() if line[:9] == "oom_kill ")

    def close(self) -> None:
        """Remove the cgroup, whose processes must all have ended. If they have not been reaped yet,
        the folder is removed together with a later group, or at the end of this process."""
        _leftovers.append(self.folder)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self.folder in _leftovers and time.monotonic() < deadline:
            _remove_leftovers()
            time.sleep(0.001)


_leftovers: list[Path] = []  # folders of closed groups; all threads use this list


@atexit.register
def _remove_leftovers() -> None:
    for folder in tuple(_leftovers):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            continue
        with contextlib.suppress(ValueError):  # another thread has removed it
            _leftovers.remove(folder)


@functools.cache
def place() -> Place | None:
    """Return where cgroups with a memory limit can be made, or None. Tries this by making a
    cgroup."""
    for candidate in _candidates():
        _sweep(candidate.folder)
        if _works(candidate):
            return candidate
    return None


def _candidates() -> Iterator[Place]:
    own = dict(_own_paths())
    for kind, root, mount, controllers in _mounts():
        if kind == "cgroup2" and "" in own:
            name = ""
        elif kind == "cgroup" and "memory" in controllers and "memory" in own:
            name = "memory"
        else:
            continue
        try:
            folder = Path(mount) / Path(own[name]).relative_to(root)
        except ValueError:  # this mount does not show this process's cgroup
            continue
        yield Place(2 if kind == "cgroup2" else 1, folder)
        # In version 2 only leaves hold processes, so the new cgroup may have to be a sibling.
        if kind == "cgroup2" and folder != Path(mount):
            yield Place(2, folder.parent)


def _own_paths() -> Iterator[tuple[str, str]]:
    """Yield the name of each controller ("" for version 2) and the path of this process in it."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            yield name, path


def _mounts() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield the kind, the root in the tree, the folder and the options of each mount."""
    for line in _lines("/proc/self/mountinfo"):
        first, _, last = line.partition(" - ")
        _, _, _, root, folder, *_ = first.split()
        kind, _, options = last.split(" ", 2)  # the source may be empty
        yield kind, root, folder, options.split(",")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _sweep(folder: Path) -> None:
    """Remove the cgroups that killed processes have left."""
    for group in folder.glob(f"{_PREFIX}*_*"):
        owner = group.name[len(_PREFIX) :].partition("_")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            try:
                group.rmdir()
            except OSError:
                continue


def _works(candidate: Place) -> bool:
    try:
        group = Cgroup(candidate, 1 << 26)
    except OSError:
        return False
    try:
        words = ["/bin/sh", "-c", 'echo 0 > "$1"', "sh", str(group.entrance)]
        result = subprocess.run(words, capture_output=True, timeout=_TRY_SECONDS, check=False)
        return result.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        group.close()
