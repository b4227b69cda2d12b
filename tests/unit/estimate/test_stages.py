"""The steps of pre-training and fine-tuning, and the memory that a rank needs for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo_megatron.batching.micro_batches import MicroBatch, run_chunk
from gspo_megatron.batching.plan import largest_equal_share
from gspo_megatron.config import check_config, parse_config, resolve_parallel
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig, StageConfig
from gspo_megatron.estimate.activations import SavedTensors, chunk_passes, micro_batch
from gspo_megatron.estimate.cost import FLOPS, NODE_BYTES, Cost, step_cost
from gspo_megatron.estimate.layout import estimate_layout
from gspo_megatron.estimate.model import rank_model, with_values
from gspo_megatron.estimate.traffic import AXES
from gspo_megatron.estimate.workload import DataSizes, Workload, workload
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.supervised.pretraining import rows_of_samples
from tests.unit.models.one_rank import one_rank_groups, tiny_policy
from tests.unit.supervised.synthetic_preferences import preference_config

LENGTH, VOCAB = 24, 99


def stage_config(schema: type[StageConfig], layout: str, **training: Any) -> Any:
    of_data = (
        {"examples": "e", "max_tokens": 100}
        if schema is FineTuningConfig
        else {"train": ["c"], "sequence_length": LENGTH}
    )
    values = {
        "model": {"megatron": {"num_layers": 2, "moe_aux_loss_coeff": 0.0}},
        "parallel": {"layout": layout},
        "data": {"tokenizer": "none", **of_data},
        "training": {"steps": 5, "precision": "fp32", "batch_size": 24} | training,
    }
    return parse_config(values, schema=schema)


def work_of(config: Any, world_size: int, longest: int | None = None) -> Workload:
    return workload(config, resolve_parallel(config, world_size), DataSizes(longest))


@pytest.mark.parametrize(
    ("layout", "world_size", "budget", "samples", "micro_batches"),
    [
        # 4 samples in a micro-batch, because 5 does not divide 24.
        ("tp=1", 1, 5 * LENGTH + 3, 4, 6),
        ("dp=2", 2, 5 * LENGTH, 4, 3),
        ("dp=2", 2, LENGTH // 2, 1, 12),  # a micro-batch has at least one sample
        ("cp=2", 2, 3 * LENGTH, 6, 4),  # the budgets of two ranks are added
        # The number of micro-batches must be a multiple of the number of stages.
        ("pp=2,vpp=2", 2, 100 * LENGTH, 12, 2),
        ("tp=1", 1, 100 * LENGTH, 24, 1),
    ],
)
def test_samples_of_a_micro_batch(
    layout: str, world_size: int, budget: int, samples: int, micro_batches: int
) -> None:
    config = stage_config(PretrainingConfig, layout, micro_batch_tokens=budget)
    work = work_of(config, world_size)
    assert work.lengths == ((0, LENGTH),) * samples
    assert (work.micro_batches, work.mini_batches, work.forward_only) == (micro_batches, 1, 0)
    assert (work.rollout_rows, work.prefill_tokens, work.sequences) == (0, 0, 24)


def test_equal_shares_by_trial() -> None:
    for count in range(1, 40):
        for most in range(8):
            for multiple in [m for m in (1, 2, 3) if count % m == 0]:
                legal = [
                    size
                    for size in range(1, max(1, most) + 1)
                    if count % size == 0 and count // size % multiple == 0
                ]
                assert largest_equal_share(count, most, multiple) == max(legal)


def test_examples_are_as_long_as_the_longest_and_learned_but_for_a_token() -> None:
    config = stage_config(FineTuningConfig, "dp=2", micro_batch_tokens=250)
    work = work_of(config, 2)
    assert work.lengths == ((1, 99), (1, 99), (1, 49))
    # There are 12 examples, two in each micro-batch.
    assert (work.micro_batches, work.forward_only, work.rollout_rows) == (6, 0, 0)
    assert work_of(config, 2, longest=40).lengths == ((1, 39),) * 6 + ((1, 9),)
    padded = stage_config(FineTuningConfig, "dp=2", micro_batch_tokens=250, packing=False)
    assert work_of(padded, 2).lengths == ((1, 99), (1, 99))


@pytest.mark.parametrize(
    ("loss", "lengths"),
    [
        # The budget is 48 tokens, but chosen and rejected response are never apart.
        ("bradley_terry", ((1, 39), (1, 39))),
        ("regression", ((1, 39), (1, 7))),
    ],
)
def test_a_micro_batch_holds_at_least_one_preference(
    loss: str, lengths: tuple[tuple[int, int], ...]
) -> None:
    work = work_of(preference_config(preference={"loss": loss}), 1, longest=40)
    assert (work.lengths, work.micro_batches) == (lengths, 8)


def cost_of(config: Any, sent_per_token: int = 0, computed: float = 1.0) -> Cost:
    """The seconds of a step on one rank. Each token of each micro-batch sends bytes to experts."""
    work = replace(work_of(config, 1), computed=computed)
    traffic = dict.fromkeys(AXES, 0)
    traffic["ep"] = sent_per_token * work.tokens * work.micro_batches
    return step_cost(config, resolve_parallel(config, 1), work, 10**6, traffic)


def flops_of_tokens(config: Any, length: int) -> int:
    """The FLOPs of a forward pass of 24 sequences through 10^6 parameters."""
    shape = config.resolved_model()
    attention = 2 * 2 * shape.num_attention_heads * shape.kv_channels * length
    return 24 * length * (2 * 10**6 + attention)


@pytest.mark.parametrize(
    ("schema", "length", "rank", "recompute", "passes"),
    [
        (PretrainingConfig, LENGTH, 0, "none", 3),
        # frozen weights need no gradients: the backward pass costs as much as one forward pass
        (FineTuningConfig, 100, 4, "none", 2),
        (FineTuningConfig, 100, 4, "full", 3),
    ],
)
def test_a_step_is_the_passes_of_its_tokens(
    schema: type[StageConfig], length: int, rank: int, recompute: str, passes: int
) -> None:
    """A backward pass costs as much as two forward passes."""
    config = stage_config(schema, "tp=1", micro_batch_tokens=length, recompute=recompute)
    config = with_values(config, "model", lora=LoraSection(rank=rank))
    assert cost_of(config).compute * FLOPS == pytest.approx(
        passes * flops_of_tokens(config, length)
    )


@pytest.mark.parametrize("budget", [100, 199, 250, 317, 5000])
def test_room_in_micro_batches_costs_no_time(budget: int) -> None:
    """The step takes the time of 24 examples of 100 tokens, however the examples are divided into
    micro-batches. Only the estimate of memory assumes that all micro-batches are full."""
    config = stage_config(FineTuningConfig, "tp=1", micro_batch_tokens=budget)
    cost = cost_of(config, sent_per_token=10**6)
    assert cost.compute * FLOPS == pytest.approx(3 * flops_of_tokens(config, 100))
    assert cost.exchange * NODE_BYTES == pytest.approx(10**6 * 24 * 100)


def test_a_shared_prompt_is_computed_and_sent_once() -> None:
    config = stage_config(FineTuningConfig, "tp=1", micro_batch_tokens=250)
    whole, shared = (cost_of(config, sent_per_token=10**6, computed=c) for c in (1.0, 0.7))
    products = 3 * 24 * 100 * 2 * 10**6  # attention still sees the whole sequences
    assert (whole.compute - shared.compute) * FLOPS == pytest.approx(0.3 * products)
    assert shared.exchange == pytest.approx(0.7 * whole.exchange)


def test_pretraining_keeps_what_autograd_keeps() -> None:
    """The estimate is compared with a real micro-batch on one rank. The difference comes from
    masks, which the reference attention keeps, and from experts with different numbers of
    tokens. The estimate is for the experts of a GPU, which keep two tensors more."""
    count, config = 4, stage_config(PretrainingConfig, "tp=1", micro_batch_tokens=4 * LENGTH)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (count, LENGTH), generator=generator)
    packed = rows_of_samples(tokens, tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool))
    with one_rank_groups():
        chunk = tiny_policy(VOCAB).chunks[0]
        batch = MicroBatch(packed, None, HeadInputs(packed.token_rows, packed.targets))
        with SavedTensors(chunk) as saved:
            output = run_chunk(chunk, batch)
        real = saved.num_bytes()
        assert output.shape == (2, count * LENGTH)
    with rank_model(config, resolve_parallel(config, 1), 0, VOCAB) as model:
        estimated = micro_batch(model, work_of(config, 1).lengths)
        assert estimated.packed.input_ids.shape == (count, LENGTH)
        assert estimated.head.targets.shape == batch.head.targets.shape
        found = chunk_passes(model, estimated, samples=False)[0]
    shape = chunk.config
    rows = shape.num_layers * shape.moe_router_topk * count * LENGTH
    real += 2 * rows * shape.moe_ffn_hidden_size * 4  # WeightedSwiGlu computes these again
    assert found.saved_bytes == pytest.approx(real, rel=0.05)
    assert found.forward_peak_bytes == 0


@pytest.mark.parametrize("schema", [FineTuningConfig, PretrainingConfig])
def test_the_state_is_that_of_an_rl_run_and_nothing_beside_it_is(schema: type[StageConfig]) -> None:
    layout = "tp=2,pp=2,ep=2"
    config = stage_config(schema, layout, micro_batch_tokens=240)
    found = estimate_layout(config, 8, VOCAB)
    rl = parse_config(
        {
            "model": config.model.model_dump(exclude_unset=True),
            "parallel": {"layout": layout},
            "data": {"tokenizer": "none"},
            "training": {"precision": "fp32"},
        }
    )
    check_config(rl, 8)
    for mine, theirs in zip(found.ranks, estimate_layout(rl, 8, VOCAB).ranks, strict=True):
        assert mine.state == theirs.state
        assert (mine.reference, mine.replay, mine.sampling, mine.host) == (0, 0, 0, 0)
        assert mine.activations > 0 and mine.workspace > 0
        assert mine.total == mine.state.total + mine.activations + mine.workspace
    assert found.most_traffic()["tp"] > 0 and found.most_traffic()["dp"] > 0
