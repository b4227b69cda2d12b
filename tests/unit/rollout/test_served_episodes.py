"""Episodes that servers generate: their rewards, failures and turns, as ranks read them from the
store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config import Config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.environments.episode import Client, EpisodeLimits, EpisodeRunner, Trajectory
from gspo_megatron.errors import EpisodeError
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt
from tests.unit.rollout.test_draws import DRAW, draw

WANTED = replace(DRAW, rows=[3, 0], sampling=Sampling(8))


def served(
    config: Config, folder: Path, environment: Any, limits: EpisodeLimits
) -> dict[int, RolloutGroup]:
    """Return the groups of a request. Raises the error that rank 0 would get."""
    runner = EpisodeRunner(environment, read_inputs(config).tokenizer, limits)
    return draw(config, folder / "run", WANTED, runner=runner)[1]


class Endless:
    """An environment that gives rewards and plays until the limit."""

    gives_rewards = True

    async def rollout(self, client: Client, task: Prompt) -> Trajectory:
        await client.generate(max_tokens=1)
        while True:
            await client.generate(text="12", max_tokens=1)


class Counting:
    """An environment with a reward for each turn. It changes the fields of its row."""

    gives_rewards = True

    async def rollout(self, client: Client, task: Prompt) -> Trajectory:
        await client.generate(max_tokens=1)
        await client.generate(text="12", max_tokens=1)
        task.fields["seen"] = task.fields.get("seen", 0) + 1
        return Trajectory(turn_rewards=[0.25, task.fields["seen"]])


def test_a_limit_without_the_environment_s_reward_ends_the_run_or_drops_the_group(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    limits = EpisodeLimits(3, 8)
    with pytest.raises(EpisodeError, match="rollout has to catch LimitReached") as caught:
        served(configured(), tmp_path, Endless(), limits)
    assert caught.value.resume_when == "the environment works"
    dropping = configured("reward.on_failure=drop_group")
    for group in served(dropping, tmp_path, Endless(), limits).values():
        assert np.isnan(group.rewards).all() and group.failed == (0, 0, 2)
        assert not group.sampled.any()
        for record in group.records:
            assert "catch LimitReached" in record["error"] and len(record["turns"]) == 6


def test_turns_and_their_rewards_are_kept(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    groups = served(configured("reward.scale=0.5"), tmp_path, Counting(), EpisodeLimits(3, 8))
    joined = RolloutGroup.join([groups[0], groups[1]])
    assert joined.rewards.tolist() == [1.25] * 4, "each episode has a row of its own"
    assert len(joined.records) == 4
    for record in joined.records:
        rewards = [t["reward"] for t in record["turns"] if t["role"] == "assistant"]
        assert rewards == [0.25, 1.0], "before they are scaled"
        assert [t["role"] for t in record["turns"]] == [
            "prompt", "assistant", "environment", "assistant"
        ]  # fmt: skip


# A reward of a whole group: the mean length of its responses. It also returns a figure.
OF_A_GROUP = """
from gspo_megatron.types import Reasoned
def lengths(group):
    assert len({sample.group for sample in group}) == 1
    mean = sum(sample.num_tokens for sample in group) / len(group)
    return [Reasoned(mean, "mean", {"length": len(group)}) for _ in group]
lengths.figures = ("length", "never")
"""


class Once:
    """An environment without a reward, so the reward function is called."""

    async def rollout(self, client: Client, task: Prompt) -> Trajectory:
        await client.generate(max_tokens=4)
        return Trajectory()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_of_a_group_gets_it_whole(
    configured: Callable[..., Config], tmp_path: Path, workers: int
) -> None:
    (tmp_path / "grouped.py").write_text(OF_A_GROUP)
    config = configured("reward.import_path=grouped:lengths", f"reward.workers={workers}")
    groups = served(config, tmp_path, Once(), EpisodeLimits(3, 8))
    assert [*groups] == [0, 1]
    for group in groups.values():
        assert group.rewards.tolist() == [group.response_lengths.mean()] * 2
        assert group.figures is not None
        assert group.figures[:, 0].tolist() == [2.0, 2.0]
        assert np.isnan(group.figures[:, 1]).all()
    joined = RolloutGroup.join([groups[0], groups[1]])
    assert joined.figures is not None and joined.figures.shape == (4, 2)
