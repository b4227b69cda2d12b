"""All ranks of a run on this machine: started together, ended together. Standard library only.

Rank 0 writes straight to the terminal. What the others write is kept, the last lines of it, and
shown only of the rank that brought the run down: one death breaks every connection of the others,
and their errors, a screenful each, say nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from gspo_megatron.cli.failures import (
    STOPPED,
    USER_ERROR,
    Failure,
    is_lost_connection,
    parse_failure,
)
from gspo_megatron.cli.ranks import FAILURE_DESCRIPTOR, LAUNCHER_PID
from gspo_megatron.cli.rendezvous import rank_environment, reserved_port

GRACE_SECONDS = 5.0  # from the request to end until SIGKILL
SETTLE_SECONDS = 1.0  # from the first death until the others are ended: it may not be the cause

_LINES_KEPT = 200  # of a rank's output
_LONGEST_LINE = 8192  # bytes: a rank that writes no line breaks is kept within bounds too
_DRAIN_SECONDS = 1.0
_SHOW_CURSOR = "\x1b[?25h"


def launch(
    command: Sequence[str],
    world_size: int,
    environ: Mapping[str, str] | None = None,
    *,
    grace_seconds: float = GRACE_SECONDS,
    settle_seconds: float = SETTLE_SECONDS,
    saves_on_signals: bool = False,
) -> int:
    """Run `command` as ranks 0 to world_size - 1 of this machine and wait for all of them.

    `environ` is the environment they start from, os.environ unless given; `rank_environment` says
    what is added. Returns 0 when all ranks did, the code of the rank that caused the failure
    (128 + n where signal n killed it), or 128 + n after SIGINT, SIGTERM or SIGHUP to the launcher.
    No rank outlives the call. SIGUSR1 is passed on, and ranks that end with STOPPED after it make
    that the code.

    `saves_on_signals`: the ranks do so after SIGTERM too. It is passed on once, and they take the
    time they need; a second one ends them.

    Raises UserError where MASTER_PORT is set and cannot be used.
    """
    # Linux ties a rank's life to the thread that started it, and signals come to this one.
    assert threading.current_thread() is threading.main_thread(), "launched off the main thread"
    environ = dict(os.environ if environ is None else environ)
    events: queue.SimpleQueue[_Rank | signal.Signals] = queue.SimpleQueue()
    ranks: list[_Rank] = []
    with reserved_port(environ) as port, _signals_to(events) as pass_on_from_now:
        try:
            for number in range(world_size):
                added = rank_environment(environ, number, world_size, port)
                ranks.append(_Rank(number, command, {**environ, **added}, events))
            pass_on_from_now()
            supervisor = _Supervisor(ranks, events, grace_seconds, settle_seconds)
            supervisor.waits_after_sigterm = saves_on_signals
            supervisor.run()
        finally:
            for rank in ranks:
                rank.kill()
        if supervisor.failed or supervisor.interrupted_by:
            _restore_cursor()
        if supervisor.failed:
            return _tell(supervisor.failed, world_size)
        if supervisor.interrupted_by:
            return 128 + supervisor.interrupted_by
        return STOPPED if any(rank.code == STOPPED for rank in ranks) else 0


class _Rank:
    """One process; it puts itself into `events` when it has ended."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        events: queue.SimpleQueue[_Rank | signal.Signals],
    ) -> None:
        self.number = number
        self.failure: Failure | None = None
        self._tail: deque[str] = deque(maxlen=_LINES_KEPT)
        self._events = events
        # A file without a name: nothing is left behind, however this program ends.
        self._failure_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        descriptor = self._failure_file.fileno()
        ours = {LAUNCHER_PID: str(os.getpid()), FAILURE_DESCRIPTOR: str(descriptor)}
        captured = number > 0
        self._process = subprocess.Popen(
            command,
            env={**environ, **ours},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if captured else None,
            stderr=subprocess.STDOUT if captured else None,
            # A session of its own: Ctrl-C on the terminal reaches the launcher alone, which passes
            # it on once; and the rank's own children can be ended with it.
            start_new_session=True,
            pass_fds=[descriptor],
        )
        self._drain = threading.Thread(target=self._keep_output, daemon=True) if captured else None
        if self._drain is not None:
            self._drain.start()
        threading.Thread(target=self._await_end, daemon=True).start()

    @property
    def code(self) -> int:
        """The exit code as a shell shows it; only after the end."""
        code = self._process.returncode
        assert code is not None, "the rank is still running"
        return code if code >= 0 else 128 - code

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        """End the process and its children, unless it has ended."""
        if self._process.poll() is None:
            self.kill_group()

    def kill_group(self) -> None:
        """End the process and its children, or those that it left behind; only soon after."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def output(self) -> list[str]:
        """The last lines it wrote, ending with what it told of its failure."""
        return [*self._tail, *(self.failure.text.splitlines() if self.failure else [])]

    def is_user_error(self) -> bool:
        return self.failure.is_user_error if self.failure else self.code == USER_ERROR

    def obscurity(self) -> int:
        """How little its end explains; of several failures the least obscure is the cause."""
        if self.is_user_error():
            return 0
        return 2 if is_lost_connection("\n".join(self.output())) else 1

    def manner_of_death(self) -> str:
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _await_end(self) -> None:
        code = self._process.wait()
        if code != 0:
            # Helpers of a rank that ended well may have something left to do, these have not.
            self.kill_group()
        if self._drain is not None:
            self._drain.join(_DRAIN_SECONDS)
        with self._failure_file as file:
            file.seek(0)
            self.failure = parse_failure(file.read().decode("utf-8", errors="replace"))
        self._events.put(self)

    def _keep_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None, "not captured"
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                self._tail.append(line.decode("utf-8", errors="replace").rstrip("\r\n"))


class _Supervisor:
    """Waits for the ranks; after a failure or a signal, sees to it that all of them end.

    `failed` lists the ranks that failed by themselves, in order; `interrupted_by` is the signal
    that the launcher got, where one came first.
    """

    def __init__(
        self,
        ranks: Sequence[_Rank],
        events: queue.SimpleQueue[_Rank | signal.Signals],
        grace_seconds: float,
        settle_seconds: float,
    ) -> None:
        self.failed: list[_Rank] = []
        self.interrupted_by: signal.Signals | None = None
        self._running = list(ranks)
        self._events = events
        self._grace_seconds = grace_seconds
        self._settle_seconds = settle_seconds
        self._deadline: float | None = None  # when the next stage of ending begins
        self._stopping = False
        self._killed = False
        self.waits_after_sigterm = False
        self._was_asked = False  # to save the run and end

    def run(self) -> None:
        """Return when every rank has ended."""
        while self._running:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                if self._killed:
                    return  # in the kernel's hands, where nothing can end it
                self._kill() if self._stopping else self._stop(signal.SIGTERM)
                continue
            if isinstance(event, _Rank):
                self._on_end(event)
            else:
                self._on_signal(event)

    def _on_end(self, rank: _Rank) -> None:
        self._running.remove(rank)
        if self._stopping:
            rank.kill_group()
            return
        if rank.code in (0, STOPPED):
            return
        if self._was_asked and rank.code == 128 + signal.SIGTERM:
            # It was not ready for the signal yet: there is nothing to save.
            self.interrupted_by = signal.SIGTERM
            self._stop(signal.SIGTERM)
            return
        self.failed.append(rank)
        if rank.is_user_error():
            self._stop(signal.SIGTERM)  # no other rank can tell more
        elif self._deadline is None:
            self._deadline = time.monotonic() + self._settle_seconds

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGUSR1:
            for rank in self._running:
                rank.send(signum)
        elif self._stopping:
            self._kill()  # asked for twice
        elif signum == signal.SIGTERM and self.waits_after_sigterm and not self._was_asked:
            self._was_asked = True
            print("told to end: the run is saved first; once more ends it now", file=sys.stderr)
            for rank in self._running:
                rank.send(signum)
        else:
            if not self.failed:
                self.interrupted_by = signum
            self._stop(signum)

    def _stop(self, signum: signal.Signals) -> None:
        self._stopping = True
        self._deadline = time.monotonic() + self._grace_seconds
        for rank in self._running:
            rank.send(signum)

    def _kill(self) -> None:
        self._killed = True
        self._deadline = time.monotonic() + self._grace_seconds
        for rank in self._running:
            rank.kill()


@contextlib.contextmanager
def _signals_to(
    events: queue.SimpleQueue[_Rank | signal.Signals],
) -> Iterator[Callable[[], object]]:
    """Turn signals to this process into events; yields a function to call once the ranks started.

    Ranks inherit that SIGUSR1 is ignored: one that arrives before a rank is ready for it must not
    end the rank, which is what an unhandled SIGUSR1 does.
    """

    def handle(signum: int, _frame: object) -> None:
        events.put(signal.Signals(signum))

    handlers = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGUSR1: signal.SIG_IGN}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means that it shall not end
        handlers[signal.SIGHUP] = handle
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield lambda: signal.signal(signal.SIGUSR1, handle)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _tell(failed: Sequence[_Rank], world_size: int) -> int:
    """Print what brought the run down, the cause last, and return its exit code."""
    cause = min(failed, key=_Rank.obscurity)  # the first of several that explain as much
    if cause.is_user_error():
        # Rank 0 without a report of its own has printed its message already.
        lines = cause.failure.text.splitlines() if cause.failure else cause.output()
    else:
        prefix = f"[rank {cause.number}] " if cause.number else ""
        lines = [prefix + line for line in cause.output()]
        others = [f"rank {rank.number}" for rank in failed if rank is not cause]
        if others:
            lines.append(f"failed too, and not shown: {', '.join(others)}")
        why = f": {cause.failure.summary}" if cause.failure else ""
        lines.append(f"rank {cause.number} of {world_size} {cause.manner_of_death()}{why}")
    for line in lines:
        print(line, file=sys.stderr)
    return cause.code


def _restore_cursor() -> None:
    """A live progress bar hides the cursor, and a rank that was ended did not put it back."""
    if sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)
