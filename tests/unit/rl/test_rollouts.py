"""The responses that a step on one rank learns from. The engine's responses are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from scipy import stats

from gspo_megatron.batching.redistribute import gather_index
from gspo_megatron.config import Config, parse_config
from gspo_megatron.data import tokenizers
from gspo_megatron.environments.episode import Client, Episode, EpisodeLimits, EpisodeRunner
from gspo_megatron.errors import ConfigError, DataError, EpisodeError, RewardError
from gspo_megatron.objectives.advantages import build_advantages
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rl.loop import collect
from gspo_megatron.rl.rollouts import Collector, Experience
from gspo_megatron.rl.run import collector_of
from gspo_megatron.rollout.engine import Requests, RolloutRequest, Sampling
from gspo_megatron.rollout.megatron.rollouts import Generated, MegatronRollouts, _seed_of_turn
from gspo_megatron.types import Prompt, Reasoned, RolloutBatch, Sample, TurnRewards

pytestmark = pytest.mark.usefixtures("one_rank")

GROUP, PROMPTS, LONGEST, EOS = 2, 3, 4, 1
SAMPLING = Sampling(max_tokens=LONGEST)


class Tokenizer:
    """A tokenizer in which token 65 is "A", and so on."""

    eos_ids, eos_id = (0, EOS), EOS
    decode_response = tokenizers.Tokenizer.decode_response
    special_tokens: ClassVar[dict[str, int]] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


class Engine:
    """An engine whose response n has n % 4 + 1 tokens. A response of 4 tokens is truncated."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.noise: list[bool] = []
        self.seeds: list[int] = []
        self.sampling = SAMPLING

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        per_prompt = requests.responses_per_prompt
        samples = requests.sample_indices()
        self.samples += samples
        self.noise.append(requests.router_noise)
        self.seeds.append(seed)
        self.sampling = sampling
        prompts = [p for p in requests.prompts for _ in range(per_prompt)]
        responses = []
        for sample in samples:
            length = sample % 4 + 1
            ids = [65 + sample] * length
            responses.append(ids if length == LONGEST else [*ids[:-1], EOS])
        flat = [i for p, r in zip(prompts, responses) for i in (*p, *r)]
        lengths = [len(r) for r in responses]
        return RolloutBatch(
            tokens=torch.tensor(flat),
            prompt_lengths=torch.tensor([len(p) for p in prompts]),
            response_lengths=torch.tensor(lengths),
            rollout_logprobs=torch.tensor(
                [-s - 0.5 for s, n in zip(samples, lengths) for _ in range(n)]
            ),
            truncated=torch.tensor([n == LONGEST for n in lengths]),
            sample_index=torch.tensor(samples),
            group_index=torch.tensor(requests.group_index).repeat_interleave(per_prompt),
        )


class Prompts:
    """The prompts 0, 1, 2, .... `next` returns the next ones. All responses to a prompt in `flat`
    get the same reward."""

    def __init__(self, *flat: int) -> None:
        self.flat, self.drawn = flat, 0

    def __next__(self) -> list[int]:
        self.drawn += PROMPTS
        return [*range(self.drawn - PROMPTS, self.drawn)]

    def __getitem__(self, n: int) -> Prompt:
        answer = "flat" if n in self.flat else ""
        return Prompt(f"prompt {n}", answer, f"f:{n}", {}, (5,) * (n % 3))


DRAW = RolloutRequest("step_00000001", "data.prompts", [], 0, GROUP, SAMPLING, 1, version=0)


def number(sample: Sample) -> int:
    return int(sample.prompt.split()[1])


def by_length(sample: Sample) -> float:
    return 1.0 if sample.answer == "flat" else sample.num_tokens / 8


def config_of(**sections: dict[str, Any]) -> Config:
    rollout = {"group_size": GROUP, "prompts_per_step": PROMPTS, "max_response_tokens": LONGEST}
    rollout |= sections.pop("rollout", {})
    return parse_config({"data": {"tokenizer": "t"}, "rollout": rollout, **sections})


