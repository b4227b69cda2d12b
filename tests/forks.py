"""Runs `gspo-megatron` in forks of a process that has imported torch and Megatron-Core.

These imports take four seconds, and the rest of a short run takes one. A fork has the arguments,
environment, folder and streams of a new process, and is a process of its own, but its imports are
done. The same holds for the ranks that it launches. Programs that a test starts by
subprocess.Popen are new interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "gspo_megatron"]
SERVERS = "GSPO_TEST_FORKS"  # the servers' sockets, for commands of shells
# A fork may have other values of these variables than its server, because no import reads them.
_READ_LATE = (
    *("PYTHONPATH", "PATH", "PYTEST_", "HF_", "NLTK_DATA", "VLLM_", "OPENAI_"),
    *("GSPO_SERVER_TOKEN", "GSPO_REWARD_MODEL_KEY", "TERM", "COLUMNS"),
    # In the process of the tests, loading a configuration sets the first two, torch the next two,
    # and Megatron-Core the last ones, when it is given its settings.
    *("GSPO_MODULE_FOLDERS", "GSPO_TOLD_PATHS", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_"),
    "NVTE_",
)
_PRELOADED = ("cli.main", "rl.run", "supervised.run", "verify.parity", "checkpoint.convert")
# Shells start these in new interpreters, because no other test does.
_NEW = (("doctor",), ("report",), ("score",))
_LONGEST = 2**17  # of a request, in bytes
_ROOM = 4096  # for the words of a fork, which other programs see


def can_fork(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a fork runs these words like a new process with this environment."""
    is_ours = [*words[:3]] == COMMAND or (
        words[0] == sys.executable and Path(words[1]).parent == ROOT / "pretrain_scripts"
    )
    first = _first_environ()
    changed = {name for name, value in environ.items() if first.get(name) != value}
    is_late = all(name.startswith(_READ_LATE) for name in changed)
    return is_ours and is_late and sys.platform == "linux"


@functools.cache
def _first_environ() -> dict[str, str]:
    """The environment of the servers."""
    return dict(os.environ)


class Fork:
    """A running fork, with the part of subprocess.Popen that tests use."""

    def __init__(
        self,
        server: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        cwd: str | None,
        files: Sequence[int],
    ) -> None:
        """Ask the server at this socket. `words`: those after `python`. `environ`: the whole
        environment. `files`: the descriptors of the streams."""
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(server)
        request = [[*words], dict(environ), cwd or os.getcwd()]
        socket.send_fds(self._server, [json.dumps(request).encode()], files)
        self.pid = int(self._server.recv(32))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = int(self._server.recv(32))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a fork", timeout or 0) from None
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    words: Sequence[str], environ: Mapping[str, str], cwd: str | None, files: Sequence[int]
) -> Fork:
    """Start words that `can_fork` accepts. `files`: the descriptors of the streams; a terminal
    becomes that of the fork. The fork is killed when the result is no longer used, and when this
    process ends."""
    return Fork(next_server(), words[1:], environ, cwd, files)


