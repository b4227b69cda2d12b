"""Hostile programs in sandboxes of root and of an ordinary user: none gets what it wants."""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gspo_megatron.process import sandbox, sandbox_memory
from gspo_megatron.process.sandbox import Limits, Outcome
from tests.unit.process.hostile_programs import LIMITED, PRELUDE, REFUSED
from tests.unit.process.ordinary_user import User, ordinary_user

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the programs have the numbers of x86-64"
)

Runs = Callable[[Sequence[tuple[str, float]]], list[Outcome]]  # of programs and their seconds
LIMITS = Limits(memory_mb=256, processes=32, disk_mb=8, output_bytes=1 << 20)

# Runs each program in a process of its own, and prints why it ended; "held": it did not.
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


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with ordinary_user() as found:
        yield found


@pytest.fixture(scope="module", params=["this user", "an ordinary user"])
def runs(request: pytest.FixtureRequest, user: User) -> Runs:
    if request.param == "an ordinary user":
        return lambda programs: user.run(programs, LIMITS)
    if os.geteuid() != 0:
        pytest.skip("this user is an ordinary one")

    def run(given: tuple[str, float]) -> Outcome:
        return sandbox.run(given[0].encode(), b"", replace(LIMITS, seconds=given[1]))

    def run_all(programs: Sequence[tuple[str, float]]) -> list[Outcome]:
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(run, programs))

    return run_all


@pytest.fixture(scope="module")
def told(runs: Runs) -> dict[str, str]:
    """Why each of REFUSED ended."""
    table = json.dumps(list(REFUSED.items()))
    program = f"TABLE = {table!r}\nPRELUDE = {PRELUDE!r}\n{DRIVER}"
    (outcome,) = runs([(program, 30.0)])
    assert outcome.failure is None, outcome
    return dict(json.loads(line) for line in outcome.stdout.splitlines())


@pytest.fixture(scope="module")
def limited(runs: Runs) -> dict[str, Outcome]:
    programs = [
        (PRELUDE + text, 1.0 if failure.startswith("time") or not failure else 10.0)
        for text, failure in LIMITED.values()
    ]
    return dict(zip(LIMITED, runs(programs)))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, told: dict[str, str]) -> None:
    assert not told[name].startswith(("got what it wanted", "ended with status 9", "SyntaxError"))
    assert "NameError" not in told[name] and "AttributeError" not in told[name]


@pytest.mark.parametrize("name", LIMITED)
def test_it_ends_at_a_limit(name: str, limited: dict[str, Outcome]) -> None:
    failure = limited[name].failure
    assert failure is not None and failure.startswith(LIMITED[name][1])


def leftovers(folder: Path | None) -> list[list[str]]:
    """What programs could leave on the machine."""
    groups = [] if folder is None else sorted(p.name for p in folder.glob(f"gspo_{os.getpid()}_*"))
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()
    return [groups, segments, sorted(os.listdir("/dev/shm"))]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_leave_nothing(runs: Runs) -> None:
    draw, place = random.Random(1), sandbox_memory.place()
    folder = None if place is None else place.folder
    before = leftovers(folder)
    for _ in range(50):
        names = draw.choices([*REFUSED, *LIMITED], k=20)
        texts = [REFUSED[name] if name in REFUSED else LIMITED[name][0] for name in names]
        outcomes = runs([(PRELUDE + text, 1.0) for text in texts])
        well = [name for name, outcome in zip(names, outcomes) if outcome.failure is None]
        assert well == []
    assert leftovers(folder) == before
    ended = psutil.Process().children(recursive=True)
    assert [p for p in ended if p.name() in ("bwrap", "sh")] == []