def collector(
    function: Callable[[Sample], Any] = by_length, **sections: dict[str, Any]
) -> Collector:
    device = torch.device("cpu")
    source = MegatronRollouts(cast(Any, Engine()), None, device)
    inputs: Any = SimpleNamespace(tokenizer=Tokenizer(), files={})
    return collector_of(config_of(**sections), inputs, source, Reward("mine", function), device)


def collected(
    draw: Prompts, function: Callable[[Sample], Any] = by_length, **sections: dict[str, Any]
) -> Experience:
    return drawn_by(collector(function, **sections), draw)


def drawn_by(found: Collector, draw: Prompts) -> Experience:
    found.prompts = {"data.prompts": draw}
    return collect(found, draw, DRAW)


def evaluated(found: Collector) -> tuple[dict[str, float], list[dict[str, Any]]]:
    found.prompts = {"data.eval_prompts": [Prompts()[n] for n in range(PROMPTS)]}
    return found.evaluate()


def token_advantages(experience: Experience, **sections: dict[str, Any]) -> torch.Tensor | None:
    section, group = config_of(**sections).objective, dist.group.WORLD
    index = gather_index(experience.batch, experience.shaped, group)
    return build_advantages(section).of_step(index.rewards, index.groups, experience.turns)[1]


def test_noise_on_the_routers_is_of_a_step_and_not_of_a_suite() -> None:
    found = collector()
    found.prompts = {"data.prompts": Prompts()}
    draw = replace(DRAW, rows=[0, 1])
    for noise in (True, False):
        found.sample(draw, router_noise=noise)
    assert found.source.engine.noise == [True, False]


class Talk:
    """An environment with two turns. It fails at once for a prompt of `flat`."""

    async def rollout(self, client: Client, task: Prompt) -> None:
        if task.answer == "flat":
            raise ConnectionError("no tool")
        await client.generate()
        await client.generate(text="A")


def test_each_turn_has_random_numbers_of_its_own() -> None:
    """The first turn has the random numbers of a response without an environment."""
    engine, tokenizer = Engine(), cast(Any, Tokenizer())
    runner = EpisodeRunner(cast(Any, Talk()), tokenizer, EpisodeLimits(2, 20))
    batched = MegatronRollouts(cast(Any, engine), runner, torch.device("cpu"))
    prompts = [Prompts(1)[n] for n in (1, 2)]
    prompts[0] = replace(prompts[0], token_ids=(5,))
    found = batched.share(batched.generate({2: prompts[1], 1: prompts[0]}, GROUP, SAMPLING, seed=7))
    assert engine.seeds == [7, 7 + 2**56]
    assert len({_seed_of_turn(7, turn) % 2**64 for turn in range(1000)}) == 1000
    # two samples of the prompt that does not fail, in two turns
    assert engine.samples == [4, 5, 4, 5]
    assert found.sample_index.tolist() == [4, 5, 2, 3]
    assert found.truncated.tolist() == [False, False, True, True]
    # The turns have 1 and 2 tokens, with an "A" between them. The other group failed before its
    # first turn.
    assert found.response_lengths.tolist() == [1 + 1 + 1, 2 + 1 + 2, 1, 1]
    assert found.sampled.tolist() == [
        *(True, False, True), *(True, True, False, True, True), False, False
    ]  # fmt: skip
    between = found.rollout_logprobs[[1, 5, 8, 9]]
    assert between.tolist() == [0] * 4 and (found.rollout_logprobs[[0, 2]] == -4.5).all()


DYNAMIC = {"dynamic_sampling": True, "max_refills": 2}


