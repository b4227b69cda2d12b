"""The dry run of `check`, compared with real ranks: the bytes of their state, and the bytes that
they keep for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, run_chunk
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.estimate.activations import SavedTensors, chunk_passes, give_input, micro_batch
from gspo_megatron.estimate.model import rank_model, state_bytes
from gspo_megatron.models import core_attention, experts
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.platform.groups import tear_down_model_parallel
from tests.parallel.models import VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.test_lora_layouts import QWEN2_MOE, with_lora
from tests.unit.hf.policies import config_of
from tests.unit.hf.published import write_model

STATE_TOLERANCE = 0.01
# Estimates are exact to 1.5% for packed batches, and to 6.5% for padded batches. The difference
# comes from experts with different numbers of tokens.
ACTIVATION_TOLERANCES = {True: 0.05, False: 0.07}  # by training.packing

# With these sizes, the tensors that a layer keeps are larger than masks, indices and sums of rows.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 32,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": 192,
    "moe_shared_expert_intermediate_size": 128,
    "init_method_std": 0.02,
}
LENGTHS = [(20, 70), (33, 41), (8, 100), (50, 30)]


def measured_state(config: Config) -> dict[str, int]:
    """The bytes that this rank has after an optimizer step."""
    policy = build_on_ranks(config)
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-3, 1e-3, 0, 1, "constant"))
    for model in policy.models:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.main_grad.normal_(std=1e-3)
    trainer.update()
    parameters = [p for model in policy.models for p in model.parameters()]
    weights = _storages(parameters)
    gradients = _storages(p.main_grad for p in parameters if p.requires_grad)
    optimizer: dict[int, int] = {}
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.optimizer else ():
            optimizer |= _storages(group["params"])
        for states in part.optimizer.state.values() if part.optimizer else ():
            optimizer |= _storages(s for s in states.values() if isinstance(s, Tensor))
    optimizer = {key: size for key, size in optimizer.items() if key not in weights}
    found = {
        "parameters": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer": sum(optimizer.values()),
    }
    tear_down_model_parallel()
    return found


def measured_activations(config: Config, lengths: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes that each chunk of this rank keeps for the backward pass of one micro-batch.
    `lengths` has the numbers of (prompt, response) tokens of its sequences. The estimate is for a
    GPU, so two functions that save time on a CPU are off: attention of short sequences, which keeps
    its inputs in fp32, and SwiGLU, which keeps less than on a GPU."""
    policy = build_on_ranks(config)
    builder = MicroBatchBuilder(policy, 0, 1.0, padded=not config.training.packing)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(VOCAB_SIZE, (p + r,), generator=generator) for p, r in lengths]
    responses = [response for _, response in lengths]
    offsets = [sum(responses[:n]) for n in range(len(lengths))]
    batch = builder.build(range(len(lengths)), tokens, responses, offsets)
    kept = []
    for chunk in policy.chunks:
        give_input(chunk, batch)
        plain = SimpleNamespace(applies_to=lambda _: False)
        with (
            SavedTensors(chunk) as saved,
            patch.object(core_attention, "faster", plain),
            patch.object(experts, "faster", plain),
        ):
            output = run_chunk(chunk, batch)
        kept.append(saved.num_bytes())
        del output
    tear_down_model_parallel()
    return kept


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The number of bytes of each storage, with its address as key. Empty storages have no address
    and are left out."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}


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
    assert_state_is_real(pool, odd_moe(layout, training={"precision": precision}))


EVERY_TARGET = ["all", "router", "head"]


@pytest.mark.parametrize("layout", ["tp=2,pp=2,ep=2", "cp=2,ep=2,etp=2"])
def test_state_of_adapters_is_what_real_ranks_hold(pool: Pool, layout: str) -> None:
    config = odd_moe(layout, training={"precision": "bf16"}, **QWEN2_MOE)
    assert_state_is_real(pool, with_lora(config, targets=EVERY_TARGET))


def assert_state_is_real(pool: Pool, config: Config) -> None:
    measured = pool.each(config, measured_state)
    assert_same_state(measured, estimated_state(config))


def assert_same_state(measured: list[dict[str, int]], estimated: list[dict[str, int]]) -> None:
    for rank, (real, found) in enumerate(zip(measured, estimated, strict=True)):
        for part, num_bytes in real.items():
            expected = pytest.approx(num_bytes, rel=STATE_TOLERANCE)
            assert found[part] == expected, f"{part} of rank {rank}"


@pytest.mark.parametrize(("layout", "recompute"), [("tp=2,pp=2,ep=2", "none"), ("tp=2", "full")])
def test_activations_with_adapters_are_what_autograd_keeps(
    pool: Pool, layout: str, recompute: str
) -> None:
    training = {"precision": "bf16", "recompute": recompute}
    config = odd_moe(layout, training=training, **QWEN2_MOE, **WIDE)
    assert_same_activations(pool, with_lora(config, targets=EVERY_TARGET))


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
    """The estimate gives all experts equally many tokens, but a real router does not. So the means
    over the ranks of a stage are compared."""
    training = {"precision": "bf16", "recompute": recompute, "packing": packing}
    assert_same_activations(pool, odd_moe(layout, training=training, **WIDE))


def assert_same_activations(pool: Pool, config: Config) -> None:
    world_size = config.world_size_hint()
    measured = pool.each(config, measured_activations, lengths=LENGTHS)
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
            expected = pytest.approx(real, rel=ACTIVATION_TOLERANCES[config.training.packing])
            assert each.saved_bytes == expected, (stage, chunk)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_latent_attention_biases_and_uneven_stages(pool: Pool, tmp_path: Path, family: str) -> None:
    """A model from a published folder, with stages of 3 layers and 1 layer. Its values are as wide
    as its keys (10 + 6). With other widths, torch's attention on CPUs would keep the scores, and
    GPU kernels do not keep them."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512}
    sizes |= {"moe_intermediate_size": 192, "v_head_dim": 16}
    folder = write_model(tmp_path / "model", family, seed=1, **sizes)
    config = config_of(folder, "bfloat16", "tp=2,pp=2,ep=2", num_layers_in_last_pipeline_stage=1)
    assert_same_state(pool.each(config, measured_state), estimated_state(config))
    assert_same_activations(pool, config)
