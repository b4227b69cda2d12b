"""Preference models on sharded layouts: scores, loss and gradients are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.rl.scorer import FrozenScorer
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool
from tests.unit.hf.preference_folder import write_score_model
from tests.unit.hf.published import VOCABULARY

_draw = random.Random(3)
SEQUENCES = [[_draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (5, 1, 12, 7, 30, 2, 9)]
TOLERANCE = 1e-5  # fp32 sums over shards in another order


def frozen_scores(config: Config, folder: Path) -> list[tuple[int, float]]:
    """(number, score) of the sequences of this rank: every data-parallel rank takes others, and
    with four of them one has none."""
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    scorer = FrozenScorer(str(folder), config, parallel)
    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    numbers = [] if size > 1 and rank == size - 1 else [*range(len(SEQUENCES))][rank::size]
    if size > 1 and rank == 0:
        numbers += [*range(len(SEQUENCES))][size - 1 :: size]
    mine = [SEQUENCES[n] for n in numbers]
    flat = torch.tensor([token for each in mine for token in each], dtype=torch.long)
    scores = scorer(flat, [len(each) for each in mine])
    assert scores.dtype == torch.float32 and scores.shape == (len(mine),)
    assert not any(p.requires_grad for m in scorer.policy.models for p in m.parameters())
    return list(zip(numbers, scores.tolist(), strict=True))


@pytest.mark.parametrize(
    ("layout", "packing", "family"),
    [
        ("tp=2,pp=2,ep=2", True, "qwen3_moe"),
        ("cp=2,dp=2,ep=2", True, "qwen3_moe"),
        ("tp=2,cp=2", False, "qwen3_moe"),
        ("dp=2,ep=2", True, "qwen3"),  # a dense scorer beside a policy with experts
    ],
)
def test_a_frozen_model_gives_the_same_scores_on_any_layout(
    pool: Pool, tmp_path: Path, layout: str, packing: bool, family: str
) -> None:
    folder = write_score_model(tmp_path / "score", family, seed=5)
    budget = {"micro_batch_tokens": 16, "packing": packing}
    alone = pool.on(odd_moe("tp=1", training=budget), frozen_scores, folder=folder)
    expected = dict(alone)
    assert len(expected) == len(SEQUENCES) and len({round(v, 3) for v in expected.values()}) > 5
    for of_rank in pool.each(odd_moe(layout, training=budget), frozen_scores, folder=folder):
        for number, score in of_rank:
            assert score == pytest.approx(expected[number], abs=TOLERANCE)
