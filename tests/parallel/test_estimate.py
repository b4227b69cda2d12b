"""The dry run against real ranks: bytes of what they hold, and of what they keep."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_megatron.config import Config, check_config, parse_config, resolve_parallel
from gspo_megatron.config.parallel import Layout
from gspo_megatron.estimate.activations import chunk_passes, micro_batch
from gspo_megatron.estimate.model import rank_model, state_bytes
from tests.parallel.estimates import measured_activations, measured_state
from tests.parallel.models import VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool

STATE_TOLERANCE = 0.01
# Packed batches come within 1.5%, padded ones within 5%: experts do not get equally many tokens.
ACTIVATION_TOLERANCE = 0.05

# A size at which what a layer keeps outweighs masks, indices and sums of a row.
WIDE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 32,
    "ffn_hidden_size": 512,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 192,
    "moe_shared_expert_intermediate_size": 128,
    "moe_layer_freq": [0, 1, 1, 1],
}
LENGTHS = [(20, 70), (33, 41), (8, 100), (50, 30)]


def wide(layout: str, recompute: str, **training: Any) -> Config:
    config = parse_config(
        {
            "model": {"megatron": WIDE},
            "parallel": {"layout": layout},
            "data": {"tokenizer": "none"},
            "training": {"precision": "bf16", "recompute": recompute} | training,
        }
    )
    check_config(config, Layout.parse(layout).world_size)
    return config


def estimated_state(config: Config) -> list[dict[str, int]]:
    world_size = config.world_size_hint()
    parallel = resolve_parallel(config, world_size)
    found = []
    for rank in range(world_size):
        with rank_model(config, parallel, rank, VOCAB_SIZE) as model:
            state = state_bytes(model)
        found.append({name: sum(kinds.values()) for name, kinds in vars(state).items()})
    return found


STATE_LAYOUTS = ["tp=2,pp=2,ep=2", "tp=1", "ep=2,dp=4", "pp=2,vpp=2,dp=2", "cp=2,ep=2,etp=2"]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(layout, "bf16") for layout in STATE_LAYOUTS]
    + [(STATE_LAYOUTS[0], "fp32")]
    + [pytest.param(layout, "fp32", marks=pytest.mark.full) for layout in STATE_LAYOUTS[1:]],
)
def test_state_is_what_real_ranks_hold(pool: Pool, layout: str, precision: str) -> None:
    config = odd_moe(layout, training={"precision": precision})
    measured = pool.run(
        config.world_size_hint(), measured_state, config=config, vocab_size=VOCAB_SIZE
    )
    estimated = estimated_state(config)
    assert len(measured) == len(estimated) == config.world_size_hint()
    for rank, (real, found) in enumerate(zip(measured, estimated, strict=True)):
        for part, num_bytes in real.items():
            expected = pytest.approx(num_bytes, rel=STATE_TOLERANCE)
            assert found[part] == expected, f"{part} of rank {rank}"


MODES = ["none", "selective", "full"]
LAYOUTS = ["tp=2,pp=2,ep=2", "cp=2,dp=2,ep=2", "pp=2,vpp=2,tp=2", "tp=1", "tp=2,pp=2,ep=2,etp=2"]
QUICK = [(LAYOUTS[0], mode, True) for mode in MODES] + [
    (LAYOUTS[0], "none", False),
    (LAYOUTS[1], "none", True),
    (LAYOUTS[2], "selective", True),
]
REST = [
    (layout, mode, packing)
    for layout in LAYOUTS
    for mode in MODES
    for packing in (True, False)
    if (layout, mode, packing) not in QUICK
]


@pytest.mark.parametrize(
    ("layout", "recompute", "packing"),
    QUICK + [pytest.param(*case, marks=pytest.mark.full) for case in REST],
)
def test_activations_are_what_autograd_keeps(
    pool: Pool, layout: str, recompute: str, packing: bool
) -> None:
    """Experts get equally many tokens in the estimate and not in reality: the ranks of a stage are
    compared in sum."""
    config = wide(layout, recompute, packing=packing)
    world_size = config.world_size_hint()
    measured = pool.run(
        world_size, measured_activations, config=config, vocab_size=VOCAB_SIZE, lengths=LENGTHS
    )
    parallel = resolve_parallel(config, world_size)
    stages = parallel.pipeline_model_parallel_size
    ranks = world_size // stages
    for stage in range(stages):
        with rank_model(config, parallel, stage * ranks, VOCAB_SIZE) as model:
            batch = micro_batch(model, LENGTHS)
            passes = chunk_passes(model, batch)
        of_stage = measured[stage * ranks : (stage + 1) * ranks]
        for chunk, each in enumerate(passes):
            real = sum(kept[chunk] for kept in of_stage) / ranks
            assert each.saved_bytes == pytest.approx(real, rel=ACTIVATION_TOLERANCE), (stage, chunk)