def test_a_plain_step_takes_every_response() -> None:
    seen: list[Sample] = []

    def watch(sample: Sample) -> float:
        seen.append(sample)
        return by_length(sample)

    experience = collected(draw := Prompts(1), watch)
    assert draw.drawn == PROMPTS
    assert experience.batch.sample_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert experience.shaped.tolist() == [0.125, 0.25, 1, 1, 0.125, 0.25]
    assert experience.shaped.dtype == torch.float64
    assert token_advantages(experience) is None
    assert experience.num_tokens == 1 + 2 + 3 + 4 + 1 + 2
    assert 0 < experience.reward_seconds <= experience.rollout_seconds
    assert [(s.prompt, s.response, s.num_tokens, s.truncated) for s in seen] == [
        ("prompt 0", "", 1, False),
        ("prompt 0", "B", 2, False),
        ("prompt 1", "CC", 3, False),
        ("prompt 1", "DDDD", 4, True),
        ("prompt 2", "", 1, False),
        ("prompt 2", "F", 2, False),
    ]
    assert experience.metrics == {
        "reward/mean": pytest.approx(2.75 / 6),
        "reward/std": pytest.approx(statistics.pstdev([0.125, 0.25, 1, 1, 0.125, 0.25])),
        "reward/zero_spread_groups": pytest.approx(1 / 3),
        "reward/errors": 0,
        "reward/timeouts": 0,
        "response/length_mean": pytest.approx(13 / 6),
        "response/length_p50": 2,  # the median of 1, 1, 2, 2, 3, 4
        "response/length_p90": pytest.approx(3.5),
        "response/length_p99": pytest.approx(3.95),
        "response/length_max": 4,
        "response/truncated": pytest.approx(1 / 6),
    }


def test_groups_without_spread_make_room_for_further_prompts() -> None:
    draw = Prompts(0, 2, 4)
    found = collector(rollout=DYNAMIC)
    experience = drawn_by(found, draw)
    assert draw.drawn == 2 * PROMPTS
    assert found.source.engine.samples == list(range(12))  # each sample has its own random numbers
    batch = experience.batch
    assert batch.group_index.tolist() == [1, 1, 3, 3, 5, 5]
    assert batch.sample_index.tolist() == [2, 3, 6, 7, 10, 11]
    assert batch.response_lengths.tolist() == [3, 4] * 3
    assert experience.shaped.tolist() == [3 / 8, 4 / 8] * 3
    tokens = batch.tokens.split((batch.prompt_lengths + batch.response_lengths).tolist())
    assert tokens[0].tolist() == [5, 67, 67, EOS]
    assert tokens[-1].tolist() == [5, 5, 76, 76, 76, 76]
    assert batch.rollout_logprobs.tolist() == [
        -s - 0.5 for s in (2, 3, 6, 7, 10, 11) for _ in range(s % 4 + 1)
    ]
    # All responses count in the metrics, also those of dropped groups.
    rewards = [1.0, 1.0, 3 / 8, 4 / 8] * 3
    assert experience.metrics["reward/mean"] == pytest.approx(sum(rewards) / 12)
    assert experience.metrics["reward/std"] == pytest.approx(statistics.pstdev(rewards))
    assert experience.metrics["reward/zero_spread_groups"] == 0.5
    assert experience.metrics["response/length_mean"] == 2.5
    assert experience.metrics["response/truncated"] == 0.25
    assert experience.metrics["rollout/refills"] == 1
    assert experience.metrics["rollout/groups_dropped"] == 3
    assert experience.metrics["rollout/no_spread"] == 0
    assert experience.num_tokens == 30


def test_written_samples_are_the_first_of_all_and_as_the_reward_has_them() -> None:
    draw = Prompts(0, 2, 4)
    sections = {"reward": {"scale": 3.0}, "logging": {"samples_per_step": 3}}
    found = collector(by_length, rollout=DYNAMIC, **sections)
    experience = drawn_by(found, draw)
    assert [(s["prompt"], s["response"], s["reward"]) for s in experience.samples] == [
        ("prompt 0", "", 1.0),
        ("prompt 0", "B", 1.0),
        ("prompt 1", "CC", 3 / 8),
    ]


