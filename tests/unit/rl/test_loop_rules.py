"""Rules of the RL loop that need no model: seeds of requests, the warning about noise, steps that
are saved, and the agreement of ranks after scoring."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from gspo_megatron.config import Config, parse_config
from gspo_megatron.config.schema import suite_key
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.errors import DataError, RewardError, RolloutError, UserError
from gspo_megatron.observe.progress import Progress
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rl import loop as loop_module
from gspo_megatron.rl.evaluation import Suites
from gspo_megatron.rl.loop import NOISE_WARNING, PhaseTimer, ReinforcementLoop
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.megatron import rollouts
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.types import Sample


def config_of(**sections: dict[str, Any]) -> Config:
    return parse_config({"data": {"tokenizer": "t"}, **sections})


def a_loop(config: Config, **parts: Any) -> Any:
    """A loop that has not built a model."""
    loop = object.__new__(ReinforcementLoop)
    loop.run_components = SimpleNamespace(checkpoints=SimpleNamespace(rollbacks=0))
    vars(loop).update(config=config, last=config.training.steps, **parts)
    return loop


# Requests


def test_runs_of_neighbouring_seeds_share_no_draw() -> None:
    """Runs with the seeds 1, 2, ... are compared with each other, so they must be independent."""
    loops = [a_loop(config_of(training={"seed": seed})) for seed in range(4)]
    drawn = [loop._request(step).seed for loop in loops for step in range(1, 300)]
    assert len({*drawn}) == len(drawn)
    # The number of steps does not change the requests.
    longer = a_loop(config_of(training={"seed": 3, "steps": 999}))
    assert longer._request(7).seed == loops[3]._request(7).seed
    # A rollback changes all requests.
    longer.run_components.checkpoints.rollbacks = 1
    assert not {longer._request(step).seed for step in range(1, 300)} & {*drawn}


@pytest.mark.parametrize(("ahead", "versions"), [(0, [0, 1, 2, 3]), (2, [0, 0, 0, 1])])
def test_a_draw_may_be_of_weights_as_old_as_is_configured(ahead: int, versions: list[int]) -> None:
    loop = a_loop(config_of(rollout={"max_staleness": ahead}))
    assert [loop._request(step).version for step in (1, 2, 3, 4)] == versions


def test_a_step_and_a_suite_sample_as_each_of_them_is_configured() -> None:
    common = {"max_tokens": 11, "stop": ("x",)}
    of_step = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    of_suite = {"temperature": 0.4, "top_p": 0.8, "top_k": 3}
    suite = {"prompts": "p", "samples": 6, **of_suite}
    config = config_of(
        rollout={"max_response_tokens": 11, "stop": ["x"], **of_step},
        evaluation={"suites": {"s": suite, "long": suite | {"max_response_tokens": 12}}},
    )
    assert a_loop(config)._request(2).sampling == Sampling(**common, **of_step)
    suites = object.__new__(Suites)
    prompts = {suite_key(name): [None] * 4 for name in ("s", "long")}
    vars(suites).update(config=config, collector=SimpleNamespace(prompts=prompts))
    request = suites._request("s", 2)
    assert request.sampling == Sampling(**common, **of_suite)
    assert (request.rows, request.per_prompt, request.version) == ([0, 1, 2, 3], 6, 2)
    assert suites._request("long", 2).sampling.max_tokens == 12


# Failures between two steps


class HasEndedError(Exception):
    """Raised where a real run would be saved and end."""


class Unwritable:
    """Stands in for the rollouts and the evaluation of a run whose store is on a full disk."""

    error = DataError("rollouts/step_00000003: cannot be written: No space left on device")
    moments: dict[str, float]

    @property
    def source(self) -> Unwritable:
        return self

    def begin(self, request: Any) -> None:
        self.moments["count"] = 9.0
        raise self.error

    def sample(self, request: Any) -> None:
        self.moments["count"] = 9.0  # as if the first request of the step had been scored
        raise self.error

    def evaluate(self, step: int) -> None:
        raise self.error


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_store_that_cannot_be_written_ends_a_run_that_is_saved(ahead: int) -> None:
    told: list[Any] = []

    def after_failure(step: int, *what: Any) -> None:
        told.append((step, loader.state_dict(), *what))
        raise HasEndedError

    moments = {"count": 2.0, "mean": 0.5, "squares": 1.0}
    checkpoints = SimpleNamespace(
        after_failure=after_failure, rollbacks=0, reward_moments={**moments}
    )
    run = SimpleNamespace(checkpoints=checkpoints)
    loader = PromptLoader([9], 4, seed=0, shuffle=True)
    before = loader.state_dict()
    rollout = {"prompts_per_step": 4, "max_staleness": ahead}
    config = config_of(data={"tokenizer": "t"}, rollout=rollout)
    loop = a_loop(config, run_components=run, loader=loader, restored=None)
    loop.collector, loop.suites = Unwritable(), None
    loop.collector.moments = checkpoints.reward_moments
    loop.collector.config, loop.collector.device = config, torch.device("cpu")
    with pytest.raises(HasEndedError):
        loop.roll_out(3)
    # The resumed run requests the prompts of the step again, and counts their scores again.
    assert told == [(2, before, Unwritable.error)]
    assert checkpoints.reward_moments == moments != loop.collector.moments
    with pytest.raises(HasEndedError):
        loop._end_step(100, {"loss": 1.0}, None)
    assert told[1:] == [(100, before, Unwritable.error, {"loss": 1.0})]


class Timer:
    """A timer that measures nothing."""

    earlier = 0.0

    def __init__(self, _: Any, earlier: float) -> None:
        Timer.earlier = earlier

    def __call__(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step_metrics(self, *_: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    "error", [DataError("weights: No space left on device"), RolloutError("no server is left")]
)
def test_an_update_whose_weights_do_not_reach_the_servers_is_saved(
    error: UserError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_failure(step: int, *what: Any) -> None:
        assert (step, *what) == (3, error, {"reward/mean": 0.5, "loss": 0.25})
        raise HasEndedError

    monkeypatch.setattr(loop_module, "PhaseTimer", Timer)
    monkeypatch.setattr(loop_module, "update_policy", lambda *_: {"loss": 0.25})
    for name in ("gather_index", "plan_step", "redistribute", "micro_batch_multiple"):
        monkeypatch.setattr(loop_module, name, MagicMock())
    monkeypatch.setattr(loop_module, "parallel_state", MagicMock())
    experience = MagicMock(metrics={"reward/mean": 0.5})
    loop = a_loop(config_of(), roll_out=lambda _: experience)
    loop.restored = SimpleNamespace(rollout_seconds=24.0)
    for name in ("device", "data_group", "token_budget", "has_servers"):
        setattr(loop, name, None)
    for name in ("policy", "kept_steps", "updater", "collector"):
        setattr(loop, name, MagicMock())
    loop.run_components.checkpoints.after_failure = after_failure
    loop.updater.objective.advantages.of_step.return_value = None, None
    loop.collector.source.take_weights.side_effect = error
    with pytest.raises(HasEndedError):
        loop.step(3)
    assert Timer.earlier == 24.0  # an earlier start of the run has generated the responses


# The warning about noise

NOISE = {"ratio/noise_floor": 0.01}
NARROW = {"name": "gspo", "clip_low": 0.001, "clip_high": 0.002}


def warned(metrics: dict[str, float], known: list[str] | None = None, **objective: Any) -> str:
    known = [] if known is None else known
    run = SimpleNamespace(checkpoints=SimpleNamespace(warned=known))
    loop = a_loop(config_of(objective={**NARROW, **objective}), run_components=run)
    return loop._noise_warning(metrics) or ""


def test_noise_above_the_clip_range_is_warned_of_once() -> None:
    known: list[str] = []
    said = warned(NOISE, known)
    assert said.startswith("warning: the clip range 0.001 is narrower than the noise")
    assert "0.01 (ratio/noise_floor" in said and known == [NOISE_WARNING]
    assert warned(NOISE, known) == "" and known == [NOISE_WARNING]


def test_the_narrower_side_of_the_range_counts() -> None:
    noise = {"ratio/noise_floor": 0.0015}
    assert "range 0.001 " in warned(noise)
    assert "range 0.001 " in warned(noise, clip_low=0.002, clip_high=0.001)
    assert warned({"ratio/noise_floor": 0.001}) == ""
    # The first mini-batch has no tokens to learn from.
    assert warned({"ratio/noise_floor": math.nan}) == ""


def test_responses_of_earlier_weights_say_nothing_of_noise() -> None:
    """The warning needs a step in which all responses are from the newest weights."""
    known: list[str] = []
    assert warned(NOISE | {"staleness/max": 1.0}, known) == "" and known == []
    assert warned(NOISE | {"staleness/max": 0.0}, known) != ""


@pytest.mark.parametrize("objective", [{"name": "grpo"}, {"clip_low": 0.1, "clip_high": 0.1}])
def test_where_the_clip_does_not_cut_noise_there_is_no_warning(objective: dict[str, Any]) -> None:
    assert warned(NOISE, **objective) == ""


def test_the_advice_is_of_the_log_probs_in_use() -> None:
    assert "set old_logprobs = recompute" in warned(NOISE, old_logprobs="rollout")
    assert "but not out of the samples" in warned(NOISE, old_logprobs="recompute")


# Steps that are saved


class Saved:
    """Stands in for the checkpoints, and records calls."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []
        self.warned: list[str] = []
        self.back = None

    def judge(self, step: int, metrics: dict[str, float]) -> None: ...

    def end_of_step(self, step: int, _: Any, *, is_last: bool, is_border: bool) -> None:
        assert not is_border
        self.told.append((step, is_last))

    def saved_step(self, step: int) -> int:
        return step


