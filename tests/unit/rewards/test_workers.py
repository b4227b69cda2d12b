"""Reward functions in workers. The workers are real processes, which hang, crash, use too much
memory, or leave children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import DataError, RewardError
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rewards.scoring import FailedCalls, Scorer
from gspo_megatron.types import Sample
from tests.unit.data.corpora import refusal

# The response tells the function what to do. Each function first writes the id of its process to a
# file.
MODULE = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from fractions import Fraction
from pathlib import Path
from gspo_megatron.errors import DataError
from gspo_megatron.types import TurnRewards

folder = Path(__file__).parent

def note(name):
    with (folder / "processes").open("a") as file:
        file.write(f"{os.getpid()} {name}\\n")

def meet(number, directory="met"):
    """Wait until `number` calls are under way at the same time."""
    met = folder / directory
    met.mkdir(exist_ok=True)
    (met / f"{os.getpid()}_{threading.get_ident()}").touch()
    while len(list(met.iterdir())) < number:
        time.sleep(0.01)

def sleeper():
    """A child in a session of its own, of which only its id is left."""
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(words, start_new_session=True)
    (folder / "child").write_text(str(child.pid))

def act(what, number=0):
    note(what)
    if what == "hang":
        sleeper()
        while True:
            time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "memory":
        return len(bytearray(1 << 40))
    if what == "once":
        if not (folder / "once").exists():
            (folder / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ConnectionError("no judge")
    if what == "cancel":
        raise asyncio.CancelledError("no task")
    if what == "user":
        raise DataError("no test cases")
    if what == "odd":
        return threading.Lock()
    if what == "main":
        assert threading.current_thread() is threading.main_thread()
        return float("torch" not in sys.modules)
    if what == "parts":
        return {"good": True, "short": Fraction(1, 4)}
    if what == "turns":
        return TurnRewards([1.0, 2.0], [3, 7])
    if what.startswith("meet"):
        meet(int(what[4:]))
    return 1.0

def plain(sample, scale: float = 1.0):
    value = act(sample.response)
    return scale * value if isinstance(value, float) else value

def of_batch(samples):
    note("batch")
    return [act(sample.response) for sample in samples]

async def judged(sample):
    if sample.response == "wait":
        await asyncio.sleep(600)
    if sample.response == "nap":
        await asyncio.sleep(0.1)
    if sample.response == "together":  # all of them, in one worker
        judged.count = getattr(judged, "count", 0) + 1
        while judged.count < 32:
            await asyncio.sleep(0.001)
    return act(sample.response)

def refuses_to_load(sample):
    return 1.0

if os.environ.get("LOADS_IN", str(os.getpid())) != str(os.getpid()):
    os._exit(5)
'''


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scorer]]:
    """A function that makes scorers for the functions of MODULE. Afterwards it checks that none of
    their processes is left."""
    (tmp_path / "worker_test_reward.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "worker_test_reward", raising=False)
    made: list[Scorer] = []

    def make(function: str = "plain", **section: Any) -> Scorer:
        path = f"worker_test_reward:{function}"
        values = {"workers": 1, "retries": 0, "on_failure": "drop_group", **section}
        section = RewardSection(import_path=path, **values)
        made.append(Scorer(get_reward("", path, section.options, section.workers), section))
        return made[-1]

    before = psutil.Process().children(recursive=True)
    yield make
    for each in made:
        each.close()
    assert {*psutil.Process().children(recursive=True)} <= {*before}
    child = tmp_path / "child"
    assert not (child.exists() and psutil.pid_exists(int(child.read_text())))


def samples(*responses: str) -> list[Sample]:
    return [Sample("p", "", each, truncated=False, num_tokens=7) for each in responses]


def rewards(found: Scorer, *responses: str) -> list[float | None]:
    scores, _ = found.score(samples(*responses))
    return [None if score is None else float(score.rewards.sum()) for score in scores]


def processes(folder: Path) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "processes").read_text().splitlines()]


# --- calls ----------------------------------------------------------------------------------------


def test_values_come_back_as_they_were(scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    found = scorer(options={"scale": 0.5})
    # the call is in the main thread of a process without torch
    assert rewards(found, "main", "main") == [0.5, 0.5]
    assert rewards(found, "x") == [0.5]
    assert len(set(processes(tmp_path))) == 1 and os.getpid() not in processes(tmp_path)
    (score,), _ = found.score(samples("turns"))
    assert score.rewards.tolist() == [1.0, 2.0] and score.ends.tolist() == [3, 7]
    (score,), _ = scorer().score(samples("parts"))
    assert score.parts == {"good": 1.0, "short": 0.25}


def test_as_many_calls_at_a_time_as_workers(scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    """Each call waits for three other calls, so four workers are needed."""
    assert rewards(scorer(workers=4), *["meet4"] * 4) == [1] * 4
    assert len(set(processes(tmp_path))) == 4


def test_a_worker_calls_many_coroutines_at_a_time(scorer: Callable[..., Scorer]) -> None:
    assert rewards(scorer("judged"), *["together"] * 32) == [1] * 32


def test_a_batch_is_one_call(scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    found = scorer("of_batch", timeout_seconds=1.0)
    assert rewards(found, "x", "x") == [1, 1]
    assert (tmp_path / "processes").read_text().count("batch") == 1
    assert found.score(samples("x", "hang")) == ([None, None], FailedCalls(0, 1))


def test_groups_are_scored_at_the_same_time(scorer: Callable[..., Scorer]) -> None:
    """The rollout service scores groups at the same time. Here each group waits for the other
    one."""
    found = scorer(workers=2)

    async def both() -> list[Any]:
        try:
            return await asyncio.gather(*(found.score_async(samples("meet2")) for _ in range(2)))
        finally:
            await found.workers.close()

    assert [failed for _, failed in asyncio.run(both())] == [FailedCalls()] * 2


def test_a_call_that_is_given_up_does_not_delay_the_next_one(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    found, child = scorer(timeout_seconds=600), tmp_path / "child"

    async def run() -> Any:
        try:
            given_up = asyncio.create_task(found.score_async(samples("hang")))
            while not child.exists():
                await asyncio.sleep(0.01)
            given_up.cancel()
            return await asyncio.wait_for(found.score_async(samples("x")), 60)
        finally:
            await found.workers.close()

    assert asyncio.run(run())[1] == FailedCalls()


def test_math_is_called_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limits of `math` are signals, which only main threads can use."""
    pytest.importorskip("math_verify")
    given = [Sample("", "1/2", r"so \boxed{\frac{1}{2}}", truncated=False)]
    with closing(Scorer(get_reward("math"), RewardSection(name="math"))) as found:
        (score,), _ = found.score(given)
    assert found.workers is not None and score.rewards.tolist() == [1.0]


