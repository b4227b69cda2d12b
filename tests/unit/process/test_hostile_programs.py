"""Hostile programs in the sandboxes of root and of an ordinary user. No program may succeed."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gspo_megatron.process import sandbox, sandbox_memory
from gspo_megatron.process.sandbox import Limits, Outcome
from tests.unit.process.hostile_programs import LIMITED, OUT_OF_TIME, PRELUDE, REFUSED
from tests.unit.process.ordinary_user import User

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the programs use the system call numbers of x86-64"
)

# a function that runs programs, each with its time limit
Runs = Callable[[Sequence[tuple[str, float]]], list[Outcome]]
LIMITS = Limits(memory_mb=256, processes=32, disk_mb=8, output_bytes=1 << 20)

# These errors show a mistake in the hostile program itself, which then tries nothing.
MISWRITTEN = ("SyntaxError", "NameError", "AttributeError")
FORKED = "if os.fork(): os.wait(); raise SystemExit(1)\n"

# Runs each program in a process, and prints the reason for its end. "held" means that the sandbox
# did not stop the program.
DRIVER = """
import json, os, sys
for name, text in json.loads(TABLE):
    sys.stdout.flush()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            names = {}
            exec(PRELUDE, names)
            exec(text, names)
            told = "got what it wanted"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(theirs, told.encode(errors="replace")[:200])
        os._exit(0)
    os.close(theirs)
    told = b""
    while part := os.read(ours, 999):
        told += part
    os.close(ours)
    _, status = os.waitpid(child, 0)
    print(json.dumps([name, told.decode() or f"ended with status {status}"]))
"""


@contextmanager
def name_server() -> Iterator[int]:
    """A server that answers every datagram. Yields its port."""
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def answer() -> None:
            while (question := server.recvfrom(99))[0]:
                server.sendto(b"192.0.2.1", question[1])

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        server.sendto(b"", server.getsockname())
        thread.join()


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, str]]:
    """The things outside that the programs try to reach: ports, a socket, shared memory, and this
    process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        name_server() as datagrams,
    ):
        named.bind(f"\0gspo_escape_{os.getpid()}")
        named.listen()
        shared = Path(f"/dev/shm/gspo_escape_{os.getpid()}")
        shared.write_text("secret")
        shared.chmod(0o644)
        yield {
            "PORT": str(server.getsockname()[1]),
            "DATAGRAMS": str(datagrams),
            "OWNER": str(os.getpid()),
        }
        shared.unlink()


def filled(program: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        program = program.replace(name, value)
    return program


@pytest.fixture(scope="module", params=["this user", "an ordinary user"])
def runs(
    request: pytest.FixtureRequest,
    user: User,
    outside: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    """A function that runs programs. The folder of the programs holds a secret, and the environment
    holds another secret."""
    is_other = request.param == "an ordinary user"
    if not is_other and os.geteuid() != 0:
        pytest.skip("this user is an ordinary one")
    folder = user.folder if is_other else tmp_path_factory.mktemp("run")
    (folder / "secret").write_text("secret")
    places = {**outside, "FOLDER": str(folder)}

    def run(given: tuple[str, float]) -> Outcome:
        return sandbox.run(given[0].encode(), b"", replace(LIMITS, seconds=given[1]))

    def run_all(programs: Sequence[tuple[str, float]]) -> list[Outcome]:
        programs = [(filled(program, places), seconds) for program, seconds in programs]
        if is_other:
            return user.run(programs, LIMITS, SECRET="secret")
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(run, programs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "secret")
        patch.chdir(folder)
        yield run_all
    assert (folder / "secret").read_text() == "secret"


@pytest.fixture(scope="module")
def before(runs: Runs) -> Iterator[list[psutil.Process]]:
    """The processes that this process already has below it. While the fixture lasts, orphans of its
    children become its children."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36  # linux/prctl.h
    # Other tests may have left processes, such as a resource tracker.
    found = psutil.Process().children(recursive=True)
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield found
    libc.prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def told(runs: Runs, before: object) -> dict[str, str]:
    """The reason for the end of each program in REFUSED."""
    table = json.dumps(list(REFUSED.items()))
    program = f"TABLE = {table!r}\nPRELUDE = {PRELUDE!r}\n{DRIVER}"
    (outcome,) = runs([(program, 30.0)])
    assert outcome.failure is None, outcome
    return dict(json.loads(line) for line in outcome.stdout.splitlines())


@pytest.fixture(scope="module")
def limited(runs: Runs, before: object) -> dict[str, Outcome]:
    programs = [
        (PRELUDE + text, 1.0 if failure in ("", OUT_OF_TIME) else 10.0)
        for text, failure in LIMITED.values()
    ]
    return dict(zip(LIMITED, runs(programs)))


def test_all_are_refused(told: dict[str, str]) -> None:
    assert told.keys() == REFUSED.keys()
    escaped = {
        name: why
        for name, why in told.items()
        if why.startswith(("got what it wanted", "ended with status 9", *MISWRITTEN))
    }
    assert escaped == {}


def test_all_end_at_a_limit(limited: dict[str, Outcome]) -> None:
    others = {
        name: outcome.failure
        for name, outcome in limited.items()
        if outcome.failure is None or not outcome.failure.startswith(LIMITED[name][1])
    }
    assert others == {}


def groups_left() -> list[Path]:
    """The memory cgroups of this process that still exist.

    The kernel keeps a cgroup until its ended processes are reaped. Each later sandbox tries again
    to remove it.
    """
    place = sandbox_memory.place()
    end = time.monotonic() + 30
    while place is not None:
        left = sorted(place.folder.glob(f"gspo_{os.getpid()}_*"))
        if not left or time.monotonic() > end:
            return left
        sandbox_memory.Cgroup(place, 1 << 26).close()
    return []


def test_they_leave_nothing(
    told: dict[str, str], limited: dict[str, Outcome], before: list[psutil.Process]
) -> None:
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert psutil.wait_procs(left, timeout=30)[1] == []
    assert groups_left() == [] and not Path("/escaped").exists()


def shared_memory() -> set[str]:
    """The shared memory of the machine: for each segment its key, id, permissions and size, and the
    names of the files in /dev/shm."""
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {" ".join(line.split()[:4]) for line in segments} | set(os.listdir("/dev/shm"))


def is_left_over(before: set[str]) -> set[str]:
    """Names in shared memory that are new and do not disappear. (Other tests create locks in shared
    memory, but only for a moment.)"""
    end = time.monotonic() + 30
    while (new := shared_memory() - before) and time.monotonic() < end:
        time.sleep(0.5)
    return new


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_leave_nothing(runs: Runs) -> None:
    """The programs are chosen at random, and some of them run after a fork."""
    draw, before = random.Random(1), shared_memory()
    for _ in range(50):
        names = draw.choices([*REFUSED, *LIMITED], k=20)
        texts = [REFUSED[name] if name in REFUSED else LIMITED[name][0] for name in names]
        texts = [FORKED * (draw.random() < 0.3) + text for text in texts]
        outcomes = runs([(PRELUDE + text, 1.0) for text in texts])
        well = [name for name, outcome in zip(names, outcomes) if outcome.failure is None]
        assert well == []
    assert is_left_over(before) == set() and groups_left() == []
    ended = psutil.Process().children(recursive=True)
    assert [p for p in ended if p.name() in ("bwrap", "sh")] == []