def ended(step: int, unevaluated: dict[str, float] | None) -> tuple[list[tuple[int, bool]], Any]:
    """End `step` (of nine) and the step after it. Returns a pair for each step that was reported to
    the checkpoints: the step, and whether it must be saved. Also returns the unevaluated
    metrics."""

    def nothing(*_: Any) -> None: ...

    checkpoints = Saved()
    logger = SimpleNamespace(write=nothing)
    config = config_of(training={"steps": 9, "evaluation_interval": 0})
    loop = a_loop(
        config,
        run_components=SimpleNamespace(checkpoints=checkpoints, logger=logger),
        unevaluated=unevaluated,
        collector=SimpleNamespace(source=SimpleNamespace(after_checkpoint=nothing)),
        evaluate=lambda *_: {},
    )
    progress = SimpleNamespace(update=nothing, note=nothing)
    for number in (step, step + 1):
        loop._end_step(number, {"ratio/noise_floor": 0.0}, progress)
    return checkpoints.told, loop.unevaluated


def test_a_step_that_is_evaluated_in_a_second_attempt_is_saved_again() -> None:
    """The checkpoint of this step says that the step was not evaluated. Without a new checkpoint, a
    resumed run would evaluate and log the step again."""
    assert ended(4, {"loss": 1.0}) == ([(4, True), (5, False)], None)
    assert ended(4, None) == ([(4, False), (5, False)], None)
    assert ended(8, None) == ([(8, False), (9, True)], None)