def run(
    words: Sequence[str], environ: Mapping[str, str], cwd: str | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run with captured text, for words that `can_fork` accepts."""
    ends = [os.pipe() for _ in range(2)]
    with open(os.devnull) as none, ThreadPoolExecutor(len(ends)) as readers:
        fork = start(words, environ, cwd, [none.fileno(), *(write for _, write in ends)])
        for _, write in ends:
            os.close(write)
        texts = [readers.submit(read_all, read) for read, _ in ends]
        try:
            code = fork.wait(timeout)
        except subprocess.TimeoutExpired:
            fork.kill()
            raise
        return subprocess.CompletedProcess([*words], code, *(text.result() for text in texts))


def read_all(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def shell_environ() -> dict[str, str]:
    """Variables with which a shell's `gspo-megatron` and `python -m gspo_megatron` are forks."""
    servers = _start_servers()
    folder = Path(servers.split(os.pathsep)[0]).parent / "bin"
    own = Path(sys.executable).parent
    return {"PATH": os.pathsep.join([str(folder), str(own), os.environ["PATH"]]), SERVERS: servers}


def run_for_shell(name: str, *words: str) -> None:
    """Be `gspo-megatron` or `python` in a shell, with these words."""
    words = (*COMMAND[1:], *words) if name == "gspo-megatron" else words
    if [*words[:2]] != COMMAND[1:] or words[2:3] in _NEW:
        os.execv(sys.executable, [sys.executable, *words])
    servers = os.environ[SERVERS].split(os.pathsep)
    code = Fork(servers[os.getpid() % len(servers)], words, os.environ, None, [0, 1, 2]).wait()
    sys.exit(code if code >= 0 else 128 - code)


def next_server() -> str:
    """The socket of the server whose turn it is."""
    return next(_turns())


@functools.cache
def _turns() -> Iterator[str]:
    """The sockets of two servers of this process, in turn. Python orders sets differently in each
    server, so a test that compares two runs sees if a result depends on this order."""
    return itertools.cycle(_start_servers().split(os.pathsep))


@functools.cache
def _start_servers() -> str:
    """Start the servers. They end with this process. Returns their sockets, separated by colons."""
    from gspo_megatron.rollout.vllm.process import end_with_parent

    if given := os.environ.get(SERVERS):
        return given
    folder, made = Path(tempfile.mkdtemp(prefix="forks-")), []
    atexit.register(shutil.rmtree, folder)
    for number in range(2):
        made.append(str(folder / str(number)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(made[-1])
            listener.listen(16)
            subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(listener.fileno()), _ROOM * " "],
                pass_fds=[listener.fileno()],
                preexec_fn=end_with_parent,
                env=_first_environ(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
    (folder / "bin").mkdir()
    for name in ("gspo-megatron", "python"):
        program = folder / "bin" / name
        words = shlex.join([sys.executable, "-IS", __file__, name])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
    return os.pathsep.join(made)


def serve(listener: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork for each request. Returns only in a fork, with the words and the environment of its
    request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait
    while True:
        asked, _ = listener.accept()
        if os.fork() == 0:
            break
        asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    text, files, _, _ = socket.recv_fds(asked, _LONGEST, 3)
    words, environ, folder = json.loads(text)
    if (pid := os.fork()) == 0:
        asked.close()
        os.chdir(folder)
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if os.isatty(0):  # a session of its own, at this terminal
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return words, environ
    for descriptor in (0, 1, 2, *files):
        os.close(descriptor)
    with contextlib.suppress(OSError):  # whoever asked has ended
        asked.send(str(pid).encode())
        ended = os.pidfd_open(pid)
        select.select([asked, ended], [], [])
        if not select.select([ended], [], [], 0)[0]:  # nobody waits for the fork any more
            os.kill(pid, signal.SIGKILL)
        asked.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


class Interpreter:
    """What a new interpreter would do, in a fork. `paths`: sys.path without the program's own
    folder and without PYTHONPATH."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.modules = {*sys.modules}

    def become(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run the words after `python`."""
        _show_words([sys.executable, *words])
        os.environ.clear()
        os.environ.update(environ)
        # The objects of the server have seen other files at these descriptors. They are kept: what
        # a launcher's objects have not written yet is not the rank's to write.
        self.earlier = (sys.stdin, sys.stdout, sys.stderr)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            for number, mode, buffering, errors in (
                (0, "r", -1, "strict"),
                (1, "w", -1, "strict"),
                (2, "w", 1, "backslashreplace"),
            )
        )
        importlib.import_module("numpy").random.seed()
        given = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
        is_module = words[0] == "-m"
        own = os.getcwd() if is_module else str(Path(words[0]).parent)
        sys.path[:] = [own, *given, *self.paths]
        importlib.invalidate_caches()
        sys.argv = [*words[is_module:]]
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")

    def forget(self) -> None:
        """Forget the modules of the user, which ranks import again."""
        known = tuple(f"{path}{os.sep}" for path in (ROOT, sys.base_prefix, sys.prefix))
        for name in {*sys.modules} - self.modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and not file.startswith(known):
                del sys.modules[name]

    def popen(self) -> type[subprocess.Popen[Any]]:
        """subprocess.Popen, but the command is forked."""
        interpreter = self

        class Forked(subprocess.Popen):
            def _execute_child(self, args: Any, *given: Any) -> None:
                if [*args[:3]] != COMMAND:
                    super()._execute_child(args, *given)
                    return
                pass_fds, environ, pipes, is_leader = given[3], given[5], given[9:15], given[20]
                self.pid = os.fork()
                if self.pid == 0:
                    if is_leader:
                        os.setsid()
                    _take_streams((pipes[0], pipes[3], pipes[5]), pass_fds)
                    interpreter.forget()
                    # A temporary folder of the launcher is not the rank's to remove.
                    weakref.finalize._registry.clear()
                    _exit_after(lambda: interpreter.become(args[1:], environ))
                self._child_created = True
                self._close_pipe_fds(*pipes)

        return Forked


def _take_streams(streams: Sequence[int], kept: Sequence[int]) -> None:
    """Make these descriptors the streams of this process (-1: the stream stays). Close all others
    except `kept`, and handle signals as a new process does."""
    for number, descriptor in enumerate(streams):
        if descriptor != -1:
            os.dup2(descriptor, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the list itself
                os.close(number)
    for number in range(1, signal.NSIG):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _show_words(words: Sequence[str]) -> None:
    """Show these words as the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # proc(5): arg_start and arg_end
    shown = b"".join(word.encode() + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _exit_after(program: Any) -> None:
    """Run the program and end this process as an interpreter does, without the callers' code."""
    code: Any = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (the interpreter's last handler)
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def main(descriptor: int) -> None:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    interpreter = Interpreter([path for path in sys.path[1:] if path not in given])
    from gspo_megatron.process import launcher

    for name in _PRELOADED:
        importlib.import_module(f"gspo_megatron.{name}")
    interpreter.modules = {*sys.modules}
    assert "huggingface_hub" not in sys.modules, "reads its variables when it is imported"
    # The launcher has threads that read the output of ranks; its forks use none of their locks.
    warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
    gc.collect()
    gc.freeze()
    words, environ = serve(socket.socket(fileno=descriptor))
    launcher.subprocess = type(sys)("subprocess")
    vars(launcher.subprocess).update(vars(subprocess), Popen=interpreter.popen())
    interpreter.become(words, environ)


if __name__ == "__main__":
    run_for_shell(*sys.argv[1:]) if not sys.argv[1].isdigit() else main(int(sys.argv[1]))
