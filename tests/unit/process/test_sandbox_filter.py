"""The filter of system calls. An interpreter of classic BPF computes the filter's decisions. The
filter never stops programs that solve tasks."""

from __future__ import annotations

import errno
import platform
import re
import struct
from pathlib import Path

import pytest

from gspo_megatron.process import sandbox, sandbox_filter
from gspo_megatron.process.sandbox import Limits

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = list(AUDIT)
_HEADERS = [
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm/unistd_64.h"),
]


def decision(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The kernel's decision about a system call: an errno, ALLOWED or KILLED."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, audit or AUDIT[machine], 0, *words)
    program = sandbox_filter.program(machine)
    code = [struct.unpack_from("<HBBI", program, place) for place in range(0, len(program), 8)]
    accumulator, place = 0, 0
    while True:
        kind, if_true, if_false, operand = code[place]
        place += 1
        if kind == 0x06:
            return operand & 0xFFFF if operand & 0xFFFF0000 == 0x00050000 else operand
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif kind == 0x54:
            accumulator &= operand
        else:
            is_so = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[kind]
            place += if_true if is_so else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_denied_by_their_numbers(machine: str) -> None:
    denied = sandbox_filter._DENIED
    for name, numbers in denied.items():
        number = numbers[MACHINES.index(machine)]
        assert number is None or decision(machine, number) == errno.EPERM, name
    open_, read = ((2, 0), (56, 63))[MACHINES.index(machine)]
    assert decision(machine, open_) == decision(machine, read) == ALLOWED
    assert decision(machine, 435) == errno.ENOSYS  # 435 is clone3
    assert decision(machine, 463) == decision(machine, 0x40000000) == errno.ENOSYS
    assert decision(machine, read, audit=0x40000003) == KILLED  # a call of 32-bit code


def test_numbers_are_those_of_the_kernels_header() -> None:
    headers = [path for path in _HEADERS if path.exists()]
    if platform.machine() != "x86_64" or not headers:
        pytest.skip("no header of x86-64 here")
    found = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", headers[0].read_text()))
    for name, (number, _) in sandbox_filter._DENIED.items():
        assert int(found.get(name, number)) == number, name
    its = sandbox_filter._MACHINES["x86_64"]
    for name in ("socket", "socketpair", "setsockopt", "clone", "fcntl", "ioctl", "mmap", "keyctl"):
        assert int(found[name]) == getattr(its, name), name


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine: str) -> None:
    its, no_family = sandbox_filter._MACHINES[machine], errno.EAFNOSUPPORT
    non_blocking = 0o4000

    def socket(*words: int) -> int:
        return decision(machine, its.socket, *words)

    for words in (
        (1, 1, 0),
        (1, 5, 0),
        (2, 1, 0),
        (2, 2 | non_blocking, 17),
        (10, 1, 6),
        (16, 3, 0),
    ):
        assert socket(*words) == ALLOWED, words
    for words in (
        (40, 1, 0),
        (17, 3, 0),
        (38, 5, 0),
        (2, 3, 1),
        (2, 5, 0),
        (2, 1, 132),
        (16, 3, 9),
    ):
        assert socket(*words) == no_family, words
    # the kernel uses only the low half of the family
    assert socket(1 << 32 | 40, 1, 0) == no_family
    assert decision(machine, its.socketpair, 1, 1, 0) == ALLOWED
    assert decision(machine, its.socketpair, 40, 1, 0) == no_family
    thread = 0x3D0F00  # the flags that pthread_create gives
    assert decision(machine, its.clone, thread) == decision(machine, its.clone, 17) == ALLOWED
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decision(machine, its.clone, 17 | flag) == errno.EPERM
    assert decision(machine, its.mmap, 0, 4096, 3, 0x22) == ALLOWED
    assert decision(machine, its.mmap, 0, 1 << 21, 3, 0x40022) == errno.EPERM
    assert decision(machine, its.setsockopt, 3, 1, 2) == ALLOWED  # SO_REUSEADDR
    assert decision(machine, its.setsockopt, 3, 6, 7) == ALLOWED  # an option of TCP
    for option in (7, 8, 32, 33):
        assert decision(machine, its.setsockopt, 3, 1, option) == errno.EPERM
    assert decision(machine, its.fcntl, 3, 4) == decision(machine, its.ioctl, 0, 0x5401) == ALLOWED
    assert decision(machine, its.fcntl, 3, 1031) == errno.EPERM
    assert decision(machine, its.ioctl, 0, 0x5412) == errno.EPERM
    assert decision(machine, its.keyctl, 1, 0) == ALLOWED
    for words in ((1, 4096), (1, 1 << 32), (0, 0), (11, 3), (22, 0)):
        assert decision(machine, its.keyctl, *words) == errno.EPERM


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox_filter.fault("x86_64") is None and sandbox_filter.fault("aarch64") is None
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    sandbox.fault.cache_clear()
    try:
        assert (sandbox.fault() or "").startswith(
            "no filter of system calls is known for riscv64; there are some for x86_64, aarch64; "
            "have programs run elsewhere"
        )
    finally:
        monkeypatch.undo()
        sandbox.fault.cache_clear()


# What solutions usually do. The filter allows all of it.
USUAL = """
import asyncio, bisect, collections, ctypes, datetime, decimal, fcntl, fractions, functools, glob
import hashlib, heapq, io, itertools, json, locale, math, os, pathlib, pickle, platform, queue
import random, re, select, shutil, signal, socket, sqlite3, statistics, string, struct, subprocess
import sys, tempfile, threading, time, unittest, urllib.parse, uuid, zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import multiprocessing
from multiprocessing import shared_memory

def square(x):
    return x * x

def child(end):
    end.send(os.getpid())

async def main():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    await asyncio.open_connection(*server.sockets[0].getsockname())
    server.close()
    return told

assert asyncio.run(main()) == b"hi\\n"
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(square, range(9))) == [x * x for x in range(9)]
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.Process(target=child, args=(theirs,))
process.start()
assert ours.recv() != os.getpid()
process.join()
lock, queue_of_all = multiprocessing.Lock(), multiprocessing.Queue()
with lock, multiprocessing.Pool(2) as pool, ProcessPoolExecutor(2) as others:
    queue_of_all.put(pool.map(square, range(3)))
    assert queue_of_all.get() == list(others.map(square, range(3)))
block = shared_memory.SharedMemory(create=True, size=1 << 18)
block.unlink()
assert subprocess.run(["sh", "-c", "sort | uniq | head -1"], input=b"b\\na\\n", capture_output=True,
                      check=True).stdout == b"a\\n"
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "x.db")
    with sqlite3.connect(path) as base:
        base.execute("create table t (x)")
    assert path.exists()
    shutil.copy(path, path.with_name("y"))
    os.mkfifo(path.with_name("z"))
sock, other = socket.socketpair()
sock.sendall(b"x")
assert other.recv(1) == b"x" and socket.if_nameindex()[0][1] == "lo"
assert socket.getaddrinfo("127.0.0.1", 80)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
assert os.sched_getaffinity(0) and os.cpu_count() and uuid.uuid4() and os.urandom(9)
import mmap
assert len(mmap.mmap(-1, 1 << 20)) == 1 << 20
assert select.select([], [sock], [])[1] and os.eventfd(0) and select.epoll()
print(sum(map(square, range(10**5))))
"""


def test_usual_programs_do_not_notice_it() -> None:
    found = sandbox.run(USUAL.encode(), b"", Limits(20.0))
    assert found == sandbox.Outcome(None, b"333328333350000\n", b"")