# The speed of a step


def test_an_evaluation_before_the_first_step_is_no_part_of_the_pace() -> None:
    """Of four steps of three seconds, nine seconds are left after the first one."""
    seconds, stream = [0.0], io.StringIO()
    progress = Progress(4, "RL", stream, clock=lambda: seconds[0])

    def nothing(*_: Any, **__: Any) -> dict[str, float]:
        return {}

    def evaluate(step: int) -> dict[str, float]:
        seconds[0] += 300.0
        return {"evaluation/reward": 0.5}

    def whole_step(step: int, shown: Progress) -> None:
        seconds[0] += 3.0
        shown.update(step, {})

    watch = SimpleNamespace(alarm=None)
    checkpoints = SimpleNamespace(watch=watch, back=None, is_new=True, before_first_step=nothing)
    loop = a_loop(
        config_of(training={"steps": 4}),
        done=0,
        unevaluated=None,
        restored=None,
        run_components=SimpleNamespace(
            objective=SimpleNamespace(name="gspo"),
            checkpoints=checkpoints,
            logger=SimpleNamespace(progress=lambda *_: progress, write=nothing),
        ),
        suites=SimpleNamespace(close=nothing),
        collector=SimpleNamespace(source=SimpleNamespace(take_weights=nothing)),
        evaluate=evaluate,
        _whole_step=whole_step,
    )
    loop.run()
    told = [line for line in stream.getvalue().splitlines() if line.startswith("RL  1/4")]
    assert told == ["RL  1/4  3.00 s/step  ETA 9.00 s"]


