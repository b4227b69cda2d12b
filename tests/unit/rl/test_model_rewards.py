"""The values that a step learns from a reward model: parts, normalisation, shaping, failures. The
model's server runs in the process of the test, and all responses are known beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.moments import RunningMoments
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rl import reward_model
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rollout.asking import PROBE
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.types import Sample, TurnRewards
from tests.unit.rl.test_rollouts import DRAW, Prompts, by_length, collector, drawn_by, evaluated
from tests.unit.rollout.reward_server import right, score_of, served

pytestmark = pytest.mark.usefixtures("one_rank")

OWN = "exact_match"  # the part has the name of the reward, which is reward.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has no chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(path, ["prompt 0123456789ABCDEFGHIJKLMNOP"], 64, byte_fallback=False)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(right, load_tokenizer(folder).encode(PROBE)) as address:
        yield address


def learnt(
    folder: Path,
    url: str,
    function: Callable[[Sample], Any] = by_length,
    normalize: str = "none",
    objective: dict[str, Any] | None = None,
    moments: RunningMoments | None = None,
    **reward: Any,
) -> Experience:
    """A step with the same prompts and responses in each call."""
    model = {"url": url, "tokenizer": str(folder), "normalize": normalize}
    section = {"retries": 0, "model": model, **reward}
    found = collector(function, reward=section, objective=objective or {})
    if moments is not None:
        found.model_rewards.moments = moments
    return drawn_by(found, Prompts())


def conversations(folder: Path, step: Experience) -> list[list[int]]:
    """The tokens of each prompt with its response."""
    tokenizer, found = load_tokenizer(folder), []
    for row, sample in enumerate(step.group.sample_index.tolist()):
        number = int(step.group.group_index[row])
        length = sample % 4 + 1 - (sample % 4 < 3)  # the tokens without the end-of-sequence token
        text = f"prompt {number}" + chr(65 + sample) * length
        found.append([*tokenizer.encode(text), tokenizer.eos_id])
    return found


def raw(folder: Path, step: Experience) -> np.ndarray:
    """The raw scores of the responses of a step, [num_sequences]."""
    return np.array([score_of(ids) for ids in conversations(folder, step)])


def own(step: Experience) -> np.ndarray:
    return step.group.response_lengths / 8


def test_the_reward_has_a_part_of_the_model_with_its_weight(folder: Path, url: str) -> None:
    step = learnt(folder, url, weights={"model": 0.5, OWN: 2.0})
    scores = raw(folder, step)
    assert len({*scores.tolist()}) > 4
    expected = 2 * own(step) + 0.5 * scores
    assert step.group.rewards.tolist() == pytest.approx(expected.tolist())
    assert step.group.shaped.tolist() == pytest.approx(expected.tolist())
    assert step.group.part_names == (OWN, "model")
    assert step.metrics["reward/model"] == pytest.approx(scores.mean())
    assert step.metrics[f"reward/{OWN}"] == pytest.approx(own(step).mean())
    assert step.metrics["reward_model/mean"] == pytest.approx(scores.mean())
    assert step.metrics["reward_model/std"] == pytest.approx(scores.std())
    assert "reward/shaped_mean" not in step.metrics


def test_a_long_conversation_loses_its_first_tokens_and_is_counted(folder: Path, url: str) -> None:
    longest = 10
    model = {"url": url, "tokenizer": str(folder), "max_tokens": longest}
    step = learnt(folder, url, lambda sample: 0.0, name="reward_model", model=model)
    whole = conversations(folder, step)
    kept = [ids[-longest:] for ids in whole]
    assert step.group.rewards.tolist() == pytest.approx([score_of(ids) for ids in kept])
    cut = sum(len(ids) > longest for ids in whole)
    assert 0 < cut < len(whole)
    tokens, metrics = sum(map(len, kept)), step.metrics
    assert metrics["reward_model/cut"] == pytest.approx(cut / len(whole))
    assert metrics["reward_model/tokens"] == pytest.approx(tokens / len(whole))
    seconds = metrics["perf/reward_model_seconds"]
    assert metrics["perf/reward_model_scores_per_second"] * seconds == pytest.approx(len(whole))
    assert metrics["perf/reward_model_tokens_per_second"] * seconds == pytest.approx(tokens)


def test_repeated_words_are_measured_without_a_penalty(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The responses of these tests are single words. So their share of repeated words is made up
    here."""
    monkeypatch.setattr(reward_model, "repeated_share", lambda text, size: size * len(text) / 100)
    step = learnt(folder, url, repetition_words=7)
    characters = step.group.response_lengths - ~step.group.truncated
    assert step.metrics["response/repeated"] == pytest.approx(7 * characters.mean() / 100)
    assert step.group.shaped.tolist() == pytest.approx((own(step) + raw(folder, step)).tolist())


