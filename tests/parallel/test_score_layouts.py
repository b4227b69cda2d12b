"""Preference models on sharded layouts: scores, loss and gradients equal those on one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.stages import PreferenceConfig
from gspo_megatron.models.optimizer import Schedule, build_trainer, zero_gradients
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.rl.scorer import FrozenScorer
from gspo_megatron.supervised.preferences import PreferenceBatches, PreferenceUpdater
from gspo_megatron.verify.parity import gather_gradients
from tests.parallel.models import build_on_ranks, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import FP64_TOLERANCE_OF_ROUTERS
from tests.unit.hf.preference_folder import write_score_model
from tests.unit.hf.published import VOCABULARY
from tests.unit.supervised.synthetic_preferences import preference_config, preferences

_draw = random.Random(3)
SEQUENCES = [[_draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (5, 1, 12, 7, 30, 2, 9)]
TOLERANCE = 1e-5  # for fp32, whose sums over shards have another order


def frozen_scores(config: Config, folder: Path) -> list[tuple[int, float]]:
    """(number, score) of this rank's sequences. Data-parallel ranks have different sequences. The
    last of several data-parallel ranks has no sequence."""
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
        ("tp=2,cp=2", False, "qwen3_moe"),
        ("dp=2,ep=2", True, "qwen3"),  # a dense scorer, while the policy has experts
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


Found = tuple[dict[str, torch.Tensor], dict[str, float], dict[str, float]]


def one_batch(config: PreferenceConfig, ratings: bool, prompt: int = 0) -> Found:
    """The gradients of a batch as whole tensors (on rank 0), its figures, and an evaluation."""
    policy = build_on_ranks(config)
    rate = config.optimizer.learning_rate
    trainer = build_trainer(policy, config.optimizer, Schedule(rate, rate, 0, 1, "constant"))
    train, held_out = (preferences(8, seed, ratings=ratings, prompt=prompt) for seed in (1, 2))
    batches = PreferenceBatches(config, policy, 0, train, held_out)
    updater = PreferenceUpdater(policy, trainer, config.preference, held_out)
    zero_gradients(policy.chunks, trainer.optimizer)
    batch = batches.next()
    if prompt:
        shared = [each.packed.shared is not None for each in batch.micro_batches]
        assert any(shared) is (config.training.share_prompts is not False)
    metrics = updater.accumulate(batch)
    gradients, replica_error = gather_gradients(policy)
    assert replica_error < 1e-12
    figures = {}
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        figures = metrics.reduce(updater.data_group)
    return gradients, figures, updater.evaluate(batches.evaluation())


def assert_same(found: list[Found], expected: Found) -> None:
    """Compare results in fp64. Small differences come from the order of sums, and from the
    different attention code of packed and padded rows."""
    gradients, figures, evaluation = expected
    assert found[0][0].keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        assert scale > 0 or "router" in name or "experts" in name, name
        error = float((found[0][0][name] - gradient).abs().max())
        assert error <= FP64_TOLERANCE_OF_ROUTERS * max(scale, 1e-3), (name, error, scale)
    for each in found:
        assert each[2].keys() == evaluation.keys()
        assert [*each[2].values()] == pytest.approx([*evaluation.values()], rel=1e-9, abs=1e-12)
    last = found[-1][1]  # the last rank is on the last stage, which has the figures
    assert last.keys() == figures.keys()
    assert [*last.values()] == pytest.approx([*figures.values()], rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[bool, Found]:
    return {
        ratings: pool.on(preference_config(**case(ratings)), one_batch, ratings=ratings)
        for ratings in (False, True)
    }


def case(ratings: bool) -> dict[str, dict[str, object]]:
    if ratings:
        return {"preference": {"loss": "regression"}}
    return {"preference": {"center_coefficient": 0.05}}


@pytest.mark.parametrize(
    ("layout", "packing", "ratings"),
    [
        ("tp=2,pp=2,ep=2", True, False),
        ("tp=2,pp=2,ep=2", False, True),
        ("cp=2,dp=2,ep=2", True, False),
        ("pp=2,vpp=2,cp=2", True, False),
        ("tp=2,cp=2", False, False),
        ("dp=2", True, True),
    ],
)
def test_gradients_and_figures_are_those_of_one_rank(
    pool: Pool, alone: dict[bool, Found], layout: str, packing: bool, ratings: bool
) -> None:
    config = preference_config(layout, training={"packing": packing}, **case(ratings))
    assert_same(pool.each(config, one_batch, ratings=ratings), alone[ratings])


@pytest.mark.parametrize("layout", ["tp=2,ep=2,dp=2", "pp=2,vpp=2", "dp=2"])
def test_a_prompt_that_is_computed_once_changes_nothing(pool: Pool, layout: str) -> None:
    """By default, the responses that a preference compares share their prompt."""
    repeated = preference_config(training={"share_prompts": False}, **case(ratings=False))
    expected = pool.on(repeated, one_batch, ratings=False, prompt=9)
    shared = preference_config(layout, **case(ratings=False))
    assert_same(pool.each(shared, one_batch, ratings=False, prompt=9), expected)
