"""Starts all ranks of a run on this machine, and ends them together. Standard library only.

The first rank of the machine writes straight to the terminal. The launcher keeps the last lines of
every other rank. After a failure the launcher shows only the lines of the rank that caused it,
because the other ranks only report lost connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from gspo_megatron.addresses import STORE_DESCRIPTOR, listen
from gspo_megatron.errors import UserError
from gspo_megatron.process.cores import usable_cores
from gspo_megatron.process.failures import (
    STOPPED,
    USER_ERROR,
    Failure,
    is_lost_connection,
    parse_failure,
)
from gspo_megatron.process.nodes import Node, port_in
from gspo_megatron.process.ranks import FAILURE_DESCRIPTOR, LAUNCHER_PID
from gspo_megatron.process.signals import SAVES, signal_name

LOOPBACK = "127.0.0.1"
_TAIL_LINES = 200  # the number of last lines of a rank's output that the launcher keeps
_LONGEST_LINE = 8192  # in bytes, because a rank may write no line breaks
_DRAIN_SECONDS = 1.0
_POLL_SECONDS = 0.02
_SAVING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def launch(
    command: Sequence[str],
    world_size: int,
    *,
    grace_seconds: float = 5.0,
    settle_seconds: float = 1.0,
    saves_on_signals: bool = False,
    node: Node | None = None,
) -> int:
    """Run `command` as ranks 0 to world_size - 1 on this machine, and wait for all of them. If the
    job has several machines, `node` is the place of this machine among them. Then only the ranks of
    this machine are started. Launchers on the other machines start the ranks there.

    Returns 0 if all ranks end with code 0, and STOPPED if all end with 0 or STOPPED. After a
    failure, returns the exit code of the rank that caused it (128 + n if signal n killed it). After
    SIGINT, SIGTERM or SIGHUP to the launcher, returns 128 + n. SIGUSR1 is passed on to the ranks.
    No rank outlives the call. Raises UserError if MASTER_PORT is set and cannot be used.

    `grace_seconds`: the time from the request to end until SIGKILL. `settle_seconds`: after a
    failure, the launcher waits this long for failures of other ranks, because the first rank that
    dies may not be the cause. `saves_on_signals`: after SIGTERM, SIGINT and SIGHUP the ranks save
    the run, without a time limit. A second signal other than SIGHUP ends the ranks at once. If a
    rank cannot save yet, the first signal ends this rank, and then the launcher ends all other
    ranks.
    """
    # Linux ends a rank when the thread that started it ends. Signals arrive in the main thread.
    assert threading.current_thread() is threading.main_thread(), "launched off the main thread"
    job = _Job(grace_seconds, settle_seconds, saves_on_signals)
    if node is not None and node.count == 1:
        node = None
    # With several machines, rank 0 opens the socket itself, at an address that the other machines
    # can reach.
    store = store_socket(os.environ) if node is None else contextlib.nullcontext()
    with store as listener, _collect_signals(job.signals) as collect_usr1:
        try:
            for number in range(world_size // (node.count if node else 1)):
                port = 0 if listener is None else listener.getsockname()[1]
                variables = rank_environment(os.environ, number, world_size, port, node)
                variables |= {SAVES: "1"} if saves_on_signals else {}
                store_fd = None if number or listener is None else listener.fileno()
                job.ranks.append(_Rank(command, {**os.environ, **variables}, store_fd))
            if listener is not None:
                listener.close()  # rank 0 has inherited it
            collect_usr1()
            job.supervise()
        finally:
            job.send(signal.SIGKILL)
        if (job.failed or job.interrupted_by) and sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # show the cursor: a progress bar may have hidden it
        if job.failed:
            return _report(job.failed, world_size)
        if job.interrupted_by:
            return 128 + job.interrupted_by
        return STOPPED if any(rank.code == STOPPED for rank in job.ranks) else 0


def rank_environment(
    environ: Mapping[str, str], number: int, world_size: int, port: int, node: Node | None = None
) -> dict[str, str]:
    """Return the variables that make a process the rank with this number on its machine. If
    `environ` sets the number of threads or gloo's network interface, this setting is kept.

    node: the place of this machine, if the job has several machines. Then gloo uses the network
    interface that leads to machine 0 (platform.rendezvous), and `port` is not read."""
    ranks_here = world_size // node.count if node else world_size
    # Otherwise every rank would use all cores.
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks_here))}
    if node is None:
        # Gloo looks up the address of the host's name, which many laptops cannot resolve.
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "RANK": str(number + (node.first_rank(world_size) if node else 0)),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_here),
        "MASTER_ADDR": node.master if node else LOOPBACK,
        "MASTER_PORT": str(node.port if node else port),
        **{name: value for name, value in defaults.items() if name not in environ},
    }


@contextlib.contextmanager
def store_socket(environ: Mapping[str, str]) -> Generator[socket.socket]:
    """Yield the socket at which rank 0 will answer the other ranks: on loopback, at MASTER_PORT if
    it is set, else at a free port.

    The socket listens from now on, and rank 0 inherits it. So no other program can take the port
    while rank 0 imports torch. Raises UserError if MASTER_PORT is not a port or is in use.
    """
    port = port_in(environ, default=0)  # 0: the system chooses a free one
    try:
        listener = listen(LOOPBACK, port)
    except OSError as error:
        if not port:
            raise
        raise UserError(
            f"MASTER_PORT = {port} in the environment: port {port} cannot be used "
            f"({error.strerror}); unset it to have a free one chosen"
        ) from error
    with listener:
        yield listener


class _Rank:
    """One process, and the last lines of its output."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        store_fd: int | None = None,
    ) -> None:
        """store_fd: the descriptor of the socket on which rank 0 listens; None for all other
        ranks."""
        self.number = int(environ["RANK"])
        self.is_shown = environ["LOCAL_RANK"] == "0"
        self.failure: Failure | None = None  # the rank's own report, known after its end
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        # A file without a name leaves nothing behind, however this program ends.
        self._failure_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        descriptor = self._failure_file.fileno()
        is_captured = not self.is_shown
        self._process = subprocess.Popen(
            command,
            env={
                **environ,
                LAUNCHER_PID: str(os.getpid()),
                FAILURE_DESCRIPTOR: str(descriptor),
                **({} if store_fd is None else {STORE_DESCRIPTOR: str(store_fd)}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_captured else None,
            stderr=subprocess.STDOUT if is_captured else None,
            # The rank gets its own session. Then Ctrl-C reaches only the launcher, which passes it
            # on once. And the rank's children can be ended with the rank.
            start_new_session=True,
            pass_fds=[descriptor] if store_fd is None else [descriptor, store_fd],
        )
        self._drain = threading.Thread(target=self._keep_output, daemon=True)
        if is_captured:
            self._drain.start()

    def has_ended(self) -> bool:
        """Return whether the process has ended. Do not call this again after it has returned
        True."""
        if self._process.poll() is None:
            return False
        if self._process.returncode != 0:  # children of a rank with exit code 0 may continue
            self.kill_group()
            if self._drain.is_alive():
                self._drain.join(_DRAIN_SECONDS)
        with self._failure_file as file:
            file.seek(0)
            self.failure = parse_failure(file.read().decode("utf-8", errors="replace"))
        return True

    @property
    def code(self) -> int:
        """The exit code as a shell shows it. It is valid only after the process has ended."""
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the process unless it has ended. SIGKILL goes to its children too."""
        if signum == signal.SIGKILL and self._process.poll() is None:
            self.kill_group()
        else:
            self._process.send_signal(signum)

    def kill_group(self) -> None:
        """End the process and its children. Do not call it long after the process has ended,
        because the system may give the process id to another process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def output(self) -> list[str]:
        """Return the last lines that the rank wrote, and its report of its failure."""
        return [*self._tail, *(self.failure.text.splitlines() if self.failure else [])]

    def is_user_error(self) -> bool:
        return self.failure.is_user_error if self.failure else self.code == USER_ERROR

    def cause_order(self) -> int:
        """Return 0 for a user error, 2 for a lost connection, 1 for any other failure. The rank
        with the lowest number counts as the cause."""
        if self.is_user_error():
            return 0
        return 2 if is_lost_connection("\n".join(self.output())) else 1

    def describe_end(self) -> str:
        """Return how the process ended, such as "ended with exit code 1"."""
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"ended with exit code {code}"

    def _keep_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None, "not captured"
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                self._tail.append(line.decode("utf-8", errors="replace").rstrip("\r\n"))


@dataclass
class _Job:
    """The ranks of a run, which end together after a failure or a signal."""

    grace_seconds: float
    settle_seconds: float
    saves_on_signals: bool
    ranks: list[_Rank] = field(default_factory=list)
    signals: deque[signal.Signals] = field(default_factory=deque)  # not handled yet
    # ranks that failed by themselves, in the order of their ends
    failed: list[_Rank] = field(default_factory=list)
    interrupted_by: signal.Signals | None = None  # a signal to the launcher before any rank failed
    saving_by: signal.Signals | None = None  # the signal at which the ranks save the run
    is_stopping: bool = False
    is_killed: bool = False
    deadline: float = float("inf")  # time at which the next step of ending the ranks is due

    def supervise(self) -> None:
        """Wait until every rank has ended."""
        running = list(self.ranks)
        while running:
            for rank in [rank for rank in running if rank.has_ended()]:
                running.remove(rank)
                self.on_end(rank)
            while self.signals:
                self.on_signal(self.signals.popleft())
            if time.monotonic() > self.deadline:
                if self.is_killed:
                    return  # the rank is stuck in the kernel, where nothing can end it
                self.end_by(signal.SIGKILL if self.is_stopping else signal.SIGTERM)
            time.sleep(_POLL_SECONDS)

    def on_end(self, rank: _Rank) -> None:
        if self.is_stopping:
            rank.kill_group()
        elif rank.code in (0, STOPPED):
            pass
        elif self.saving_by is not None and rank.code == 128 + self.saving_by:
            # The signal came before the rank could handle it, so there is nothing to save.
            self.interrupted_by = self.saving_by
            self.end_by(self.saving_by)
        else:
            self.failed.append(rank)
            if rank.is_user_error():
                self.end_by(signal.SIGTERM)  # this is the cause: do not wait for other failures
            else:
                self.deadline = min(self.deadline, time.monotonic() + self.settle_seconds)

    def on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGUSR1:
            self.send(signum)
        elif signum == signal.SIGHUP and self.saving_by is not None:
            pass  # a terminal that closes sends it more than once, also after SIGTERM
        elif self.is_stopping:
            self.end_by(signal.SIGKILL)  # the second request
        elif signum in _SAVING_SIGNALS and self.saves_on_signals and self.saving_by is None:
            self.saving_by = signum
            if signum != signal.SIGINT:  # at Ctrl-C rank 0 tells whether the run is saved
                _tell("told to end: saving the run; a second signal ends it now")
            self.send(signum)
        else:
            if not self.failed:
                self.interrupted_by = signum
            self.end_by(signum)

    def send(self, signum: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send(signum)

    def end_by(self, signum: signal.Signals) -> None:
        self.is_stopping = True
        self.is_killed = signum == signal.SIGKILL
        self.deadline = time.monotonic() + self.grace_seconds
        self.send(signum)


@contextlib.contextmanager
def _collect_signals(queue: deque[signal.Signals]) -> Generator[Callable[[], object]]:
    """Put signals to this process into `queue` while the context lasts. Yields a function that also
    collects SIGUSR1; call it when the ranks have started. Until then SIGUSR1 is ignored, and the
    ranks inherit this. Otherwise SIGUSR1 would end a rank that has no handler yet."""

    def handle(signum: int, _frame: object) -> None:
        queue.append(signal.Signals(signum))

    handlers = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGUSR1: signal.SIG_IGN}
    # under nohup SIGHUP must not end the run
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = handle
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield lambda: signal.signal(signal.SIGUSR1, handle)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _report(failed: Sequence[_Rank], world_size: int) -> int:
    """Print why the run failed, the cause last, and return its exit code."""
    cause = min(failed, key=_Rank.cause_order)  # of equal ones, the rank that failed first
    failure = cause.failure
    if cause.is_user_error():
        # If rank 0 has no report, it has already printed its message.
        lines = failure.text.splitlines() if failure else cause.output()
    else:
        prefix = "" if cause.is_shown else f"[rank {cause.number}] "
        lines = [prefix + line for line in cause.output()]
        others = [f"rank {rank.number}" for rank in failed if rank is not cause]
        if others:
            lines.append(f"failed too, and not shown: {', '.join(others)}")
        why = f": {failure.summary}" if failure else ""
        lines.append(f"rank {cause.number} of {world_size} {cause.describe_end()}{why}")
    _tell(*lines)
    return cause.code


def _tell(*lines: str) -> None:
    """Print lines to stderr. If nobody reads stderr any more, go on without them: a signal to a
    whole process group also ends a program such as `tee`."""
    try:
        for line in lines:
            print(line, file=sys.stderr, flush=True)
    except OSError:
        # the rest of the output would fail at the end of this process, and change its exit code
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
