"""Episodes that servers generate: their rewards, failures and turns, as ranks read them from the
store."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gspo_megatron.config import Config, load_config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.environments.episode import Client, EpisodeLimits, EpisodeRunner, Trajectory
from gspo_megatron.errors import UserError, error_of
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.store import read_groups
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.checks import Needs
from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.episodes import Scorers, ServedRequests
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.types import Prompt
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import FACTS, LENGTH, Double, weights

DRAW = RolloutRequest(
    "step_00000001_0", "data.prompts", [3, 0], 0, 2, Sampling(8), seed=1, version=0
)


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_toy_dataset(tmp_path / "toy", "mixed", train=8, test=2, seed=1)
    content = {
        "data": {"tokenizer": "toy/tokenizer.model", "prompts": "toy/train.jsonl"},
        "rollout": {"engine": "vllm", "vllm": {"servers": 1}},
        "logging": {"dir": "run"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    return lambda *overrides: load_config(tmp_path / "config.yaml", overrides)


def served(
    config: Config, folder: Path, environment: Any, limits: EpisodeLimits
) -> tuple[dict[int, RolloutGroup], UserError | None]:
    """The groups of a request, and the error that rank 0 gets."""
    inputs = read_inputs(config)
    scorers, told = Scorers(config, inputs), []
    runner = EpisodeRunner(environment, inputs.tokenizer, limits)

    async def run() -> None:
        async with Double().serve() as double, connected_session() as session:
            settings = FleetSettings(FACTS, Needs(LENGTH, "float32", False), 0, 30, 30)
            pool = ScheduledFleet([Server("server", ServerClient(double.url, session))], settings)
            try:
                await pool.update(weights(folder, 0))
                draws = ServedRequests(
                    pool.scheduler, scorers, inputs.files, {}, folder / "bank", "", runner
                )
                running = draws.begin(DRAW)
                assert running.task is not None
                await running.task
                told.append(running.status()["error"])
            finally:
                await pool.close()

    def work() -> None:
        try:
            asyncio.run(run())
        finally:
            scorers.stop()

    thread = threading.Thread(target=work)
    thread.start()
    scorers.work()
    thread.join()
    (error,) = told
    if error is not None:
        return {}, error_of(error["kind"], error["text"])
    return read_groups(folder / "bank" / f"{DRAW.name}.groups"), None


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
    groups, error = served(configured(), tmp_path, Endless(), limits)
    assert not groups and "rollout has to catch LimitReached" in str(error)
    assert error is not None and error.resume_when == "the environment works"
    dropping = configured("reward.on_failure=drop_group")
    groups, error = served(dropping, tmp_path, Endless(), limits)
    assert error is None
    for group in groups.values():
        assert np.isnan(group.rewards).all() and group.failed == (0, 0, 2)
        assert not group.sampled.any()
        for record in group.records:
            assert "catch LimitReached" in record["error"] and len(record["turns"]) == 6


def test_turns_and_their_rewards_are_kept(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    groups, error = served(
        configured("reward.scale=0.5"), tmp_path, Counting(), EpisodeLimits(3, 8)
    )
    assert error is None
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
    groups, error = served(config, tmp_path, Once(), EpisodeLimits(3, 8))
    assert error is None and [*groups] == [0, 1]
    for group in groups.values():
        assert group.rewards.tolist() == [group.response_lengths.mean()] * 2
        assert group.figures is not None
        assert group.figures[:, 0].tolist() == [2.0, 2.0]
        assert np.isnan(group.figures[:, 1]).all()
    joined = RolloutGroup.join([groups[0], groups[1]])
    assert joined.figures is not None and joined.figures.shape == (4, 2)
