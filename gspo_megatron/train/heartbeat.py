"""A run in which nothing moves any more is ended, and tells where every rank was standing.

A collective that one rank does not join waits for ever, or until a time-out that names no culprit.
Here a thread of each rank notes that the rank does nothing, writes down the stacks of all its
threads, and ends the process, so that whoever started the ranks ends the others.
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

HANGS = "hang"  # below the run folder: rank_NNNNN.txt of each rank
HUNG = 70  # exit code: sysexits.h's EX_SOFTWARE

_FIRST = "first"  # the file by which the first rank tells the others
_TICKS = 20  # looks at the time within the time-out
_LONGEST_TICK = 5.0


class Heartbeat:
    """Inside the context, `beat` has to be called at least every `timeout` seconds; 0: it has not.

    `folder` is one that all ranks see.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self._folder, self._rank, self._world_size = folder / HANGS, rank, world_size
        self._timeout = timeout
        # For the others to write their stacks, before their launcher ends them.
        self._grace = min(30.0, max(2.0, timeout / 10))
        self._last = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> Heartbeat:
        if self._timeout:
            self._last = time.monotonic()
            self._arm()
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._timeout:
            faulthandler.cancel_dump_traceback_later()

    def forget_earlier(self) -> None:
        """Remove what an earlier start left behind; on the main rank, before the others enter."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob("*"):
                path.unlink()

    def beat(self, *_: object) -> None:
        """The rank is doing something. Takes arguments to serve as a hook."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        tick = min(_LONGEST_TICK, self._timeout / _TICKS)
        while not self._ended.wait(tick):
            self._arm()
            if self._ended.is_set():  # meanwhile
                faulthandler.cancel_dump_traceback_later()
                return
            silence = time.monotonic() - self._last
            # All ranks wait soon after one stops, but not at once; those that look suspicious join
            # the first that is sure. A run that goes well never looks for that file.
            suspicious = silence > self._timeout / 2
            if silence > self._timeout or (suspicious and (self._folder / _FIRST).exists()):
                self._end(silence)

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
