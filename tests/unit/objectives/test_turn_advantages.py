"""Advantages of turns against a loop in float64 over groups, responses, turns and tokens."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from gspo_megatron.objectives.turn_advantages import build_turn_advantages

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError

Response = tuple[int, list[float], list[int]]  # group, turn rewards, turn tokens


def responses(seed: int) -> list[Response]:
    """Groups of three in any order, numbered with gaps; 1 to 4 turns; group 17 without spread."""
    draw = random.Random(seed)
    groups = [4, 9, 17, 30] * 3
    draw.shuffle(groups)
    found = []
    for group in groups:
        turns = draw.randint(1, 4)
        rewards = [0.3 if group == 17 else draw.gauss(0, 1) for _ in range(turns)]
        found.append((group, rewards, [draw.randint(1, 5) for _ in range(turns)]))
    return found


def reference(found: list[Response], divides: bool, population: bool) -> list[float]:
    """Token advantages, one after the other."""
    result = []
    for group, rewards, tokens in found:
        observed = [r for other, turns, _ in found if other == group for r in turns]
        mean = sum(observed) / len(observed)
        std = statistics.pstdev(observed) if population else statistics.stdev(observed)
        for reward, count in zip(rewards, tokens, strict=True):
            advantage = reward - mean
            if max(observed) == min(observed):
                advantage = 0.0
            elif divides:
                advantage /= std
            result += [advantage] * count
    return result


def computed(found: list[Response], **keys: object) -> torch.Tensor:
    function = build_turn_advantages(ObjectiveSection(**{"name": "gspo_token"} | keys))
    return function(
        torch.tensor([r for _, rewards, _ in found for r in rewards], dtype=torch.float64),
        torch.tensor([len(rewards) for _, rewards, _ in found], dtype=torch.long),
        torch.tensor([n for _, _, tokens in found for n in tokens], dtype=torch.long),
        torch.tensor([group for group, _, _ in found], dtype=torch.long),
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("name", ["gspo_token", "grpo", "dr_grpo"])
def test_every_turn_is_an_observation_of_its_group(name: str, std: str, seed: int) -> None:
    found = responses(seed)
    expected = reference(found, divides=name != "dr_grpo", population=std == "population")
    advantages = computed(found, name=name, advantage_std=std)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_one_turn_a_response_is_the_advantage_of_the_response() -> None:
    found = [(0, [r], [n]) for r, n in zip([0.8, 0.4, 0.6], [1, 3, 2], strict=True)]
    assert computed(found).tolist() == pytest.approx([1, -1, -1, -1, 0, 0], abs=1e-6)


def test_a_rank_without_responses() -> None:
    assert computed([]).shape == (0,)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "gspo"}, ["objective.name = 'gspo': "]),
        ({"name": "luspo"}, ["objective.name = 'luspo': "]),
        ({"name": "grpo", "ratio": "sequence"}, ["objective.ratio = 'sequence': "]),
        ({"advantage": "batch_std"}, ["objective.advantage = 'batch_std': "]),
        ({"advantage": "leave_one_out"}, ["objective.advantage = 'leave_one_out': "]),
        ({"advantage_import_path": "m:f"}, ["objective.advantage_import_path = 'm:f': "]),
        ({"kl": "k1", "kl_coefficient": 1.0, "kl_in": "reward"}, ["objective.kl_in = 'reward': "]),
        (
            {"name": "reinforce_leave_one_out"},
            [
                "objective.name = 'reinforce_leave_one_out': ",
                "objective.advantage = 'leave_one_out': ",
            ],
        ),
    ],
)
def test_what_cannot_use_rewards_of_turns_is_refused(
    keys: dict[str, object], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_turn_advantages(ObjectiveSection(**{"name": "gspo_token"} | keys))
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)
        assert "rewards of turns" in problem
    if "objective.name" in expected[0]:
        assert "gspo_token, grpo" in caught.value.problems[0]


def test_an_objective_of_ones_own_may_use_them() -> None:
    build_turn_advantages(ObjectiveSection(import_path="my.module:objective"))
