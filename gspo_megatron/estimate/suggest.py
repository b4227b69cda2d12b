"""Layouts for a number of ranks that pass the rules and fit, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.config import Layout, ResolvedParallel, apply_layout, resolve_parallel
from gspo_megatron.config.rules import check_config
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.estimate.layout import (
    HEADROOM,
    RECOMPUTE,
    LayoutEstimate,
    StageRun,
    estimate_layout,
    run_stage,
)
from gspo_megatron.estimate.model import rank_model
from gspo_megatron.estimate.traffic import Cost, Machine, step_cost
from gspo_megatron.estimate.workload import Workload, bubble_share, in_flight, workload

# Layouts that are built and run on meta before the search ends.
MOST_BUILT = 40
# Both flags: embedding and loss count as a layer each when layers are dealt out to stages.
PLACEMENT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_PLACED_BY = (
    *PLACEMENT,
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
_BYTES = {"fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    estimate: LayoutEstimate
    cost: Cost
    overrides: str  # what to add to the command line


@dataclass(frozen=True)
class Search:
    """The layouts found, and how many were looked at."""

    found: list[Suggestion]
    legal: int  # candidates that pass the rules, counted once per recompute mode
    likely: int  # those of them that may fit by a rough count
    built: int


@dataclass(frozen=True)
class _Candidate:
    config: AnyConfig
    parallel: ResolvedParallel
    work: Workload
    cost: float = 0.0


def suggest(
    config: AnyConfig,
    world_size: int,
    vocab_size: int,
    counts: tuple[int, int],
    gpu_bytes: float,
    *,
    count: int = 10,
    longest: int | None = None,
    machine: Machine | None = None,
) -> Search:
    """The `count` cheapest layouts by estimate.traffic whose worst rank fits into `gpu_bytes`.

    counts: the model's parameters, all and active ones. Candidates are first ordered by a formula
    of their traffic; then the best are built on meta, and ordered by the traffic found there.
    """
    machine = machine or Machine()
    room = gpu_bytes * (1 - HEADROOM)
    kept = _kept_activations(config, vocab_size, longest)
    every = list(_candidates(config, world_size, counts, longest, machine))
    candidates = sorted(
        (each for each in every if _may_fit(each, counts, kept, room)),
        key=lambda candidate: candidate.cost,
    )
    found: list[Suggestion] = []
    built = 0
    runs: dict[tuple, StageRun] = {}
    for candidate in candidates:
        if len(found) == count or built == MOST_BUILT:
            break
        built += 1
        options = {"ends_only": True, "limit": room, "runs": runs}
        try:
            estimate = estimate_layout(candidate.config, world_size, vocab_size, longest, **options)
        except UserError:
            continue  # refused by Megatron-Core, though our own rules accept it
        if estimate.fits(gpu_bytes):
            cost = _cost(candidate, counts, estimate.most_traffic(), machine)
            found.append(Suggestion(estimate, cost, overrides(candidate.config, config)))
    found.sort(key=lambda suggestion: suggestion.cost.total)
    return Search(found, len(every), len(candidates), built)


def overrides(config: AnyConfig, original: AnyConfig) -> str:
    """The command line's overrides that turn the original configuration into `config`."""
    texts = [f"parallel.layout={config.layout()}"]
    if config.training.recompute != original.training.recompute:
        texts.append(f"training.recompute={config.training.recompute}")
    for name in PLACEMENT:
        if config.model.megatron.get(name) != original.model.megatron.get(name):
            texts.append(f"model.megatron.{name}=true")
    return " ".join(texts)


def _candidates(
    config: AnyConfig,
    world_size: int,
    counts: tuple[int, int],
    longest: int | None,
    machine: Machine,
) -> Iterator[_Candidate]:
    for layout, placed in _layouts(config, world_size, machine):
        laid_out = _apply(config, layout, placed)
        try:
            check_config(laid_out, world_size)
        except ConfigError:
            continue
        parallel = resolve_parallel(laid_out, world_size)
        plain = _Candidate(laid_out, parallel, workload(laid_out, parallel, longest))
        traffic = _traffic(plain, counts)
        for mode in RECOMPUTE:
            training = laid_out.training.model_copy(update={"recompute": mode})
            candidate = replace(plain, config=laid_out.model_copy(update={"training": training}))
            yield replace(candidate, cost=_cost(candidate, counts, traffic, machine).total)


def _cost(
    candidate: _Candidate,
    counts: tuple[int, int],
    traffic: Mapping[str, float],
    machine: Machine,
) -> Cost:
    parallel, work = candidate.parallel, candidate.work
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    bubble = bubble_share(parallel.pipeline_model_parallel_size, chunks, work.micro_batches)
    return step_cost(candidate.config, parallel, work, counts[1], traffic, bubble, machine)


