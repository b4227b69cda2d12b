"""The calls of a reward function for the responses of a rank, and the values that such a function
may return."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import DataError, EpisodeError, RewardError
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rewards import scoring
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import (
    CONCURRENT_CALLS,
    FAILED,
    FailedCalls,
    Scorer,
)
from gspo_megatron.types import Sample, TurnRewards
from tests.unit.data.corpora import refusal


def samples(count: int) -> list[Sample]:
    return [Sample(f"p{n}", "", f"r{n}", truncated=False, num_tokens=1) for n in range(count)]


def number(sample: Sample) -> int:
    return int(sample.response[1:])


def scorer(function: Callable[..., Any], **section: Any) -> Scorer:
    return Scorer(Reward("mine", function), RewardSection(**section))


def rewards(found: Scorer, count: int) -> list[float | None]:
    scores, _ = found.score(samples(count))
    return [None if score is None else float(score.rewards.sum()) for score in scores]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the waiting times between calls. The test itself does not wait."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    native = asyncio.sleep

    async def note(seconds: float) -> None:
        found.append(seconds)
        await native(0)

    monkeypatch.setattr(scoring.asyncio, "sleep", note)
    return found


# --- forms of functions ---------------------------------------------------------------------------


def test_a_plain_function_is_called_in_order_and_in_the_main_thread() -> None:
    seen: list[int] = []

    def reward(sample: Sample) -> float:
        assert threading.current_thread() is threading.main_thread()
        seen.append(number(sample))
        return number(sample) / 2

    assert rewards(scorer(reward), 5) == [0, 0.5, 1, 1.5, 2]
    assert seen == [0, 1, 2, 3, 4]


def test_a_batch_is_one_call() -> None:
    calls: list[int] = []

    def reward(samples: list[Sample]) -> list[float]:
        calls.append(len(samples))
        return [float(number(sample)) for sample in samples]

    assert rewards(scorer(reward), 4) == [0, 1, 2, 3]
    assert rewards(scorer(reward), 0) == []
    assert calls == [4]
    assert rewards(scorer(lambda samples: np.arange(len(samples))), 3) == [0, 1, 2]


def test_coroutines_run_at_the_same_time_up_to_a_bound() -> None:
    running, most = 0, 0

    async def reward(sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return number(sample)

    count = 3 * CONCURRENT_CALLS
    assert rewards(scorer(reward), count) == list(range(count))
    assert most == CONCURRENT_CALLS


def test_coroutines_have_one_event_loop_in_the_whole_run() -> None:
    loops = set()

    class Judge:
        async def __call__(self, samples: list[Sample]) -> list[float]:
            loops.add(id(asyncio.get_running_loop()))
            return [1.0] * len(samples)

    found = scorer(Judge())
    assert rewards(found, 2) == rewards(found, 2) == [1, 1]
    assert len(loops) == 1


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (
            [1.0, 2.0],
            "2 rewards for a batch of 3 samples; allowed: a list with one reward for each",
        ),
        (1.0, "a float for a batch of 3 samples"),
        (None, "a NoneType for a batch of 3 samples"),
        ({"a": 1.0}, "a dict for a batch of 3 samples"),
        (np.array(1.0), "a ndarray for a batch of 3 samples"),
        ([[1.0], [1.0, 2.0], 1.0], "[1.0] of type list; a number is wanted; prompt 'p0'"),
        ([1.0, float("nan"), 1.0], "nan; a finite number is wanted; prompt 'p1', response 'r1'"),
    ],
)
def test_mistakes_of_a_batch_are_named(value: object, named: str) -> None:
    (line,) = refusal(scorer(lambda samples: value).score, samples(3))
    assert line.startswith("reward 'mine' returned ") and named in line


# --- calls that fail ------------------------------------------------------------------------------


class Flaky:
    """A reward function whose first calls for a sample fail."""

    def __init__(self, failures: Callable[[Sample], int]) -> None:
        self.failures, self.calls = failures, dict.fromkeys(range(100), 0)

    def __call__(self, sample: Sample) -> float:
        self.calls[number(sample)] += 1
        if self.calls[number(sample)] <= self.failures(sample):
            raise ConnectionError("no judge")
        return number(sample)

    async def asynchronous(self, sample: Sample) -> float:
        return self(sample)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_call_is_repeated_after_a_wait(is_async: bool, waits: list[float]) -> None:
    flaky = Flaky(lambda sample: 2 if number(sample) == 1 else 0)
    found = scorer(flaky.asynchronous if is_async else flaky, retries=2)
    scores, failed = found.score(samples(3))
    assert [float(score.rewards.sum()) for score in scores] == [0, 1, 2]
    assert failed == FailedCalls(2, 0) and waits == [0.5, 1.0]
    # only the failures of this call of `score` count
    assert found.score(samples(3))[1] == FailedCalls()


def test_a_log_that_nobody_reads_does_not_end_the_run(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = mock.Mock(write=mock.Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    monkeypatch.setattr(sys, "stderr", unread)
    assert rewards(scorer(Flaky(lambda _: 1), retries=1), 2) == [0, 1]
    assert unread.write.called


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_fails_for_good_ends_the_run(is_async: bool, waits: list[float]) -> None:
    flaky = Flaky(lambda sample: 9 if number(sample) == 1 else 0)
    with pytest.raises(RewardError) as caught:
        scorer(flaky.asynchronous if is_async else flaky, retries=2).score(samples(2))
    assert str(caught.value).startswith("reward 'mine' raised ConnectionError: no judge (test_")
    assert str(caught.value).endswith(") in the last of 3 calls; prompt 'p1', response 'r1'")
    assert isinstance(caught.value.__cause__, ConnectionError) and len(waits) == 2


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_ends_the_program_is_a_failed_call(
    is_async: bool, error: type[BaseException]
) -> None:
    """If the call of sys.exit(0) ended the rank, the run would count as done."""

    def leaves(sample: Sample) -> float:
        raise error(0)

    async def leaves_later(sample: Sample) -> float:
        raise error(0)

    told = rf"reward 'mine' raised {error.__name__}: 0 \(test_scoring"
    with pytest.raises(RewardError, match=told):
        scorer(leaves_later if is_async else leaves, retries=0).score(samples(2))


def test_a_call_that_fails_for_good_leaves_no_reward(
    waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    flaky = Flaky(lambda sample: 9 if number(sample) == 1 else 0)
    found = scorer(flaky, retries=1, on_failure="drop_group")
    scores, failed = found.score(samples(3))
    assert [score is None for score in scores] == [False, True, False]
    assert failed == FailedCalls(2, 0)
    (line,) = capfd.readouterr().err.splitlines()  # the warning is printed once
    assert line.startswith("reward 'mine' raised ConnectionError: no judge (test_scoring.py:")
    assert line.endswith("); more of this kind are only counted")


def test_a_batch_that_fails_leaves_no_reward_at_all() -> None:
    def reward(samples: list[Sample]) -> list[float]:
        raise ConnectionError("no judge")

    found = scorer(reward, retries=0, on_failure="drop_group")
    assert found.score(samples(2)) == ([None, None], FailedCalls(1, 0))
    (line,) = refusal(scorer(reward, retries=0).score, samples(2))
    assert line.endswith("; a batch of 2 samples, the first of them: prompt 'p0', response 'r0'")


@pytest.mark.parametrize("on_failure", ["stop", "drop_group"])
def test_a_wrong_value_and_a_users_mistake_are_no_failed_calls(on_failure: str) -> None:
    calls: list[str] = []

    def wrong(sample: Sample) -> float:
        calls.append("wrong")
        return float("nan")

    def refuses(sample: Sample) -> float:
        calls.append("refuses")
        raise DataError("no test cases")

    with pytest.raises(RewardError, match="returned nan"):
        scorer(wrong, on_failure=on_failure).score(samples(1))
    with pytest.raises(DataError, match="no test cases"):
        scorer(refuses, on_failure=on_failure).score(samples(1))
    assert calls == ["wrong", "refuses"]


def test_each_call_is_a_sign_of_life(waits: list[float]) -> None:
    signs: list[str] = []
    flaky = Flaky(lambda sample: 1)
    with heard_by(lambda: signs.append("")):
        scorer(flaky).score(samples(3))
    assert len(signs) == 6


# --- parts ----------------------------------------------------------------------------------------


def parted(sample: Sample) -> dict[str, float]:
    return {"format": 0.5, "correct": number(sample)}


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    assert rewards(scorer(parted), 3) == [0.5, 1.5, 2.5]
    found = scorer(parted, weights={"format": -2.0})
    scores, _ = found.score(samples(3))
    assert [score.rewards.tolist() for score in scores] == [[-1.0], [0.0], [1.0]]
    assert scores[2].parts == {"correct": 2.0, "format": 0.5}  # the parts are not yet weighted
    assert found.part_names == ("correct", "format")


def test_weights_that_add_up_to_one_give_exactly_one() -> None:
    """Added one after the other, 0.6, 0.3 and 0.1 are less than 1."""
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    assert rewards(scorer(lambda _: dict.fromkeys("abc", 1.0), weights=weights), 1) == [1.0]


def second_is(value: object) -> Callable[[Sample], object]:
    """A reward that returns parts for the first response, and `value` for the second."""
    return lambda sample: value if number(sample) else {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": 1.0, "c": 0.0}, "the parts a, c, and the parts a, b for an earlier response; the "),
        ({"a": 1.0}, "the parts a, and the parts a, b for an earlier response"),
        (1.0, "no parts, and the parts a, b for an earlier response; the same names are wanted"),
        (TurnRewards([1.0], [1]), "no parts, and the parts a, b for an earlier response"),
        ({}, "no parts; at least one is wanted"),
        ({"a": 1.0, "b": float("nan")}, "nan as part 'b'; a finite number is wanted"),
        ({"a": 1.0, "b": "good"}, "'good' as part 'b'; a finite number is wanted"),
        ({"a": 1.0, 2: 0.0}, "a part named 2; it is logged as reward/NAME: letters, digits"),
        ({"a": 1.0, "b b/": 0.0}, "a part named 'b b/'; it is logged as reward/NAME"),
        ({"a": 1.0, "": 0.0}, "a part named ''"),
        ({"mean": 1.0}, "a part named 'mean'; reward/mean is another metric: choose another name"),
        ({"errors": 1.0}, "a part named 'errors'"),
        ({"a": 1e308, "b": 1e308}, "parts that add up to inf; a finite sum is wanted"),
    ],
)
def test_mistakes_in_parts_are_named(value: object, named: str) -> None:
    (line,) = refusal(scorer(second_is(value)).score, samples(2))
    assert line.startswith("reward 'mine' returned ") and named in line
    assert line.endswith("; prompt 'p1', response 'r1'")


@pytest.mark.parametrize(
    ("function", "weights", "expected"),
    [
        (
            parted,
            {"corect": 2.0},
            "reward.weights.corect = 2.0: reward 'mine' returns the parts correct, format; "
            "allowed: "
            "weights for these",
        ),
        (
            number,
            {"correct": 2.0},
            "reward.weights.correct = 2.0: reward 'mine' returns no parts; allowed: none",
        ),
        (
            parted,
            {"correct": 0.0, "format": 0.0},
            "reward.weights = {'correct': 0.0, 'format': 0.0}: all parts of reward 'mine' have "
            "weight 0, and nothing is rewarded; allowed: a weight other than 0 for one of them",
        ),
    ],
)
def test_weights_that_do_not_fit_the_parts_are_refused(
    function: Callable[[Sample], Any], weights: dict[str, float], expected: str
) -> None:
    assert refusal(scorer(function, weights=weights).score, samples(1)) == [expected]


def test_what_an_environment_gave_is_not_asked_for() -> None:
    asked = []

    def reward(sample: Sample) -> float:
        asked.append(number(sample))
        return 9.0

    first, *others = samples(3)
    given = [TurnRewards([1.0, 2.0], [1, 2]), None, FAILED]
    scores, failed = scorer(reward, on_failure="drop_group").score(
        [replace(first, num_tokens=2), *others], given
    )
    assert [None if score is None else list(score.rewards) for score in scores] == [
        [1.0, 2.0],
        [9.0],
        None,
    ]
    assert asked == [1] and failed == FailedCalls(episodes=1)


@pytest.mark.parametrize("on_failure", ["stop", "drop_group"])
def test_episodes_that_failed(on_failure: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Ended:
        def __init__(self, given: float | None, error: EpisodeError | None = None) -> None:
            self.given, self.error = given, error

    found = scorer(lambda _: 0.0, on_failure=on_failure)
    ended = [Ended(1.0), Ended(None, EpisodeError("first")), Ended(2.0, EpisodeError("second"))]
    if on_failure == "stop":
        with pytest.raises(EpisodeError, match="first"):
            found.given(ended)
    else:
        assert found.given(ended) == [1.0, FAILED, FAILED]
        told = capsys.readouterr().err.splitlines()
        assert told == ["first; more of this kind are only counted"]


def test_seconds_of_scoring_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    async def a_second(sample: Sample) -> float:
        nonlocal now
        await asyncio.sleep(0)
        now += 1.0
        return 0.0

    found = scorer(a_second)
    found.score(samples(3))
    now += 10.0  # time between two calls
    assert (found.take_seconds(), found.take_seconds()) == (3.0, 0.0)

    taken = []

    async def batch(count: int) -> None:
        await found.score_async(samples(count))
        taken.append(found.take_seconds())

    async def at_the_same_time() -> None:
        await asyncio.gather(batch(1), batch(4))

    now += 10.0
    asyncio.run(at_the_same_time())
    assert sum(taken) == 5.0  # each second is counted for only one of the two batches


def test_the_progress_of_calls_is_told_at_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def two_seconds(sample: Sample) -> float:
        nonlocal now
        now += 2.0
        if number(sample) == 1:
            raise ValueError
        return 0.0

    async def as_coroutine(sample: Sample) -> float:
        return two_seconds(sample)

    # The coroutines have all ended before the first heartbeat.
    for function, paces in ((two_seconds, (0.5, 0.5, 0.5)), (as_coroutine, (0.2, 0.3, 0.5))):
        found, told = scorer(function, on_failure="drop_group", retries=0), []
        with heard_by(lambda found=found, told=told: told.append(found.progress())):
            found.score(samples(3))
            assert found.progress() == ""
            found.score(samples(1))
        assert told == [*(f"rewards {n}/3, {pace} a second" for n, pace in enumerate(paces, 1)), ""]
