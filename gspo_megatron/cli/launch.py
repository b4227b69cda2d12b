"""Starts all ranks of a run on this machine and ends them together. Standard library only.

Rank 0 writes straight to the terminal. Of the other ranks the last lines are kept, and shown only
for the rank that caused a failure: one death breaks the connections of all others, and their errors
explain nothing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
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
from gspo_megatron.errors import UserError

GRACE_SECONDS = 5.0  # from the request to end until SIGKILL
SETTLE_SECONDS = 1.0  # the first rank that dies may not be the cause: wait this long for others

_LINES_KEPT = 200  # of a rank's output
_LONGEST_LINE = 8192  # bytes, for a rank that writes no line breaks
_DRAIN_SECONDS = 1.0
_SHOW_CURSOR = "\x1b[?25h"
_Events = queue.SimpleQueue["_Rank | signal.Signals"]  # ranks that ended, and signals


def launch(
    command: Sequence[str],
    world_size: int,
    *,
    grace_seconds: float = GRACE_SECONDS,
    settle_seconds: float = SETTLE_SECONDS,
    saves_on_signals: bool = False,
) -> int:
    """Run `command` as ranks 0 to world_size - 1 of this machine and wait for all of them.

    The ranks get this process's environment and the variables of `rank_environment`.
    Returns 0 when all ranks did, the code of the rank that caused the failure (128 + n where signal
    n killed it), or 128 + n after SIGINT, SIGTERM or SIGHUP to the launcher. No rank outlives the
    call. SIGUSR1 is passed on; the code is STOPPED if ranks end with it.

    `saves_on_signals`: the ranks save the run after SIGTERM too. The first SIGTERM is passed on and
    the ranks take the time they need; a second one ends them.

    Raises UserError where MASTER_PORT is set and cannot be used.
    """
    # Linux ties a rank's life to the thread that started it, and signals come to the main thread.
    assert threading.current_thread() is threading.main_thread(), "launched off the main thread"
    events: _Events = queue.SimpleQueue()
    ranks: list[_Rank] = []
    with reserved_port(os.environ) as port, _signals_to(events) as pass_on_from_now:
        try:
            for number in range(world_size):
                added = rank_environment(os.environ, number, world_size, port)
                ranks.append(_Rank(number, command, {**os.environ, **added}, events))
            pass_on_from_now()
            supervisor = _Supervisor(ranks, events, grace_seconds, settle_seconds, saves_on_signals)
            supervisor.run()
        finally:
            for rank in ranks:
                rank.kill()
        failed, interrupted_by = supervisor.failed, supervisor.interrupted_by
        if (failed or interrupted_by) and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)  # a progress bar that was cut off has hidden it
        if failed:
            return _report(failed, world_size)
        if interrupted_by:
            return 128 + interrupted_by
        return STOPPED if any(rank.code == STOPPED for rank in ranks) else 0


def rank_environment(
    environ: Mapping[str, str], number: int, world_size: int, port: int
) -> dict[str, str]:
    """The variables that make a process rank `number` of `world_size`, all on this machine.

    Threads and gloo's network interface are left as they are where `environ` sets them.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),  # else every rank takes all cores
        # Gloo looks up the address of the host's name, which many laptops cannot resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **{name: value for name, value in defaults.items() if name not in environ},
    }