def test_alone_it_is_the_whole_reward(folder: Path, url: str) -> None:
    step = learnt(folder, url, lambda sample: 0.0, name="reward_model")
    assert step.group.rewards.tolist() == pytest.approx(raw(folder, step).tolist())
    assert step.group.part_names == ("model",)


def test_parts_of_a_function_stay_beside_it(folder: Path, url: str) -> None:
    step = learnt(folder, url, lambda sample: {"z": 1.0, "a": sample.num_tokens})
    assert step.group.part_names == ("a", "model", "z")
    assert step.group.parts is not None
    assert step.group.parts[:, 0].tolist() == step.group.response_lengths.tolist()
    assert step.group.parts[:, 1].tolist() == pytest.approx(raw(folder, step).tolist())


def test_running_moments_are_those_of_all_steps_with_this_one(folder: Path, url: str) -> None:
    moments = RunningMoments({})
    moments.add([5.0, 9.0])
    step = learnt(folder, url, normalize="running", moments=moments, weights={"model": 3.0})
    scores = raw(folder, step)
    everything = np.array([5.0, 9.0, *scores])
    normal = (scores - everything.mean()) / everything.std()
    assert step.group.shaped.tolist() == pytest.approx((own(step) + 3 * normal).tolist())
    assert step.group.rewards.tolist() == pytest.approx((own(step) + 3 * scores).tolist())
    assert moments.count == len(everything)
    assert step.metrics["reward_model/running_mean"] == pytest.approx(everything.mean())
    assert step.metrics["reward_model/running_std"] == pytest.approx(everything.std())
    assert step.metrics["reward/shaped_mean"] == pytest.approx(step.group.shaped.mean())


def test_a_group_is_normalised_by_itself(folder: Path, url: str) -> None:
    step = learnt(folder, url, lambda sample: 0.0, "group", name="reward_model")
    scores, groups = raw(folder, step), step.group.group_index
    for number in {*groups.tolist()}:
        mine = scores[groups == number]
        spread = mine.std(ddof=1)
        expected = (mine - mine.mean()) / spread if spread else 0 * mine
        assert step.group.shaped[groups == number].tolist() == pytest.approx(expected.tolist())


def test_scale_clip_and_penalties_come_after_it(folder: Path, url: str) -> None:
    shaping = {"scale": 2.0, "clip": 1.5, "overlong_buffer": 3, "overlong_penalty": 0.25}
    plain = learnt(folder, url, normalize="running")
    shaped = learnt(folder, url, normalize="running", **shaping)
    lengths, cut = plain.group.response_lengths, plain.group.truncated
    share = np.where(cut, 1.0, np.clip((lengths - 1) / 3, 0, 1))
    expected = (2 * plain.group.shaped).clip(-1.5, 1.5) - 0.25 * share
    assert shaped.group.shaped.tolist() == pytest.approx(expected.tolist())
    assert (np.abs(2 * plain.group.shaped) > 1.5).any()