def test_shaped_rewards_are_trained_on_and_the_others_logged() -> None:
    sections = {"reward": {"scale": 2.0, "clip": 0.5, "overlong_buffer": 2}}
    experience = collected(Prompts(1), **sections)
    # The rewards 1/8, 2/8, 1, 1, 1/8, 2/8 are doubled and limited to 0.5. A response of 3 tokens
    # then loses 0.5, and one of 4 tokens loses 1.
    assert experience.shaped.tolist() == [0.25, 0.5, 0, -0.5, 0.25, 0.5]
    assert experience.metrics["reward/mean"] == pytest.approx(2.75 / 6)
    assert experience.metrics["reward/shaped_mean"] == pytest.approx(1 / 6)
    assert experience.metrics["reward/zero_spread_groups"] == 0


def test_a_spread_that_clipping_takes_away_is_none() -> None:
    sections = {"reward": {"clip": 0.1}, "rollout": DYNAMIC}
    experience = collected(Prompts(), **sections)
    assert experience.metrics["rollout/no_spread"] == 1
    assert experience.metrics["reward/std"] > 0


def in_turns(sample: Sample) -> TurnRewards:
    """The reward of each turn of two tokens is the number of the turn. For prompts in `flat`, every
    turn has the reward 0."""
    ends = [*range(2, sample.num_tokens, 2), sample.num_tokens]
    worth = 0.0 if sample.answer == "flat" else 1.0
    return TurnRewards([worth * (n + 1) for n in range(len(ends))], ends)


TOKENS = {"name": "gspo_token"}


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_sum_of_its_turns_is_a_responses_reward(scale: float) -> None:
    """The first token is one turn, and all others are a second turn."""

    def first_and_rest(sample: Sample) -> TurnRewards:
        if sample.num_tokens == 1:
            return TurnRewards([float(number(sample))], [1])
        rest = number(sample) + len(sample.response)
        return TurnRewards([0.5, rest], [1, sample.num_tokens])

    found = collector(
        first_and_rest, objective=TOKENS, reward={"scale": scale}, logging={"samples_per_step": 9}
    )
    experience = drawn_by(found, Prompts())
    plain = [0, 1.5, 3.5, 5.5, 2, 3.5]
    assert experience.shaped.tolist() == [scale * r for r in plain]
    assert experience.metrics["reward/mean"] == pytest.approx(sum(plain) / 6)
    assert [each["reward"] for each in experience.samples] == plain
    expected = []
    for turns, tokens in (
        ([0, 0.5, 1], [1, 1, 1]),
        ([0.5, 3, 0.5, 5], [1, 2, 1, 3]),
        ([2, 0.5, 3], [1, 1, 1]),
    ):
        # `scale` is not needed here, because scaled rewards have the same advantages
        mean, std = statistics.mean(turns), statistics.stdev(turns)
        expected += [(r - mean) / std for r, n in zip(turns, tokens, strict=True) for _ in range(n)]
    found = token_advantages(experience, objective=TOKENS)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_advantages_of_tokens_go_with_the_groups_that_are_kept() -> None:
    """Responses to even prompts have one turn of reward 1. Responses to odd prompts have two turns
    of reward 1."""

    def reward(sample: Sample) -> TurnRewards:
        halves = in_turns(sample)
        worth = sample.num_tokens if len(halves.ends) == 2 else 1
        return TurnRewards([worth * r for r in halves.rewards], halves.ends)

    experience = collected(Prompts(5), reward, objective=TOKENS, rollout=DYNAMIC)
    assert experience.batch.group_index.tolist() == [1, 1, 3, 3, 7, 7]
    turns = [3, 6, 4, 8]
    mean, std = statistics.mean(turns), statistics.stdev(turns)
    third, sixth, fourth, eighth = ((r - mean) / std for r in turns)
    group = [third, third, sixth, fourth, fourth, eighth, eighth]
    found = token_advantages(experience, objective=TOKENS)
    assert found.tolist() == pytest.approx(group * 3, rel=1e-6)