@pytest.mark.parametrize(
    ("has_servers", "rollout", "earlier", "idle"),
    # In the second case, an earlier start of the run has generated the responses.
    [(True, 2.0, 0.0, 0.25), (True, 24.0, 24.0, 0.75), (False, 2.0, 0.0, None)],
)
def test_the_speed_of_a_step_is_that_of_the_sampled_tokens(
    monkeypatch: pytest.MonkeyPatch,
    has_servers: bool,
    rollout: float,
    earlier: float,
    idle: float | None,
) -> None:
    clock = iter([100.0, 101.0, 104.0, 108.0])  # the start, the phase from 101 to 104, the end
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = PhaseTimer(torch.device("cpu"), earlier)
    with timer("train"):
        pass
    experience: Any = SimpleNamespace(rollout_seconds=rollout, reward_seconds=0.5, num_tokens=400)
    found = timer.step_metrics(experience, has_servers)
    assert found.pop("perf/peak_memory_bytes") > 0
    idles = {} if idle is None else {"perf/trainer_idle_share": idle}
    assert found == idles | {
        "perf/step_seconds": earlier + 8,
        "perf/rollout_seconds": rollout,
        "perf/reward_seconds": 0.5,
        "perf/train_seconds": 3.0,
        "perf/tokens_per_second": 400 / (earlier + 8),
    }


# Scoring on several ranks


def test_ranks_wait_for_the_slowest_and_count_the_failures_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [[0.0, 2.0, 0.0, 1.0, 7.5], [0.0, 0.0, 3.0, 0.0, 0.5]]

    def gathered(values: list[float]) -> torch.Tensor:
        return torch.tensor([[float(value) for value in values], *others], dtype=torch.float64)

    monkeypatch.setattr(rollouts, "all_gather_numbers", gathered)
    config = config_of()
    tokenizer: Any = None
    scorer = GroupScorer.of(config, tokenizer, Reward("mine", lambda _: 0.0), config.reward)
    source = object.__new__(MegatronRollouts)
    failed, seconds = source._agree(scorer, None, FailedCalls(1, 1, 1))
    assert failed == FailedCalls(3, 4, 2) and seconds == 7.5


# Advantages of the parts of a reward


def scored_by(config: Config, function: Callable[[Sample], Any], lengths: list[int]) -> np.ndarray:
    """The values that a step learns from, for responses of these lengths. The first two responses
    belong to one prompt."""
    given = [Sample("p", "", f"r{n}", False, num_tokens=size) for n, size in enumerate(lengths)]
    tokenizer: Any = None
    reward = Reward("mine", function)
    scorer = GroupScorer.of(config, tokenizer, reward, config.reward, is_learnt=True)
    numbers = np.array([0, 0, *range(1, len(lengths) - 1)])
    group: Any = SimpleNamespace(group_index=numbers, teacher_logprobs=None)
    scores, failed = scorer.scorer.score(given)
    scorer.fill_in(group, given, scores, failed, 0.0)
    return group.shaped


def test_gdpo_learns_from_each_part_by_its_weight_and_from_the_penalty() -> None:
    config = config_of(
        objective={"advantage": "gdpo", "advantage_std": "population"},
        reward={"weights": {"b": -3.0}, "overlong_buffer": 4, "overlong_penalty": 0.5},
        rollout={"max_response_tokens": 8},
    )

    def parts(sample: Sample) -> dict[str, float]:
        return {"a": 1e6 * (sample.response == "r0"), "b": float(sample.response == "r1")}

    # The first response is better in both parts, but too long. A part counts by its weight,
    # whatever the size of its values. The third response is alone in its group.
    assert scored_by(config, parts, [8, 2, 2]) == pytest.approx([1 + 3 - 1, -1 - 3 + 1, 0])
    assert scored_by(config, parts, [2, 2, 8]) == pytest.approx([1 + 3, -1 - 3, 0])
    # These values are no rewards, so their mean is not the metric reward/shaped_mean.
    tokenizer: Any = None
    for is_learnt in (True, False):
        reward = Reward("mine", parts)
        scorer = GroupScorer.of(config, tokenizer, reward, config.reward, is_learnt=is_learnt)
        assert scorer.shapes == (not is_learnt)


def test_gdpo_needs_parts() -> None:
    config = config_of(objective={"advantage": "gdpo"})
    with pytest.raises(RewardError, match="'mine' returned no parts, and objective.advantage"):
        scored_by(config, lambda _: 1.0, [1, 1])
    plain = config_of(objective={"advantage": "group_mean"})
    assert scored_by(plain, lambda _: 1.0, [1, 1]).tolist() == [1, 1]
