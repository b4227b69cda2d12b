"""Dynamic sampling: the groups that are trained, and the need for more prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gspo_megatron.data.selection import identity
from gspo_megatron.environments.episode import Client, EpisodeLimits, EpisodeRunner
from gspo_megatron.rl.rollouts import Collector, DynamicSampling
from gspo_megatron.rollout.engine import Requests, RolloutShare, Sampling
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.types import Prompt, RolloutBatch
from tests.unit.rl.test_rollouts import (
    DROPPING,
    DYNAMIC,
    PROMPTS,
    Engine,
    Prompts,
    Talk,
    Tokenizer,
    collector,
    drawn_by,
    failing_for,
)

YES, NO = True, False


def selection(*rounds: list[bool], max_refills: int = 2) -> DynamicSampling:
    """The selection after these rounds. It must have asked for each round."""
    chosen = DynamicSampling(len(rounds[0]), max_refills)
    for has_spread in rounds:
        assert chosen.wants_more
        chosen.add(has_spread)
    return chosen


@pytest.mark.parametrize(
    ("rounds", "wants_more", "groups", "metrics"),
    [
        ([[YES, YES, YES]], False, [0, 1, 2], (0, 0, 0)),
        ([[NO, YES, NO]], True, [1], (0, 2, 0)),
        ([[NO, YES, NO], [NO, YES, YES]], False, [1, 4, 5], (1, 3, 0)),
        # There are more groups than needed, so the last ones are dropped.
        ([[NO, YES, YES], [YES, YES, NO]], False, [1, 2, 3], (1, 3, 0)),
        ([[NO, YES, NO], [NO, NO, NO], [NO, NO, YES]], False, [1, 8], (2, 7, 0)),
        # No group has a spread. The first round is used, but only after all refills.
        ([[NO, NO, NO], [NO, NO, NO]], True, [0, 1, 2], (1, 3, 1)),
        ([[NO, NO, NO]] * 3, False, [0, 1, 2], (2, 6, 1)),
    ],
)
def test_groups_with_spread_are_taken_in_order(
    rounds: list[list[bool]], wants_more: bool, groups: list[int], metrics: tuple[int, int, int]
) -> None:
    chosen = selection(*rounds)
    assert chosen.wants_more is wants_more
    assert chosen.groups() == groups
    names = ("rollout/refills", "rollout/groups_dropped", "rollout/no_spread")
    assert chosen.metrics() == dict(zip(names, metrics, strict=True))


def test_without_refills_groups_are_dropped_all_the_same() -> None:
    chosen = selection([YES, NO], max_refills=0)
    assert not chosen.wants_more
    assert chosen.groups() == [0]


def test_switched_off_it_takes_one_draw_whole() -> None:
    chosen = DynamicSampling(2, 3, enabled=False)
    assert chosen.wants_more
    chosen.add([NO, YES])
    assert not chosen.wants_more
    assert chosen.groups() == chosen.candidates(0) == [0, 1]
    assert chosen.metrics() == {}


def test_groups_without_spread_take_the_place_of_failed_groups() -> None:
    """All calls for the first prompts have failed, and no group of the refill has a spread."""
    chosen = DynamicSampling(2, 1)
    chosen.add([NO, NO], has_failed=[YES, YES])
    assert chosen.wants_more and chosen.candidates(0) == []
    chosen.add([NO, NO], has_failed=[YES, NO])
    assert not chosen.wants_more
    assert chosen.groups() == chosen.candidates(2) == [3]
    assert chosen.metrics()["rollout/no_spread"] == 1


def test_further_draws_keep_only_groups_that_may_be_chosen() -> None:
    chosen = selection([NO, YES, NO])
    assert chosen.candidates(0) == [0, 1, 2]
    chosen.add([NO, YES, NO])
    assert chosen.candidates(3) == [4]


class WithRoutes(Engine):
    """Also returns the routes of two layers."""

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        batch = super().generate(requests, sampling, seed)
        return replace(batch, routes=torch.zeros(len(batch.tokens), 2, 1, dtype=torch.uint8))


class OfOneToken(Prompts):
    def __getitem__(self, n: int) -> Prompt:
        return replace(super().__getitem__(n), token_ids=(5,))


def with_episodes(environment: Any, **sections: dict[str, Any]) -> Collector:
    found = collector(reward=DROPPING, **sections)
    runner = EpisodeRunner(environment, cast(Any, Tokenizer()), EpisodeLimits(2, 20))
    found.source = MegatronRollouts(cast(Any, WithRoutes()), runner, found.device, layers=(1, 2))
    return found


@pytest.mark.usefixtures("one_rank")
def test_a_request_whose_episodes_all_fail_is_made_up_for() -> None:
    """Its groups have no routes, because the engine was not called."""
    found = with_episodes(Talk(), rollout=DYNAMIC)
    experience = drawn_by(found, OfOneToken(*range(PROMPTS)))
    assert experience.batch.group_index.tolist() == [3, 3, 4, 4, 5, 5]
    assert experience.batch.routes is not None and experience.batch.routes.shape[1:] == (2, 1)


class Late:
    """An environment with two turns. It fails after the first one for a prompt of `flat`."""

    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate()
        if task.answer == "flat":
            raise ConnectionError("no tool")
        await client.generate(text="A")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("environment", [Talk(), Late()])
def test_turns_are_those_of_episodes_that_did_not_fail(environment: Any) -> None:
    """Both responses to the first prompt fail, with no turn or with one. The others have two turns
    of 3, 4, 1 and 2 tokens, and one token of the environment between the turns."""
    metrics = drawn_by(with_episodes(environment), OfOneToken(0)).metrics
    assert (metrics["environment/turns"], metrics["environment/branches"]) == (2, 1)
    written = 2 * (3 + 4 + 1 + 2)
    assert metrics["environment/sampled_share"] == pytest.approx(written / (written + 4))


@pytest.mark.usefixtures("one_rank")
def test_the_wait_for_a_teacher_is_that_of_all_requests_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, seconds = collector(rollout=DYNAMIC), [0.5, 2.0]
    native = found.source.take

    def take(*given: Any, **options: Any) -> RolloutShare:
        share = native(*given, **options)
        share.group.teacher_seconds = np.array([seconds.pop()])
        return share

    monkeypatch.setattr(found.source, "take", take)
    metrics = drawn_by(found, Prompts(0, 2, 4)).metrics
    assert not seconds and metrics["rollout/refills"] == 1
    assert metrics["distill/teacher_seconds"] == 2.5


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("sections", "solved"),
    [
        ({"evaluation": {"correct_at": 0.375}}, [0, 2, 0]),
        ({"evaluation": {"correct_at": 0.38}}, [0, 1, 0]),
        (
            {
                "evaluation": {"correct_at": 0.375},
                "data": {"tokenizer": "t", "selection": {"correct_at": 0.25}},
            },
            [0, 2, 1],
        ),
    ],
)
def test_what_came_of_each_prompt(sections: dict[str, Any], solved: list[int]) -> None:
    """The responses to a prompt have 1 and 2 tokens, 3 and 4, and 1 and 2. The reward is an eighth
    of the length. It fails for the second response to the first prompt, which has a length, but no
    part in the other figures."""
    found = collector(failing_for(0, since=1), reward=DROPPING, **sections)
    draws = drawn_by(found, Prompts()).draws
    told = [(each["responses"], each["reward"], each["length"], each["spread"]) for each in draws]
    assert told == [(1, 1 / 8, 1.5, False), (2, 3.5 / 8, 3.5, True), (2, 1.5 / 8, 1.5, True)]
    assert [each["solved"] for each in draws] == solved
    assert [each["prompt"] for each in draws] == [identity(Prompts()[n]) for n in range(PROMPTS)]