def test_groups_with_rewards_of_turns_are_judged_by_the_turns() -> None:
    """Odd prompts have equal sums and different turns, even prompts the opposite."""

    def reward(sample: Sample) -> TurnRewards:
        if number(sample) % 2:
            first = float(sample.num_tokens == 3)
            return TurnRewards([first, 1 - first], [1, sample.num_tokens])
        return TurnRewards([1.0] * sample.num_tokens, [*range(1, sample.num_tokens + 1)])

    experience = collected(Prompts(), reward, objective=TOKENS, rollout=DYNAMIC)
    assert experience.batch.group_index.unique().tolist() == [1, 3, 5]
    assert experience.metrics["reward/zero_spread_groups"] == 0.5
    assert [each["spread"] for each in experience.draws] == [False, True] * 3


def test_rewards_of_turns_for_some_responses_only() -> None:
    def reward(sample: Sample) -> float | TurnRewards:
        return in_turns(sample) if number(sample) == 1 else 1.0

    with pytest.raises(RewardError, match="reward 'mine' returned rewards of turns for 33.3% of a"):
        collected(Prompts(), reward, objective=TOKENS)


def test_rewards_of_turns_with_an_objective_of_sequences() -> None:
    with pytest.raises(ConfigError, match=r"objective.name = 'gspo': .* allowed: gspo_token, grpo"):
        token_advantages(collected(Prompts(), in_turns))


def accuracy_of(share: float, count: int) -> dict[str, object]:
    """The accuracy over `count` prompts, with its interval."""
    interval = stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
    return {
        "evaluation/accuracy": pytest.approx(share),
        "evaluation/accuracy_low": pytest.approx(interval.low),
        "evaluation/accuracy_high": pytest.approx(interval.high),
        "evaluation/prompts": count,
    }


def test_an_evaluation_takes_the_sum_and_no_shaping() -> None:
    sections = {"reward": {"scale": 9.0, "overlong_buffer": 2}}
    found = collector(in_turns, **sections)
    metrics, _ = evaluated(found)
    # Each prompt has one response, with 1, 2 or 3 tokens. Their rewards are 1, 1, and 1 + 2.
    assert metrics == {
        "evaluation/reward": pytest.approx(5 / 3),
        **accuracy_of(1.0, 3),
    }


def test_a_held_out_response_is_correct_from_a_reward_on() -> None:
    found = collector(evaluation={"correct_at": 0.25})
    metrics, responses = evaluated(found)
    assert metrics == {"evaluation/reward": 0.25, **accuracy_of(2 / 3, 3)}
    assert found.source.engine.sampling == Sampling(LONGEST, temperature=0.0)  # greedy
    told = [(r["prompt"], r["response"], r["reward"], r["correct"]) for r in responses]
    assert told == [
        ("prompt 0", "", 0.125, False),
        ("prompt 1", "B", 0.25, True),
        ("prompt 2", "CC", 0.375, True),
    ]
    assert [(r["num_tokens"], r["truncated"], r["answer"]) for r in responses] == [
        (1, False, ""),
        (2, False, ""),
        (3, False, ""),
    ]
    assert "parts" not in responses[0] and "row_id" in responses[0]


# --- The parts of rewards, and calls that fail ----------------------------------------------------


def in_parts(sample: Sample) -> dict[str, float]:
    return {"short": 1 - sample.num_tokens / 4, "late": number(sample)}