def test_gdpo_normalises_the_part(folder: Path, url: str) -> None:
    step = learnt(folder, url, objective={"advantage": "gdpo"})
    scores, groups = raw(folder, step), step.group.group_index
    expected = np.zeros(len(scores))
    for number in {*groups.tolist()}:
        for part in (scores, own(step)):
            mine = part[groups == number]
            if mine.std():
                expected[groups == number] += (mine - mine.mean()) / mine.std(ddof=1)
    assert step.group.shaped.tolist() == pytest.approx(expected.tolist())


def test_an_evaluation_has_the_scores_as_they_are(folder: Path, url: str) -> None:
    model = {"url": url, "tokenizer": str(folder), "normalize": "running"}
    found = collector(lambda sample: 0.0, reward={"name": "reward_model", "model": model})
    metrics, records = evaluated(found)
    rewards = [record["reward"] for record in records]
    assert metrics["evaluation/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert max(map(abs, rewards)) > 1 and found.model_rewards.moments.count == 0


@pytest.mark.parametrize("run_has_folder", [False, True])
def test_a_suite_has_a_model_of_its_own(folder: Path, url: str, run_has_folder: bool) -> None:
    """Also in a run that scores its own responses with another model, of a folder."""
    found = collector()
    if run_has_folder:
        found.model_rewards.score = found.model_rewards.texts = cast(Any, object())
    model: Any = {"url": url, "tokenizer": str(folder)}
    section = RewardSection(name="reward_model", model=model)
    of_suite = GroupScorer.of(
        found.config, found.scorer.tokenizer, Reward("s", lambda sample: 0.0), section
    )
    found.prompts = {"evaluation.suites.s": [Prompts()[n] for n in range(2)]}
    request = dataclasses.replace(DRAW, key="evaluation.suites.s", rows=[0, 1])
    share = found.sample(request, of_suite)
    step: Any = SimpleNamespace(group=share.group)
    assert share.group.rewards.tolist() == pytest.approx(raw(folder, step).tolist())
    assert share.group.part_names == ("model",)


def test_a_call_that_fails_for_good_costs_its_group(folder: Path) -> None:
    def answer(given: dict[str, Any]) -> Any:
        if len(given["input"]) == 1:  # this call has only the last response of the last group
            raise ConnectionAbortedError
        return right(given)

    with served(answer, load_tokenizer(folder).encode(PROBE)) as url:
        model = {"url": url, "tokenizer": str(folder), "batch_size": 5, "normalize": "running"}
        reward = {"retries": 0, "on_failure": "drop_group", "model": model}
        found = collector(by_length, reward=reward)
        step = drawn_by(found, Prompts())
    assert {*step.group.group_index.tolist()} == {0, 1}
    assert step.metrics["reward/failed_groups"] == 1 and step.metrics["reward/errors"] == 1
    assert found.model_rewards.moments.count == 5
    assert np.isfinite(step.group.shaped).all()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (TurnRewards([1.0], [1]), "a reward model wants one number or named parts"),
        ({"model": 1.0}, "as the part of reward.model; choose another name"),
    ],
)
def test_what_cannot_be_beside_it_is_told(folder: Path, url: str, value: Any, said: str) -> None:
    def function(sample: Sample) -> Any:
        is_turns = isinstance(value, TurnRewards)
        return dataclasses.replace(value, ends=[sample.num_tokens]) if is_turns else value

    with pytest.raises(RewardError, match=said):
        learnt(folder, url, function)


def test_a_weight_of_no_part_is_told(folder: Path, url: str) -> None:
    with pytest.raises(RewardError, match="returns the parts exact_match, model"):
        learnt(folder, url, weights={"modell": 2.0})


def test_a_function_with_the_name_of_a_metric_is_told(folder: Path, url: str) -> None:
    with pytest.raises(RewardError, match="reward/mean is another metric"):
        learnt(folder, url, import_path="mine:mean")