# --- calls that fail ------------------------------------------------------------------------------


FAILURES = {  # for each response: the failures that are counted, and the message
    "hang": (FailedCalls(0, 1), "took longer than reward.timeout_seconds = 1"),
    "exit": (FailedCalls(1, 0), "ended its worker with exit code 3"),
    "segfault": (FailedCalls(1, 0), "ended its worker with SIGSEGV"),
    "memory": (
        FailedCalls(1, 0),
        "raised MemoryError: out of memory, with reward.memory_mb = 512 (",
    ),
    "raise": (FailedCalls(1, 0), "raised ConnectionError: no judge (worker_test_reward.py:"),
    "cancel": (FailedCalls(1, 0), "raised CancelledError: no task (worker_test_reward.py:"),
}


@pytest.mark.parametrize(
    ("function", "responses"),
    [("plain", [*FAILURES]), ("judged", ["hang", "exit", "memory", "raise", "cancel"])],
)
def test_a_call_that_fails_costs_its_sample_only(
    function: str,
    responses: list[str],
    scorer: Callable[..., Scorer],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Plain functions run one after the other. Coroutines run at the same time as a healthy
    coroutine."""
    found = scorer(function, workers=1, timeout_seconds=1.0, memory_mb=512)
    for response in responses:
        failed, told = FAILURES[response]
        scores, counted = found.score(samples(response, "x"))
        assert [score is None for score in scores] == [True, False], response
        assert counted == failed, response
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("reward ")]
        assert len(lines) == 1, response
        assert lines[0].startswith(f"reward 'worker_test_reward:{function}' {told}")
    assert rewards(found, "x", "x", "x") == [1, 1, 1]


def test_a_coroutine_that_waits_too_long_leaves_its_worker(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    found = scorer("judged", timeout_seconds=1.0)
    scores, failed = found.score(samples("wait", "x", "x"))
    assert [score is None for score in scores] == [True, False, False]
    assert failed == FailedCalls(0, 1)
    assert rewards(found, "x") == [1]
    assert len(set(processes(tmp_path))) == 1


def test_a_coroutine_that_waits_is_not_blamed_for_one_that_blocks(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    """The coroutine that waits started first, so its time limit ends first. But it could not
    continue, because the other coroutine blocked the event loop."""
    found = scorer("judged", timeout_seconds=1.0)
    scores, failed = found.score(samples("nap", "hang"))
    assert [score is None for score in scores] == [False, True]
    assert failed == FailedCalls(0, 1)
    # Only the second call of "nap" came so far, because it ran alone.
    assert (tmp_path / "processes").read_text().count("nap") == 1


def test_a_crash_is_repeated_and_a_time_out_is_not(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    found = scorer(retries=1, timeout_seconds=1.0)
    scores, failed = found.score(samples("once", "hang"))
    assert [score is None for score in scores] == [False, True] and failed == FailedCalls(1, 1)
    assert (tmp_path / "processes").read_text().count("once") == 2
    assert (tmp_path / "processes").read_text().count("hang") == 1


def test_a_failure_ends_the_run_unless_groups_are_dropped(scorer: Callable[..., Scorer]) -> None:
    with pytest.raises(RewardError) as caught:
        scorer(on_failure="stop").score(samples("x", "exit"))
    told = f"'worker_test_reward:plain' {FAILURES['exit'][1]}"
    assert str(caught.value) == f"reward {told}; prompt 'p', response 'exit'"


def test_mistakes_are_no_failed_calls(scorer: Callable[..., Scorer]) -> None:
    found = scorer()
    with pytest.raises(DataError, match="^no test cases$"):
        found.score(samples("user"))
    (line,) = refusal(found.score, samples("odd"))
    assert line.startswith("reward 'worker_test_reward:plain' returned <unlocked _thread.lock")
    assert line.endswith("of type lock; a number is wanted")


def test_a_worker_that_cannot_load_the_function_is_named(
    scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADS_IN", str(os.getpid()))
    found = scorer("refuses_to_load")
    assert refusal(found.score, samples("x")) == [
        "reward 'worker_test_reward:refuses_to_load': its worker did not start: it ended its "
        "worker with exit code 5"
    ]


# --- the owner of the workers dies ----------------------------------------------------------------

OWNER = """
import sys
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rewards.scoring import FailedCalls, Scorer
from gspo_megatron.types import Sample
path = "worker_test_reward:plain"
section = RewardSection(import_path=path, workers=2)
samples = [Sample("p", "", each, truncated=False) for each in ("hang", "x")]
Scorer(get_reward("", path), section).score(samples)
"""


def test_nothing_outlives_an_owner_that_is_killed(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path)
    child = tmp_path / "child"
    try:
        while not (child.exists() and child.read_text()):
            assert owner.poll() is None
            time.sleep(0.01)
        started = psutil.Process(owner.pid).children(recursive=True)
        # These are the keeper and the process of each worker, and a process that a function has
        # started.
        assert len(started) == 5
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_signals_to_the_whole_job_are_for_its_ranks(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    before = psutil.Process().children(recursive=True)  # processes of other tests, too
    found = scorer()
    assert rewards(found, "x") == [1]
    workers = [each for each in psutil.Process().children(recursive=True) if each not in before]
    assert workers
    for process in workers:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
    assert rewards(found, "x") == [1]
    assert len(set(processes(tmp_path))) == 1