def test_parts_are_logged_and_their_weighted_sum_is_trained_on() -> None:
    sections = {"reward": {"weights": {"late": 0.5}, "scale": 2.0}}
    experience = collected(Prompts(), in_parts, **sections)
    short, late = [0.75, 0.5, 0.25, 0, 0.75, 0.5], [0, 0, 1, 1, 2, 2]
    rewards = [a + b / 2 for a, b in zip(short, late, strict=True)]
    assert experience.group.rewards.tolist() == rewards
    assert experience.shaped.tolist() == [2 * r for r in rewards]
    assert experience.metrics["reward/mean"] == pytest.approx(sum(rewards) / 6)
    assert experience.metrics["reward/short"] == pytest.approx(sum(short) / 6)
    assert experience.metrics["reward/late"] == 1
    parts = [each["parts"] for each in experience.samples]
    assert parts == [{"late": 0, "short": 0.75}, {"late": 0, "short": 0.5}]
    _, responses = evaluated(collector(in_parts))
    assert [r["parts"]["late"] for r in responses] == [0, 1, 2]


def test_reasons_of_rewards_are_written_with_the_responses() -> None:
    def reward(sample: Sample) -> float:
        late = number(sample) == 2
        return Reasoned(0.25, f"late: {sample.num_tokens}" + "x" * 5000) if late else 0.5

    _, responses = evaluated(collector(reward))
    assert [r["reward"] for r in responses] == [0.5, 0.5, 0.25]
    assert ["reason" in r for r in responses] == [False, False, True]
    reason = responses[2]["reason"]
    assert reason.startswith("late: ") and reason.endswith("xxx") and len(reason) < 2100
    assert not any("reason" in each for each in collected(Prompts(), reward).samples)


def failing_for(*prompts: int, since: int = 0) -> Callable[[Sample], float]:
    """A reward that fails for these prompts, except for responses of at most `since` tokens."""

    def reward(sample: Sample) -> float:
        if number(sample) in prompts and sample.num_tokens > since:
            raise ConnectionError("no judge")
        return by_length(sample)

    return reward


DROPPING = {"retries": 0, "on_failure": "drop_group"}


def test_the_group_of_a_failed_call_is_left_out_and_counted() -> None:
    """The reward fails for the second response of group 0, which has two tokens."""
    experience = collected(Prompts(), failing_for(0, since=1), reward=DROPPING)
    assert experience.batch.group_index.tolist() == [1, 1, 2, 2]
    assert experience.shaped.tolist() == [3 / 8, 4 / 8, 1 / 8, 2 / 8]
    rewards = [1 / 8, 3 / 8, 4 / 8, 1 / 8, 2 / 8]  # the rewards of calls that did not fail
    assert experience.metrics["reward/mean"] == pytest.approx(sum(rewards) / 5)
    assert experience.metrics["reward/std"] == pytest.approx(statistics.pstdev(rewards))
    assert experience.metrics["reward/zero_spread_groups"] == 0
    assert experience.metrics["reward/errors"] == 1
    assert experience.metrics["reward/failed_groups"] == 1
    assert experience.metrics["response/length_mean"] == pytest.approx(13 / 6)
    assert experience.num_tokens == 13


@pytest.mark.parametrize("objective", [{}, TOKENS])
def test_dynamic_sampling_replaces_groups_of_failed_calls(objective: dict[str, Any]) -> None:
    """The other response of group 1 has turns with a spread, if the objective is one of tokens."""
    fails, draw = failing_for(1, since=3), Prompts(2)

    def of_turns(sample: Sample) -> TurnRewards:
        value, size = fails(sample), sample.num_tokens
        return TurnRewards([value], [size]) if size < 3 else TurnRewards([0.0, value], [1, size])

    options = {"objective": objective, "rollout": DYNAMIC, "reward": DROPPING}
    experience = collected(draw, of_turns if objective else fails, **options)
    assert draw.drawn == 2 * PROMPTS
    assert experience.batch.group_index.tolist() == [0, 0, 3, 3, 4, 4]
    assert experience.metrics["reward/failed_groups"] == 1
    assert experience.metrics["rollout/groups_dropped"] == 3


