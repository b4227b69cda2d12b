"""A run in which nothing moves any more is ended, and tells where every rank was standing.

A collective that one rank does not join waits for ever, or until a time-out that names no culprit.
Here a thread of each rank notes that the rank does nothing, writes down the stacks of all its
threads, and ends the process, so that whoever started the ranks ends the others.

Signs of life are forward passes, and pieces of long work without any (`observe.heartbeat`): tensors
that are written or read, responses that are scored. Ranks that wait for others show none: before
they end the run, they look in a shared file whether any other rank still moves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

from gspo_megatron.observe.heartbeat import heard_by

HANGS = "hang"  # below the run folder: rank_NNNNN.txt of each rank
HUNG = 70  # exit code: sysexits.h's EX_SOFTWARE

_FIRST = "first"  # the file by which the first rank tells the others
_MOVING = ".moving"  # in the run folder: touched again and again by ranks that move
_TICKS = 20  # looks at the time within the time-out
_LONGEST_TICK = 5.0
# A rank that moves says so four times within the time-out: those that wait begin to look for it
# half way through theirs, and must not miss it.
_TELLS = 4


class Heartbeat:
    """Inside the context, `beat` or `observe.heartbeat.heartbeat` has to be called at least every
    `timeout` seconds on some rank; 0: it has not.

    `folder` is one that all ranks see.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self._folder, self._rank, self._world_size = folder / HANGS, rank, world_size
        self._moving = folder / _MOVING
        self._timeout = timeout
        # For the others to write their stacks, before their launcher ends them.
        self._grace = min(30.0, max(2.0, timeout / 10))
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._hearing = contextlib.ExitStack()

    def __enter__(self) -> Heartbeat:
        if self._timeout:
            self._last = time.monotonic()
            self._hearing.enter_context(heard_by(self.beat))
            self._arm()
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._hearing.close()
        if self._timeout:
            faulthandler.cancel_dump_traceback_later()

    def forget_earlier(self) -> None:
        """Remove what an earlier start left behind; on the main rank, before the others enter."""
        with contextlib.suppress(OSError):
            for path in (*self._folder.glob("*"), self._moving):
                path.unlink(missing_ok=True)

    def beat(self, *_: object) -> None:
        """The rank is doing something. Takes arguments to serve as a hook."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        tick = min(_LONGEST_TICK, self._timeout / _TICKS)
        told = others = self._last  # when this rank said that it moves, and another was seen to
        seen: int | None = None
        while not self._ended.wait(tick):
            self._arm()
            if self._ended.is_set():  # meanwhile
                faulthandler.cancel_dump_traceback_later()
                return
            now = time.monotonic()
            if self._last > told and now - told > self._timeout / _TELLS:
                told = now
                self._tell()
            silence = now - max(self._last, others)
            # All ranks wait soon after one stops, but not at once; those that look suspicious join
            # the first that is sure. A run that goes well never looks for that file, nor for a word
            # of others: that is one that changes between two looks, as clocks may differ.
            suspicious = silence > self._timeout / 2
            before, seen = seen, self._told() if suspicious else None
            if before is not None and seen is not None and seen != before:
                others, seen = now, None
            elif silence > self._timeout or (suspicious and (self._folder / _FIRST).exists()):
                self._end(silence)

    def _tell(self) -> None:
        """Let the ranks that wait know that this one moves."""
        with contextlib.suppress(OSError):
            self._moving.touch()

    def _told(self) -> int:
        """What changes whenever a rank tells that it moves."""
        try:
            return self._moving.stat().st_mtime_ns
        except OSError:
            return 0

    def _arm(self) -> None:
        """A thread that keeps the interpreter to itself stops ours too. Then faulthandler's own,
        which needs no interpreter, says so on standard error and ends the process."""
        faulthandler.dump_traceback_later(self._timeout + 2 * self._grace, exit=True)

    def _end(self, silence: float) -> None:
        is_first = self._claim()
        text = self._stacks(silence)
        with contextlib.suppress(OSError):  # the file system may be what hangs
            self._path(self._rank).write_text(text, encoding="utf-8")
        print(text, file=sys.stderr, flush=True)
        time.sleep(self._grace)
        if is_first:
            silent = [r for r in range(self._world_size) if not self._path(r).exists()]
            if silent:
                names = ", ".join(map(str, silent))
                print(
                    f"no stacks from rank {names}: still moving, or gone with the node",
                    file=sys.stderr,
                    flush=True,
                )
        os._exit(HUNG)

    def _claim(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _FIRST).touch(exist_ok=False)
        except OSError:
            return False
        return True

    def _stacks(self, silence: float) -> str:
        head = (
            f"rank {self._rank} on {platform.node()}, process {os.getpid()}: nothing has moved for "
            f"{silence:.0f} s (training.hang_timeout_seconds = {self._timeout:g}); all threads:\n"
        )
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return head + file.read()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:05d}.txt"
