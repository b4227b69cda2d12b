"""The parameters and bytes of published models on layouts of hundreds of ranks."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import pytest

from gspo_megatron.config import PRESETS, Config, check_config, resolve_parallel
from gspo_megatron.config.precision import FP8
from gspo_megatron.estimate.layout import LayoutEstimate, estimate_layout
from gspo_megatron.estimate.memory import RankMemory, by_component
from gspo_megatron.estimate.model import global_parameters, rank_model, state_bytes
from gspo_megatron.estimate.workload import DataSizes
from tests.unit.estimate.conftest import ConfigMaker

# The numbers of parameters that Qwen publishes.
PUBLISHED = {"qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560}
SPLIT_EVENLY = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}


def large(make_config: ConfigMaker, preset: str, layout: str) -> Config:
    megatron = SPLIT_EVENLY if preset == "qwen3-235b-a22b" else {}
    return make_config(
        preset,
        layout,
        model={"max_sequence_length": 9216, "megatron": megatron},
        rollout={"max_response_tokens": 8192, "prompts_per_step": 128},
        training={"micro_batch_tokens": 4096, "recompute": "full"},
    )


def estimate(config: Config, world_size: int) -> LayoutEstimate:
    check_config(config, world_size)
    vocab_size = config.resolved_model().vocab_size
    assert vocab_size is not None
    return estimate_layout(config, world_size, vocab_size)


@pytest.mark.parametrize(
    ("preset", "layout", "world_size"),
    [
        pytest.param("qwen3-30b-a3b", "tp=2,pp=2,ep=8", 32, marks=pytest.mark.full),
        pytest.param("qwen3-30b-a3b", "tp=4,ep=16,cp=2,etp=2", 64, marks=pytest.mark.full),
        # This case is slow. tests/unit/cli/test_check_estimate.py also counts the parameters of
        # this model.
        pytest.param("qwen3-235b-a22b", "tp=4,pp=8,ep=8", 256, marks=pytest.mark.full),
        ("qwen3-235b-a22b", "tp=4,pp=8,ep=16,cp=2,vpp=2", 1024),
    ],
)
def test_large_layouts_in_seconds_with_every_parameter_counted_once(
    make_config: ConfigMaker, preset: str, layout: str, world_size: int
) -> None:
    start = time.process_time()
    found = estimate(large(make_config, preset, layout), world_size)
    seconds = time.process_time() - start
    assert found.parameters.total() == PUBLISHED[preset]
    assert len(found.ranks) == found.parallel.pipeline_model_parallel_size
    assert sum(rank.layers for rank in found.ranks) == PRESETS[preset].megatron["num_layers"]
    assert seconds < 20.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak * (1 if sys.platform == "darwin" else 1024) < 4e9


def test_every_rank_of_a_layout_together_holds_the_model(make_config: ConfigMaker) -> None:
    """Each parameter counts once, even if several ranks hold a copy. The expected number is the
    number of parameters of the model on one rank."""
    megatron = {"moe_layer_freq": [0, 1, 1, 1]}
    model_section = {"tie_embeddings": True, "vocab_size": 45, "megatron": megatron}
    config = make_config("tiny", "tp=2,pp=2,ep=2,cp=2", model=dict(model_section))
    check_config(config, 16)
    parallel = resolve_parallel(config, 16)
    alone = make_config("tiny", "tp=1", model=dict(model_section))
    with rank_model(alone, resolve_parallel(alone, 1), 0, 45) as model:
        padding = 3 * 64  # a vocabulary of 45 is padded to 48 rows of 64 elements
        whole = sum(p.numel() for p in model.policy.models[0].parameters()) - padding
    found = 0
    for stage in range(2):
        with rank_model(config, parallel, stage * 8, 45) as model:
            found += sum(global_parameters(model).values())
    assert found == whole


def test_a_reference_policy_is_a_second_copy_of_the_weights(make_config: ConfigMaker) -> None:
    layout = "tp=2,ep=2"
    plain = estimate(make_config("tiny", layout, model={"vocab_size": 99}), 2).worst
    kl = {"kl": "k3", "kl_coefficient": 0.01}
    config = make_config("tiny", layout, model={"vocab_size": 99}, objective=kl)
    second = estimate(config, 2).worst
    weights = sum(plain.state.parameters.values())
    assert (plain.reference, second.reference) == (0, weights)
    assert second.total == plain.total + weights
    offloaded = make_config(
        "tiny", layout, model={"vocab_size": 99}, objective=kl | {"reference_offload": True}
    )
    found = estimate(offloaded, 2).worst
    assert (found.reference, found.host) == (0, weights)


@pytest.mark.parametrize(("name", "copies"), [("guarded", 1), ("plain", 0)])
def test_an_objective_of_ones_own_may_need_a_reference_policy(
    make_config: ConfigMaker, own_objectives: str, name: str, copies: int
) -> None:
    own = {"import_path": f"{own_objectives}:{name}"}
    found = estimate(make_config("tiny", "tp=2", model={"vocab_size": 99}, objective=own), 2).worst
    assert found.reference == copies * sum(found.state.parameters.values())


# two ranks have 16 responses each
RESPONSES = {"group_size": 4, "prompts_per_step": 8, "max_response_tokens": 72}


def test_a_teachers_tokens_are_held_for_all_responses(make_config: ConfigMaker) -> None:
    def reference(**distillation: Any) -> int:
        config = make_config(
            "tiny",
            "dp=2",
            model={"vocab_size": 99},
            rollout=RESPONSES,
            objective={"distillation": {"teacher": "folder", **distillation}},
        )
        return estimate_layout(config, 2, 99).worst.reference

    tokens = 16 * 72 * 5
    held = reference(form="forward_kl_topk", top_k=5) - reference(form="reverse_kl")
    assert held == tokens * (8 + 4)  # the id (int64) and its log-prob (fp32)


def test_an_evaluation_may_need_the_larger_cache(make_config: ConfigMaker) -> None:
    config = make_config("tiny", "dp=2", model={"vocab_size": 99}, rollout=RESPONSES)
    caches = [
        estimate_layout(config, 2, 99, DataSizes(evaluated=n)).worst.kv_cache for n in (0, 20, 80)
    ]
    assert caches[1] == caches[0] and caches[2] * 16 == caches[0] * 40


def test_experts_are_sharded_over_their_own_data_parallel_ranks(make_config: ConfigMaker) -> None:
    """The optimizer has 12 bytes for each weight. The bytes of experts are sharded over dp / ep
    ranks, all other bytes over dp ranks."""
    config = make_config("tiny", "ep=4,dp=8", model={"vocab_size": 99})
    with rank_model(config, resolve_parallel(config, 8), 0, 99) as model:
        state = state_bytes(model)
        counts = global_parameters(model)
    experts = counts["experts"] // 4
    assert state.parameters["experts"] == pytest.approx(2 * experts, rel=0.01)
    assert state.gradients["experts"] == pytest.approx(4 * experts, rel=0.01)
    assert state.optimizer["experts"] == pytest.approx(12 * experts / 2, rel=0.01)
    others = counts["dense"] + counts["embedding"]
    optimizer = state.optimizer["dense"] + state.optimizer["embedding"]
    assert optimizer == pytest.approx(12 * others / 8, rel=0.05)


def test_routes_take_a_byte_a_layer_and_expert(make_config: ConfigMaker) -> None:
    config = make_config(
        "tiny",
        "tp=1",
        model={"vocab_size": 99, "megatron": {"moe_layer_freq": [0, 1, 1, 1]}},
        routing={"replay": "r3"},
        rollout={"max_response_tokens": 64},
    )
    found = estimate(config, 1)
    work = found.work
    assert found.worst.replay == 3 * 2 * work.tokens * work.micro_batches_per_step
    host = config.routing.model_copy(update={"store_on_host": True})
    moved = estimate(config.model_copy(update={"routing": host}), 1).worst
    assert (moved.replay, moved.host) == (0, found.worst.replay)


def test_a_rollout_holds_the_routes_of_all_its_responses(make_config: ConfigMaker) -> None:
    """Of 128 responses, 8 are decoded together."""

    def rollout(replay: str) -> int:
        config = make_config(
            "tiny",
            "tp=1",
            model={"vocab_size": 99},
            routing={"replay": replay},
            rollout={"batch_size": 8},
        )
        return estimate(config, 1).worst.rollout

    tokens, layers, topk = 128 * 128, 4, 2
    assert rollout("r3") - rollout("off") == tokens * layers * topk


HIDDEN, HEADS, GROUPS, CHANNELS, FFN, LAYERS = 64, 4, 2, 16, 64, 4
TP, EP = 2, 2
# The number of weights of a rank: qkv and output projection are split over tp; the experts' gate,
# up and down projections are split over ep.
FP8_WEIGHTS = LAYERS * (
    HIDDEN * CHANNELS * (2 * HEADS + 2 * GROUPS) // TP + 8 // EP * 3 * HIDDEN * FFN
)


def worst_rank(make_config: ConfigMaker, precision: str, **megatron: object) -> RankMemory:
    config = make_config(
        "tiny",
        f"tp={TP},ep={EP}",
        model={"vocab_size": 99, "megatron": megatron},
        training={"precision": precision},
    )
    # The configuration is not checked, because the check would fail on a machine without FP8.
    return estimate_layout(config, 2, 99).worst


@pytest.mark.parametrize("precision", list(FP8))
def test_fp8_adds_two_copies_of_the_weights_and_nothing_else(
    make_config: ConfigMaker, precision: str
) -> None:
    plain, found = worst_rank(make_config, "bf16"), worst_rank(make_config, precision)
    assert (plain.fp8_copies, found.fp8_copies) == (0, 2 * FP8_WEIGHTS)
    assert found.state == plain.state
    assert found.total == plain.total + 2 * FP8_WEIGHTS
    assert by_component(found)["FP8 copies of weights"] == 2 * FP8_WEIGHTS


@pytest.mark.parametrize(
    ("megatron", "copies"),
    [
        # The transposed copies are not kept. They are computed again for each use.
        ({"disable_parameter_transpose_cache": True}, 0),
        # This case shows that the model can be built with fields that only FP8 reads.
        ({"moe_router_padding_for_quantization": True, "fp8_margin": 1}, 2 * FP8_WEIGHTS),
    ],
)
def test_fields_of_fp8(make_config: ConfigMaker, megatron: dict[str, Any], copies: int) -> None:
    assert worst_rank(make_config, "mxfp8", **megatron).fp8_copies == copies