@pytest.mark.parametrize("rollout", [{}, DYNAMIC])
def test_a_step_or_evaluation_without_any_reward_ends_the_run(rollout: dict[str, Any]) -> None:
    reward = failing_for(*range(100))
    with pytest.raises(RewardError, match="'mine': its calls failed in all groups of a step, so"):
        collected(Prompts(), reward, rollout=rollout, reward=DROPPING)
    with pytest.raises(RewardError, match="its calls failed in all groups of an evaluation"):
        evaluated(collector(reward, reward=DROPPING))


def ended(found: Collector, *errors: str) -> Generated:
    """Episodes of one turn. An episode with an error text has failed."""
    generated = found.source.generate({0: Prompts()[0]}, len(errors), SAMPLING, 1)
    client = Client(
        Prompts()[0], EpisodeLimits(1, LONGEST), cast(Any, Tokenizer()), cast(Any, None)
    )
    episodes = [Episode(client, 1.0, EpisodeError(e) if e else None) for e in errors]
    return replace(generated, episodes=episodes)


def test_a_failed_episode_is_the_environment_s_fault() -> None:
    found = collector()
    with pytest.raises(EpisodeError, match="environment Mine: no tool"):
        generated = ended(found, "", "environment Mine: no tool")
        found.source.score(generated, {0: Prompts()[0]}, found.scorer, learns=True)
    found = collector(reward=DROPPING)
    generated = ended(found, "a", "b")
    failed, _ = found.source.score(generated, {0: Prompts()[0]}, found.scorer, learns=True)
    assert failed.episodes == 2
    found.prompts = {"data.prompts": [Prompts()[0]]}
    told = [each for _, each in found.records(replace(DRAW, rows=[0]), generated.group, 1.0)]
    assert [(each["reward"], each["error"]) for each in told] == [(None, "a"), (None, "b")]
    told = "its episodes failed in all groups of a step, so nothing is left; .*gspo-megatron play"
    with pytest.raises(EpisodeError, match=f"the environment: {told}"):
        raise found.nothing_scored("of a step", [failed])


def test_a_reward_that_raises_an_error_of_ours_is_the_reward_s_fault() -> None:
    def reward(sample: Sample) -> float:
        raise DataError("no such table")

    with pytest.raises(RewardError, match="no such table"):
        collected(Prompts(), reward)


def test_an_evaluation_leaves_failed_calls_out() -> None:
    found = collector(failing_for(1), reward=DROPPING, evaluation={"correct_at": 0.2})
    metrics, responses = evaluated(found)
    assert metrics == {
        "evaluation/reward": 0.25,  # the mean of 1/8 and 3/8
        **accuracy_of(0.5, 2),
        "evaluation/failed": 1,
    }
    assert [r["reward"] for r in responses] == [0.125, None, 0.375]
    assert [r["correct"] for r in responses] == [False, None, True]


def test_first_calls_that_all_fail_do_not_settle_that_there_are_no_parts() -> None:
    def reward(sample: Sample) -> dict[str, float]:
        if number(sample) < PROMPTS:
            raise ConnectionError("no judge")
        return in_parts(sample)

    experience = collected(Prompts(), reward, rollout=DYNAMIC, reward=DROPPING)
    assert experience.batch.group_index.tolist() == [3, 3, 4, 4, 5, 5]
    assert experience.metrics["reward/late"] == 4


def test_a_written_sample_whose_call_failed_has_no_parts() -> None:
    def reward(sample: Sample) -> dict[str, float]:
        if number(sample) == 0:
            raise ConnectionError("no judge")
        return in_parts(sample)

    first, *_ = collected(Prompts(), reward, reward=DROPPING).samples
    assert math.isnan(first["reward"]) and first["parts"] == {}


def test_each_response_that_is_scored_is_a_sign_of_life() -> None:
    signs: list[str] = []
    told: list[str] = []
    found = collector()
    found.source.report = told.append
    with heard_by(lambda: signs.append("")):
        evaluated(found)
    assert len(signs) == PROMPTS
    assert [text.split(",")[0] for text in told] == [
        "rewards 1/3",
        "rewards 2/3",
        "rewards 3/3",
        "",
    ]
