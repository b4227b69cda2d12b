"""Ends a run that hangs, and shows the stacks of every rank.

If one rank does not join a collective, the other ranks wait for a time-out that names no rank. Here
a thread of each rank notices that nothing happens, writes the stacks of all threads, and ends the
process.

A heartbeat is a forward pass, or a piece of long work without forward passes: a tensor written or
read, a response scored. A rank that waits for others has no heartbeats. Before such a rank ends the
run, it looks at a shared file to see whether another rank still has heartbeats.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

from gspo_megatron.errors import tell

HANGS = "hang"  # in the run folder: rank_NNNNN.txt of each rank
HUNG = 70  # exit code: sysexits.h's EX_SOFTWARE

_FIRST = "first"  # file in HANGS, made by the first rank that ends the run
_MOVING = ".moving"  # file in the run folder: ranks with heartbeats touch it repeatedly
_TICKS = 20  # checks of the clock within the time-out
_LONGEST_TICK = 5.0
# A rank with heartbeats touches the file four times within the time-out. Ranks that wait begin to
# look at the file half way through the time-out, and must not miss a touch.
_TOUCHES = 4


_listeners: list[Callable[[], None]] = []


def heartbeat() -> None:
    """Report that this process has finished a piece of work without forward passes: a tensor
    written or read, a response scored.

    Any thread may call it, at almost no cost. Each piece must take less than half of
    training.hang_timeout_seconds.
    """
    for listener in tuple(_listeners):
        listener()


@contextlib.contextmanager
def heard_by(listener: Callable[[], None]) -> Generator[None]:
    """Call `listener` at each heartbeat while the context lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Heartbeat:
    """A context that ends the process with HUNG after no rank has called `beat` or `heartbeat` for
    `timeout` seconds. With timeout 0 it never ends the process.

    `folder` is the run folder, which all ranks see.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self._folder, self._rank, self._world_size = folder / HANGS, rank, world_size
        self._moving = folder / _MOVING
        self._timeout = timeout
        # The other ranks need time to write their stacks before their launcher ends them.
        self._grace = min(30.0, max(2.0, timeout / 10))
        self._last = time.monotonic()
        self._end_of_context = threading.Event()
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Heartbeat:
        if self._timeout:
            self._last = time.monotonic()
            self._listening.enter_context(heard_by(self.beat))
            self._arm()
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_of_context.set()
        self._listening.close()
        if self._timeout:
            faulthandler.cancel_dump_traceback_later()

    def forget_earlier(self) -> None:
        """Remove the files of an earlier start. Called on the main rank before the other ranks
        enter the context."""
        with contextlib.suppress(OSError):
            for path in (*self._folder.glob("*"), self._moving):
                path.unlink(missing_ok=True)

    def beat(self, *_: object) -> None:
        """Note that the rank is doing something. Takes arguments to serve as a hook."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        tick = min(_LONGEST_TICK, self._timeout / _TICKS)
        last_touch = self._last  # when this rank last touched the shared file
        last_of_others = self._last  # when another rank was last seen to have heartbeats
        file_time: int | None = None
        while not self._end_of_context.wait(tick):
            self._arm()
            if self._end_of_context.is_set():
                faulthandler.cancel_dump_traceback_later()
                return
            now = time.monotonic()
            if self._last > last_touch and now - last_touch > self._timeout / _TOUCHES:
                last_touch = now
                with contextlib.suppress(OSError):
                    self._moving.touch()
            silence = now - max(self._last, last_of_others)
            # Only a rank that has been silent for half the time-out looks at the shared files. The
            # clocks of hosts differ, so the rank compares the file's time with its time one tick
            # before: if they differ, another rank has heartbeats. Ranks do not reach the time-out
            # at the same moment. When the first rank has reached it, all silent ranks end, too.
            is_silent = silence > self._timeout / 2
            time_before, file_time = file_time, self._file_time() if is_silent else None
            if time_before is not None and file_time is not None and file_time != time_before:
                last_of_others, file_time = now, None
            elif silence > self._timeout or (is_silent and (self._folder / _FIRST).exists()):
                self._end(silence)

    def _file_time(self) -> int:
        try:
            return self._moving.stat().st_mtime_ns
        except OSError:
            return 0

    def _arm(self) -> None:
        """Let faulthandler print the stacks and end the process if the watching thread is blocked.
        A thread that does not release the GIL blocks the watching thread, too, but faulthandler
        does not need the GIL."""
        faulthandler.dump_traceback_later(self._timeout + 2 * self._grace, exit=True)

    def _end(self, silence: float) -> None:
        is_first = False
        with contextlib.suppress(OSError):  # another rank was first, or the file system fails too
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _FIRST).touch(exist_ok=False)
            is_first = True
        text = self._stacks(silence)
        with contextlib.suppress(OSError):
            self._path(self._rank).write_text(text, encoding="utf-8")
        tell(text)
        time.sleep(self._grace)
        silent = [r for r in range(self._world_size) if not self._path(r).exists()]
        if is_first and silent:
            names = ", ".join(map(str, silent))
            text = f"no stacks from rank {names}: still making progress, or its node has failed"
            tell(text)
        os._exit(HUNG)

    def _stacks(self, silence: float) -> str:
        head = (
            f"rank {self._rank} on {platform.node()}, process {os.getpid()}: nothing has moved for "
            f"{silence:.0f} s (training.hang_timeout_seconds = {self._timeout:g}); all threads:\n"
        )
        with _scratch() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return head + file.read()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:05d}.txt"


def _scratch() -> IO[str]:
    """Return a file without a name, in memory if possible, because the disk may be full."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+", encoding="utf-8")
    return tempfile.TemporaryFile("w+")
