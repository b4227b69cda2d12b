"""Dynamic sampling and rewards of turns lead to the same batch on every layout."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config
from gspo_megatron.data import tokenizers
from gspo_megatron.errors import RewardError
from gspo_megatron.objectives.advantages import build_advantages
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rl.loop import collect
from gspo_megatron.rl.rollouts import Collector
from gspo_megatron.rl.run import collector_of
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.types import Prompt, Sample, TurnRewards
from tests.parallel.models import VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool

GROUP, PROMPTS = 3, 3
SAMPLING = Sampling(max_tokens=8)
# Groups 1, 3 and 4 are kept. On two data-parallel ranks, one rank has two of these groups and the
# other rank has one. On four data-parallel ranks, one rank has no group. Three groups are needed,
# so group 5 is dropped, and there is no third round.
ANSWERS = ["flat", "", "flat", "", "", "", "", "", ""]
KEPT = [1, 3, 4]
PAD_ID, EOS_ID = 0, 2
TURN = 3  # tokens


class Tokenizer:
    """A tokenizer whose text is the token ids."""

    eos_ids = (EOS_ID,)
    decode_response = tokenizers.Tokenizer.decode_response

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def reward_of_turns(sample: Sample) -> TurnRewards:
    """A turn has three tokens. The reward of a turn is proportional to the sum of its token ids.
    With the answer "flat", all rewards are 0."""
    ends = [*range(TURN, sample.num_tokens, TURN), sample.num_tokens]
    if sample.answer == "flat":
        return TurnRewards([0.0] * len(ends), ends)
    ids = [int(word) for word in sample.response.split()]
    return TurnRewards([sum(ids[max(0, end - TURN) : end]) / 64 for end in ends], ends)


# A sequence on a rank that trains on it: its group, its tokens and reward, and its token
# advantages.
Received = tuple[int, tuple[list[int], float], list[float]]
Step = tuple[dict[int, list[Received]], dict[str, float]]


def step(config: Config, prompts: list[list[int]]) -> tuple[dict[int, Received], dict[str, float]]:
    """This rank's sequences of a step by number, and the metrics. Sequence n goes to data-parallel
    rank n % size, whichever rank sampled it."""
    engine = MegatronEngine(build_on_ranks(config), pad_id=PAD_ID, eos_id=EOS_ID)
    reward = Reward("turns", reward_of_turns)
    drawn = [
        Prompt(f"prompt {n}", answer, f"f:{n}", {}, tuple(ids))
        for n, (ids, answer) in enumerate(zip(prompts, ANSWERS, strict=True))
    ]
    collector = a_collector(config, engine, reward, drawn)
    count = config.rollout.prompts_per_step
    rows = iter([*range(start, start + count)] for start in range(0, len(drawn), count))
    experience = collect(collector, rows, draw_of(config))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    index = gather_index(experience.batch, experience.shaped, group)
    _, advantages = build_advantages(config.objective).of_step(
        index.rewards, index.groups, experience.turns
    )
    size = parallel_state.get_data_parallel_world_size()
    count = len(index.lengths)
    plan = MiniBatch(tuple((tuple(range(rank, count, size)),) for rank in range(size)), count, 0)
    received = redistribute(experience.batch, index, [plan], group, token_advantages=advantages)
    assert received.token_advantages is not None
    found = {}
    for number, tokens in received.tokens.items():
        start = received.offsets[number]
        own = received.token_advantages[start : start + index.response_lengths[number]]
        content = tokens.tolist(), float(index.rewards[number])
        found[number] = index.groups[number], content, own.tolist()
    return found, experience.metrics


def a_collector(
    config: Config, engine: MegatronEngine, reward: Reward, prompts: list[Prompt]
) -> Collector:
    files = {"data.prompts": prompts, "data.eval_prompts": prompts}
    inputs: Any = SimpleNamespace(tokenizer=Tokenizer(), files=files)
    device = torch.device("cpu")
    source = MegatronRollouts(engine, None, device)
    return collector_of(config, inputs, source, reward, device)


def draw_of(config: Config) -> RolloutRequest:
    group_size = config.rollout.group_size
    return RolloutRequest(
        "step_00000001", "data.prompts", [], 0, group_size, SAMPLING, 21, version=0
    )


PARTS = {"scale": 0.5, "weights": {"even": 2.0}}


def parts(sample: Sample) -> dict[str, float]:
    ids = [int(word) for word in sample.response.split()]
    return {"even": sum(n % 2 == 0 for n in ids) / 8, "first": ids[0] / 64 if ids else 0.0}


def uneven_parts(sample: Sample) -> dict[str, float]:
    """A reward whose parts have different names on different data-parallel ranks."""
    number = int(sample.prompt.split()[1])
    return {"odd" if number % 2 else "even": 1.0}


def fails_once(sample: Sample) -> float:
    if sample.prompt == "prompt 1":
        raise ConnectionError("no judge")
    return 1.0


def scored(config: Config, name: str, prompts: list[list[int]]) -> dict[str, Any]:
    """The metrics of a step and of an evaluation with its responses, or the error."""
    engine = MegatronEngine(build_on_ranks(config), pad_id=PAD_ID, eos_id=EOS_ID)
    reward = Reward("mine", globals()[name])
    drawn = [Prompt(f"prompt {n}", "", f"f:{n}", {}, tuple(p)) for n, p in enumerate(prompts)]
    collector = a_collector(config, engine, reward, drawn)
    try:
        experience = collect(collector, iter([[*range(PROMPTS)]]), draw_of(config))
        evaluation, responses = collector.evaluate()
    except RewardError as error:
        return {"error": str(error)}
    groups = sorted(set(experience.batch.group_index.tolist()))
    return {
        "metrics": experience.metrics | evaluation,
        "responses": responses,
        "groups": groups,
    }


def scored_on(pool: Pool, layout: str, name: str, **reward: Any) -> list[dict[str, Any]]:
    """The results of `scored` on each rank."""
    config = config_of(layout)
    rollout = config.rollout.model_copy(update={"dynamic_sampling": False})
    section = config.reward.model_copy(update={"clip": None, "retries": 0, **reward})
    config = config.model_copy(update={"rollout": rollout, "reward": section})
    return pool.each(config, scored, name=name, prompts=make_prompts())


def make_prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(2 + n % 3)] for n in range(9)]


def config_of(layout: str) -> Config:
    config = odd_moe(layout, {"name": "gspo_token"})
    rollout = {"dynamic_sampling": True, "group_size": GROUP, "prompts_per_step": PROMPTS}
    rollout["max_response_tokens"] = SAMPLING.max_tokens
    sections = {"rollout": rollout, "reward": {"scale": 0.5, "clip": 0.6}}
    changed = {k: getattr(config, k).model_copy(update=v) for k, v in sections.items()}
    return config.model_copy(update=changed)


def collected(pool: Pool, layout: str) -> Step:
    """All copies of each sequence on the ranks that train on it, and the metrics, which are equal
    on all ranks."""
    answers = pool.each(config_of(layout), step, prompts=make_prompts())
    assert all(metrics == answers[0][1] for _, metrics in answers)
    numbers = {number for received, _ in answers for number in received}
    copies = {n: [received[n] for received, _ in answers if n in received] for n in numbers}
    return copies, answers[0][1]


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> Step:
    return collected(pool, "tp=1")


def test_one_rank_keeps_the_first_groups_with_spread(of_one_rank: Step) -> None:
    sequences, metrics = of_one_rank
    assert [sequences[n][0][0] for n in sorted(sequences)] == [g for g in KEPT for _ in range(3)]
    assert metrics["rollout/refills"] == 1
    assert metrics["rollout/groups_dropped"] == 3
    assert metrics["reward/zero_spread_groups"] == pytest.approx(2 / 6)
    assert metrics["reward/mean"] > 2 * metrics["reward/shaped_mean"]  # some rewards are clipped
    for group in KEPT:
        # A turn has three tokens. Its first token shows the advantage of the turn.
        alone = [copies[0] for copies in sequences.values()]
        turns = [x for of, _, advantages in alone if of == group for x in advantages[::TURN]]
        assert len(turns) > GROUP
        assert statistics.mean(turns) == pytest.approx(0, abs=1e-6)
        assert statistics.stdev(turns) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2", "dp=4,ep=4", "cp=2"])
def test_the_batch_is_that_of_one_rank(pool: Pool, of_one_rank: Step, layout: str) -> None:
    expected, expected_metrics = of_one_rank
    sequences, metrics = collected(pool, layout)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    assert sequences.keys() == expected.keys()
    for number, copies in sequences.items():
        group, content, advantages = expected[number][0]
        for copy in copies:
            assert copy == (group, content, pytest.approx(advantages, abs=1e-6))


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2", "cp=2"])
def test_parts_lengths_and_held_out_responses_are_those_of_one_rank(
    pool: Pool, layout: str
) -> None:
    (expected,) = scored_on(pool, "tp=1", "parts", **PARTS)
    assert {"reward/even", "reward/first", "response/length_p99"} <= expected["metrics"].keys()
    assert len(expected["responses"]) == 9
    main, *others = scored_on(pool, layout, "parts", **PARTS)
    assert main["responses"] == expected["responses"]
    assert main["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
    for other in others:
        assert other["metrics"] == main["metrics"] and other["responses"] == []


def test_parts_that_differ_between_ranks_are_refused_on_all(pool: Pool) -> None:
    answers = scored_on(pool, "dp=2", "uneven_parts")
    assert {answer["error"] for answer in answers} == {
        "reward 'mine' returned the parts even and the parts odd on different ranks; the same "
        "names are wanted in every call"
    }


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "tp=2,pp=2"])
def test_a_call_that_fails_on_one_rank_is_known_on_all(pool: Pool, layout: str) -> None:
    answers = scored_on(pool, layout, "fails_once")
    (error,) = {answer["error"] for answer in answers}
    assert error.startswith("reward 'mine' raised ConnectionError: no judge (")
    answers = scored_on(pool, layout, "fails_once", on_failure="drop_group")
    for answer in answers:
        assert answer["metrics"]["reward/failed_groups"] == 1
        assert answer["metrics"]["reward/errors"] == GROUP
        assert answer["metrics"]["evaluation/failed"] == 1
    assert set().union(*(answer["groups"] for answer in answers)) == {0, 2}