def _layouts(config: AnyConfig, world_size: int, machine: Machine) -> Iterator[tuple[Layout, bool]]:
    """All splits whose tp stays inside a node, and whether embedding and loss count as layers."""
    shape = config.resolved_model()
    placed = any(shape.megatron.get(name) for name in _PLACED_BY)
    experts = shape.num_moe_experts or 1
    for tp in _divisors(world_size, machine.gpus_per_node):
        for pp in _divisors(world_size // tp, shape.num_layers):
            for cp in _divisors(world_size // (tp * pp), world_size):
                for ep in _divisors(world_size // pp, experts):
                    for vpp in (None, 2, 3, 4, 6) if pp > 1 else (None,):
                        layout = Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, cp=cp)
                        yield layout, False
                        if pp > 1 and not placed:
                            yield layout, True


@dataclass(frozen=True)
class _Kept:
    """Bytes of activations per token that the backward pass needs, without tp and cp."""

    layer: Mapping[str, float]  # by recompute mode
    output: float  # of a chunk, sent to the next stage


def _kept_activations(config: AnyConfig, vocab_size: int, longest: int | None) -> _Kept:
    """Measured on a stage of two layers, between two stages with embedding and head."""
    fields = {k: v for k, v in config.model.megatron.items() if k not in _PLACED_BY}
    fields |= {"num_layers": 6}
    if config.resolved_model().num_moe_experts:
        fields["moe_layer_freq"] = 1
    model = config.model.model_copy(update={"megatron": fields})
    small = apply_layout(config.model_copy(update={"model": model}), Layout(pp=3))
    parallel = resolve_parallel(small, 3)
    work = workload(small, parallel, longest)
    of_modes, output = {}, 0.0
    for mode in RECOMPUTE:
        training = small.training.model_copy(update={"recompute": mode})
        probe = small.model_copy(update={"training": training})
        with rank_model(probe, parallel, 1, vocab_size) as built:
            found = run_stage(built, work).passes[0]
        of_modes[mode] = found.saved_bytes / 2 / work.tokens
        output = found.output_bytes / work.tokens
    return _Kept(of_modes, output)


# The rough count may exceed the room by this factor, since it is not exact.
_TOLERANCE = 1.05


def _may_fit(candidate: _Candidate, counts: tuple[int, int], kept: _Kept, room: float) -> bool:
    """A rough check by an average rank's state and by activations that only tp divides (a rank has
    the same number of tokens for every cp). A recompute mode that saves nothing is left out."""
    mode = candidate.config.training.recompute
    if mode == "selective" and kept.layer[mode] >= kept.layer["none"]:
        return False
    config, parallel, work = candidate.config, candidate.parallel, candidate.work
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    tokens = work.tokens / parallel.context_parallel_size / tp
    layers = config.resolved_model().num_layers / (pp * chunks)
    passes = sum(in_flight(pp, 0, chunks, work.micro_batches))
    activations = (kept.layer[mode] * layers + kept.output) * tokens * passes
    # recomputation holds the activations of one whole layer
    workspace = kept.layer["none"] * tokens
    needed = _state_bytes(candidate, counts) + activations + workspace
    return needed <= room * _TOLERANCE


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def _apply(config: AnyConfig, layout: Layout, placed: bool) -> AnyConfig:
    laid_out = apply_layout(config, layout)
    if not placed:
        return laid_out
    fields: dict[str, Any] = {**config.model.megatron, **dict.fromkeys(PLACEMENT, True)}
    model = config.model.model_copy(update={"megatron": fields})
    return laid_out.model_copy(update={"model": model})


def _expert_parameters(config: AnyConfig) -> int:
    shape = config.resolved_model()
    if not shape.num_moe_experts:
        return 0
    frequency = shape.megatron.get("moe_layer_freq", 1)
    layers = (
        -(-shape.num_layers // frequency)
        if isinstance(frequency, int)
        else sum(map(bool, frequency))
    )
    matrices = 3 if shape.megatron.get("gated_linear_unit") else 2
    assert shape.moe_ffn_hidden_size is not None
    expert = matrices * shape.hidden_size * shape.moe_ffn_hidden_size
    return layers * shape.num_moe_experts * expert


def _state_bytes(candidate: _Candidate, counts: tuple[int, int]) -> float:
    """Of weights, gradients and optimizer on an average rank, a lower bound of the memory."""
    config, parallel = candidate.config, candidate.parallel
    weight = _BYTES.get(config.training.precision, 2)
    sharded = 12 if weight == 2 else 8
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    experts = _expert_parameters(config)
    dense = counts[0] - experts
    dense /= parallel.tensor_model_parallel_size * pp
    experts /= parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size * pp
    replicas = parallel.data_parallel_size * cp
    return dense * (weight + 4 + sharded / replicas) + experts * (
        weight + 4 + sharded / parallel.expert_data_parallel_size
    )


def _traffic(candidate: _Candidate, counts: tuple[int, int]) -> dict[str, float]:
    """A formula for a Qwen3-like layer, only for the order in which layouts are tried."""
    config, parallel, work = candidate.config, candidate.parallel, candidate.work
    shape = config.resolved_model()
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    element = _BYTES.get(config.training.precision, 2)
    tokens = work.tokens / cp * work.micro_batches_per_step * element  # bytes of a hidden channel
    layers, hidden = shape.num_layers / pp, shape.hidden_size
    heads = shape.num_query_groups * shape.kv_channels / tp

    def ring(size: int) -> float:
        return (size - 1) / size

    experts = _expert_parameters(config) / (ep * pp)
    dense = (counts[0] - _expert_parameters(config)) / (tp * pp)
    update = (element + 4) * work.mini_batches
    return {
        "tp": 6 * ring(tp) * layers * hidden * tokens,
        "ep": 5 * ring(ep) * layers * hidden * tokens / tp * (shape.moe_router_topk or 0),
        "etp": 0.0,
        "cp": 5 * ring(cp) * layers * 2 * heads * tokens * cp,
        "pp": 3.0 * (pp > 1) * hidden * tokens / tp,
        "dp": ring(parallel.data_parallel_size * cp) * dense * update,
        "edp": ring(parallel.expert_data_parallel_size) * experts * update,
    }