@contextlib.contextmanager
def reserved_port(environ: Mapping[str, str]) -> Iterator[int]:
    """A TCP port for rank 0 to listen on: MASTER_PORT where set, else a free one.

    Inside the context the port is bound but not listened on. Rank 0 can listen there, because its
    store reuses addresses; no other program gets the port while rank 0 imports torch.

    Raises UserError where MASTER_PORT is no port or is in use.
    """
    given = environ.get("MASTER_PORT", "")
    if given and not (given.isascii() and given.isdigit() and 1 <= int(given) <= 65535):
        raise UserError(
            f"MASTER_PORT = {given!r} in the environment: not a port; legal: 1 to 65535"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", int(given or 0)))
        except OSError as error:
            if not given:
                raise
            raise UserError(
                f"MASTER_PORT = {given} in the environment: port {given} cannot be used "
                f"({error.strerror}); unset it to have a free one chosen"
            ) from error
        yield holder.getsockname()[1]


class _Rank:
    """One process; it puts itself into `events` when it has ended."""

    def __init__(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], events: _Events
    ) -> None:
        self.number = number
        self.failure: Failure | None = None
        self._tail: deque[str] = deque(maxlen=_LINES_KEPT)
        self._events = events
        # A file without a name leaves nothing behind, however this program ends.
        self._failure_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        descriptor = self._failure_file.fileno()
        is_captured = number > 0
        self._process = subprocess.Popen(
            command,
            env={**environ, LAUNCHER_PID: str(os.getpid()), FAILURE_DESCRIPTOR: str(descriptor)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_captured else None,
            stderr=subprocess.STDOUT if is_captured else None,
            # In a session of its own Ctrl-C does not reach the rank: only the launcher, which
            # passes it on once. And the rank's children can be ended with the rank.
            start_new_session=True,
            pass_fds=[descriptor],
        )
        self._drain = threading.Thread(target=self._keep_output, daemon=True)
        if is_captured:
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
        """End the process and its children. If the process has ended, only at once: another one may
        get its number later."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def output(self) -> list[str]:
        """The last lines it wrote, and its report of its failure."""
        return [*self._tail, *(self.failure.text.splitlines() if self.failure else [])]

    def is_user_error(self) -> bool:
        return self.failure.is_user_error if self.failure else self.code == USER_ERROR

    def obscurity(self) -> int:
        """How little its end explains. Of several failures the least obscure is the cause."""
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
        if self._process.wait() != 0:
            self.kill_group()  # children of a rank that ended well may go on
        if self._drain.is_alive():
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
    that the launcher got before any failure.
    """

    def __init__(
        self,
        ranks: Sequence[_Rank],
        events: _Events,
        grace_seconds: float,
        settle_seconds: float,
        saves_on_sigterm: bool,
    ) -> None:
        self.failed: list[_Rank] = []
        self.interrupted_by: signal.Signals | None = None
        self._running = list(ranks)
        self._events = events
        self._grace_seconds, self._settle_seconds = grace_seconds, settle_seconds
        self._saves_on_sigterm = saves_on_sigterm
        self._is_saving = False
        self._is_stopping = False
        self._is_killed = False
        self._deadline: float | None = None  # of settling, of ending, of being killed

    def run(self) -> None:
        """Return when every rank has ended."""
        while self._running:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                if self._is_killed:
                    return  # stuck in the kernel, where nothing can end it
                self._kill() if self._is_stopping else self._stop(signal.SIGTERM)
                continue
            if isinstance(event, _Rank):
                self._on_end(event)
            else:
                self._on_signal(event)

    def _on_end(self, rank: _Rank) -> None:
        self._running.remove(rank)
        if self._is_stopping:
            rank.kill_group()
        elif rank.code in (0, STOPPED):
            pass
        elif self._is_saving and rank.code == 128 + signal.SIGTERM:
            # The signal came before the rank could handle it: there is nothing to save.
            self.interrupted_by = signal.SIGTERM
            self._stop(signal.SIGTERM)
        else:
            self.failed.append(rank)
            if rank.is_user_error():
                self._stop(signal.SIGTERM)  # no other rank can explain more
            elif self._deadline is None:
                self._deadline = time.monotonic() + self._settle_seconds

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGUSR1:
            self._send(signum)
        elif self._is_stopping:
            self._kill()  # asked for twice
        elif signum == signal.SIGTERM and self._saves_on_sigterm and not self._is_saving:
            self._is_saving = True
            print("told to end: the run is saved first; once more ends it now", file=sys.stderr)
            self._send(signum)
        else:
            if not self.failed:
                self.interrupted_by = signum
            self._stop(signum)

    def _send(self, signum: signal.Signals) -> None:
        for rank in self._running:
            rank.send(signum)

    def _stop(self, signum: signal.Signals) -> None:
        self._is_stopping = True
        self._deadline = time.monotonic() + self._grace_seconds
        self._send(signum)

    def _kill(self) -> None:
        self._is_killed = True
        self._deadline = time.monotonic() + self._grace_seconds
        for rank in self._running:
            rank.kill()


@contextlib.contextmanager
def _signals_to(events: _Events) -> Iterator[Callable[[], object]]:
    """Turn signals to this process into events; yields a function to call once the ranks started.

    Until then SIGUSR1 is ignored, and the ranks inherit that: an unhandled SIGUSR1 would end a rank
    that is not ready for it.
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


def _report(failed: Sequence[_Rank], world_size: int) -> int:
    """Print why the run failed, the cause last, and return its exit code."""
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
