"""Dynamic sampling and rewards of turns choose the same batch on every layout."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from gspo_megatron.config import Config
from gspo_megatron.config.parallel import Layout
from gspo_megatron.rollout.engine import Sampling
from tests.parallel.experiences import TURN, Received, step
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool

GROUP, PROMPTS = 3, 3
SAMPLING = Sampling(max_tokens=8)
# Kept are groups 1, 3 and 4: of two data ranks one holds two of them and the other one, of four one
# holds none. Group 5 is one too many, and a third round is not drawn.
ANSWERS = ["flat", "", "flat", "", "", "", "", "", ""]
KEPT = [1, 3, 4]


def config_of(layout: str) -> Config:
    config = odd_moe(layout, {"name": "gspo_token"})
    sections: dict[str, dict[str, Any]] = {
        "rollout": {
            "dynamic_sampling": True,
            "group_size": GROUP,
            "prompts_per_step": PROMPTS,
            "max_response_tokens": SAMPLING.max_tokens,
        },
        "reward": {"scale": 0.5, "clip": 0.6},
    }
    changed = {k: getattr(config, k).model_copy(update=v) for k, v in sections.items()}
    return config.model_copy(update=changed)


def collected(pool: Pool, layout: str) -> tuple[dict[int, list[Received]], dict[str, float]]:
    """Each sequence as the ranks that train on it have it, and the metrics of all ranks."""
    draw = random.Random(7)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(2 + n % 3)] for n in range(9)]
    sequences, metrics = pool.run(
        Layout.parse(layout).world_size,
        step,
        config=config_of(layout),
        prompts=prompts,
        answers=ANSWERS,
        sampling=SAMPLING,
        seed=21,
    )
    assert all(each == metrics[0] for each in metrics)
    found: dict[int, list[Received]] = {}
    for number, received in sequences:
        found.setdefault(number, []).append(received)
    return found, metrics[0]


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> tuple[dict[int, list[Received]], dict[str, float]]:
    return collected(pool, "tp=1")


def test_one_rank_keeps_the_first_groups_with_spread(
    of_one_rank: tuple[dict[int, list[Received]], dict[str, float]],
) -> None:
    sequences, metrics = of_one_rank
    assert [sequences[n][0].group for n in sorted(sequences)] == [g for g in KEPT for _ in range(3)]
    assert metrics["rollout/refills"] == 1
    assert metrics["rollout/groups_dropped"] == 3
    assert metrics["reward/zero_spread_groups"] == pytest.approx(2 / 6)
    assert metrics["reward/mean"] > 2 * metrics["reward/shaped_mean"]  # clipped at times
    for group in KEPT:
        # turns of three tokens: the first of each carries the turn's advantage
        turns = [
            advantage
            for copies in sequences.values()
            if copies[0].group == group
            for advantage in copies[0].token_advantages[::TURN]
        ]
        assert len(turns) > GROUP
        assert statistics.mean(turns) == pytest.approx(0, abs=1e-6)
        assert statistics.stdev(turns) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2", "dp=4,ep=4", "cp=2"])
def test_the_batch_is_that_of_one_rank(
    pool: Pool,
    of_one_rank: tuple[dict[int, list[Received]], dict[str, float]],
    layout: str,
) -> None:
    expected, expected_metrics = of_one_rank
    sequences, metrics = collected(pool, layout)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    assert sequences.keys() == expected.keys()
    for number, copies in sequences.items():
        wanted = expected[number][0]
        for received in copies:
            assert received.tokens == wanted.tokens
            assert received.group == wanted.group
            assert received.reward == wanted.reward
            assert received.token_advantages == pytest.approx(wanted.token_advantages, abs=1e-6)
