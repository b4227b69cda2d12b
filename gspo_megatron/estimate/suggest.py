"""Suggests layouts for a given number of ranks. Each layout passes the rules and fits into memory,
and the fastest comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.config import Layout, ResolvedParallel, apply_layout, resolve_parallel
from gspo_megatron.config.model_rules import (
    FIRST,
    LAST,
    WITH_EMBEDDING,
    WITH_LOSS,
    WRITTEN_OUT,
    uneven_stages,
)
from gspo_megatron.config.phases import phase_configs, phase_end
from gspo_megatron.config.rules import check_config
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.estimate.activations import ChunkPass
from gspo_megatron.estimate.cost import GPUS_PER_NODE, Cost, step_cost
from gspo_megatron.estimate.layout import (
    HEADROOM,
    RECOMPUTE,
    LayoutEstimate,
    estimate_layout,
    run_stage,
    saves_little,
)
from gspo_megatron.estimate.model import rank_model, with_values
from gspo_megatron.estimate.workload import NOT_READ, DataSizes, Workload, in_flight, workload
from gspo_megatron.families.model_shape import experts_in_layers

MOST_BUILT = 40  # most layouts that the search builds and runs on the meta device
# With both flags, embedding and loss count as one layer each when the layers are divided into
# stages.
PLACEMENT = (WITH_EMBEDDING, WITH_LOSS)
_PLACED_BY = (*PLACEMENT, FIRST, LAST, WRITTEN_OUT)
_BYTES = {"fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits. For a run with phases it fits in every phase."""

    estimate: LayoutEstimate  # of the phase that needs the most memory
    cost: Cost  # of a step; the mean of all steps
    overrides: str  # overrides to add to the command line


@dataclass(frozen=True)
class Search:
    """The suggested layouts, and the numbers of examined candidates."""

    suggestions: list[Suggestion]
    num_valid: int  # candidates that pass the rules, counted once per recompute mode
    num_likely: int  # candidates that may fit by a rough count
    num_built: int


@dataclass(frozen=True)
class _Candidate:
    phases: Sequence[AnyConfig]  # the configuration of each phase
    parallel: ResolvedParallel
    work: Workload
    dense: float  # non-expert parameters of an average rank
    experts: float  # expert parameters of an average rank
    cost: float = 0.0

    @property
    def config(self) -> AnyConfig:
        """The configuration of the first phase."""
        return self.phases[0]


def suggest(
    config: AnyConfig,
    world_size: int,
    vocab_size: int,
    counts: tuple[int, int],
    gpu_bytes: float,
    sizes: DataSizes = NOT_READ,
    *,
    count: int = 10,
) -> Search:
    """Find the `count` cheapest layouts whose worst rank fits into `gpu_bytes`.

    counts: the model's number of parameters, and of active parameters. A formula for the traffic
    sets the order in which candidates are tried. The traffic measured on the meta device sets the
    order of the result.
    """
    room = gpu_bytes * (1 - HEADROOM)
    phases = phase_configs(config)
    saved, output = _saved_bytes(phases[0], vocab_size, sizes)
    every = list(_candidates(phases, world_size, counts, sizes))
    likely = [each for each in every if _may_fit(each, saved, output, room)]
    suggestions: list[Suggestion] = []
    built = 0
    runs: list[dict[tuple, list[ChunkPass]]] = [{} for _ in phases]
    for candidate in sorted(likely, key=lambda candidate: candidate.cost)[:MOST_BUILT]:
        if len(suggestions) == count:
            break
        built += 1
        try:
            estimates = [
                estimate_layout(phase, world_size, vocab_size, sizes, limit=room, runs=cache)
                for phase, cache in zip(candidate.phases, runs, strict=True)
            ]
        except UserError:
            continue  # Megatron-Core refuses the layout although our rules accept it
        if all(each.fits(gpu_bytes) for each in estimates):
            worst = max(estimates, key=lambda each: each.worst.total)
            cost = _mean_cost(estimates, counts[1])
            suggestions.append(Suggestion(worst, cost, overrides(candidate.config, config)))
    suggestions.sort(key=lambda suggestion: suggestion.cost.total)
    return Search(suggestions, len(every), len(likely), built)


def _mean_cost(phases: Sequence[LayoutEstimate], active_parameters: int) -> Cost:
    """Return the cost of a step: the mean of all steps of the phases."""
    costs = [
        step_cost(each.config, each.parallel, each.work, active_parameters, each.most_traffic())
        for each in phases
    ]
    if len(costs) == 1:
        return costs[0]
    ends = [0]
    for each in phases:
        ends.append(phase_end(each.config, ends[-1] + 1))
    shares = [(end - before) / ends[-1] for before, end in zip(ends, ends[1:])]

    def mean(part: str) -> float:
        return sum(share * getattr(cost, part) for share, cost in zip(shares, costs, strict=True))

    return Cost(mean("compute"), mean("exchange"), mean("bubble"), mean("update"))


def overrides(config: AnyConfig, original: AnyConfig) -> str:
    """Return the command-line overrides that turn the original configuration into `config`."""
    texts = [f"parallel.layout={config.layout()}"]
    if config.training.recompute != original.training.recompute:
        texts.append(f"training.recompute={config.training.recompute}")
    for name in (*PLACEMENT, LAST):
        value = config.model.megatron.get(name)
        if value != original.model.megatron.get(name):
            texts.append(f"model.megatron.{name}={'true' if value is True else value}")
    return " ".join(texts)


def _candidates(
    phases: Sequence[AnyConfig], world_size: int, counts: tuple[int, int], sizes: DataSizes
) -> Iterator[_Candidate]:
    """Yield the layouts that pass the rules in every phase. Work and cost are those of the first
    phase."""
    first, *_ = phases
    for layout, placement in _layouts(first, world_size):
        configs = [apply_layout(phase, layout) for phase in phases]
        if placement:
            megatron = first.model.megatron | placement
            configs = [with_values(each, "model", megatron=megatron) for each in configs]
        try:
            for each in configs:
                check_config(each, world_size)
        except ConfigError:
            continue
        parallel = resolve_parallel(configs[0], world_size)
        work = workload(configs[0], parallel, sizes)
        plain = _Candidate(configs, parallel, work, *_rank_parameters(first, parallel, counts[0]))
        traffic = _traffic(plain)
        for mode in RECOMPUTE:
            variants = [with_values(each, "training", recompute=mode) for each in configs]
            cost = step_cost(variants[0], parallel, work, counts[1], traffic).total
            yield replace(plain, phases=variants, cost=cost)


def _layouts(config: AnyConfig, world_size: int) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """Yield all layouts whose tp stays inside a node, each with fields that divide the layers into
    stages.

    The first variant of a layout has no such fields, and the second variant has fields that count
    embedding and loss as layers. If neither variant divides the layers evenly, a third one makes
    the last stage smaller. If the configuration divides the layers itself, there is only the first
    variant."""
    shape = config.resolved_model()
    has_placement = any(shape.megatron.get(name) for name in _PLACED_BY)
    for tp in _divisors(world_size, GPUS_PER_NODE):
        for pp in _divisors(world_size // tp, shape.num_layers):
            for cp in _divisors(world_size // (tp * pp), world_size):
                for ep in _divisors(world_size // pp, shape.num_moe_experts or 1):
                    for vpp in (None, 2, 3, 4, 6) if pp > 1 else (None,):
                        layout = Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, cp=cp)
                        yield layout, {}
                        if pp > 1 and not has_placement:
                            yield layout, dict.fromkeys(PLACEMENT, True)
                            yield from _with_smaller_last_stage(shape.num_layers, layout)


def _with_smaller_last_stage(
    layers: int, layout: Layout
) -> Iterator[tuple[Layout, dict[str, Any]]]:
    chunks = layout.pp * (layout.vpp or 1)
    split = uneven_stages(layers, layout)
    if layers % chunks and (layers + 2) % chunks and split is not None:
        yield layout, {LAST: split[1]}


def _saved_bytes(
    config: AnyConfig, vocab_size: int, sizes: DataSizes
) -> tuple[dict[str, float], float]:
    """Measure the bytes per token that are saved for the backward pass, with tp = cp = 1.

    Returns the bytes of a layer by recompute mode, and the bytes of a chunk's output. The measured
    stage has two layers. It is the middle stage of three, so it has neither embedding nor head."""
    fields = {k: v for k, v in config.model.megatron.items() if k not in _PLACED_BY}
    fields |= {"num_layers": 6}
    if config.resolved_model().num_moe_experts:
        fields["moe_layer_freq"] = 1
    small = apply_layout(with_values(config, "model", megatron=fields), Layout(pp=3))
    parallel = resolve_parallel(small, 3)
    work = workload(small, parallel, sizes)
    saved, output = {}, 0.0
    for mode in RECOMPUTE:
        changed = with_values(small, "training", recompute=mode)
        with rank_model(changed, parallel, 1, vocab_size) as model:
            [chunk] = run_stage(model, work)
        saved[mode] = chunk.saved_bytes / 2 / work.tokens
        output = chunk.output_bytes / work.tokens
    return saved, output


_TOLERANCE = 1.05  # the rough count may exceed the available memory by this factor


def _may_fit(candidate: _Candidate, saved: Mapping[str, float], output: float, room: float) -> bool:
    """Check roughly whether a candidate may fit, by the state and activations of an average rank.
    saved, output: see `_saved_bytes`.

    Only tp divides the activations: the tokens of a micro-batch on a rank do not depend on cp.
    Returns False for selective recomputation if it saves little."""
    mode = candidate.config.training.recompute
    if mode == "selective" and saves_little(saved[mode], saved["none"]):
        return False
    work, sizes = candidate.work, candidate.parallel.layout
    chunks = sizes.vpp or 1
    tokens = work.tokens / sizes.cp / sizes.tp
    layers = candidate.config.resolved_model().num_layers / (sizes.pp * chunks)
    passes = sum(in_flight(sizes.pp, 0, chunks, work.micro_batches))
    activations = (saved[mode] * layers + output) * tokens * passes
    # While a layer is recomputed, all its activations exist.
    workspace = saved["none"] * tokens
    # Weights, gradients and optimizer. With fp32 weights, the optimizer needs no fp32 copy, which
    # saves 4 bytes for each weight.
    parallel = candidate.parallel
    weight = _BYTES.get(candidate.config.training.precision, 2)
    sharded = 12 if weight == 2 else 8
    replicas = parallel.data_parallel_size * parallel.context_parallel_size
    # A frozen model has only weights; its adapters are negligible.
    trained = 0 if candidate.config.model.lora.rank else 1
    state = candidate.dense * (weight + trained * (4 + sharded / replicas)) + candidate.experts * (
        weight + trained * (4 + sharded / parallel.expert_data_parallel_size)
    )
    return state + activations + workspace <= room * _TOLERANCE


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def _rank_parameters(
    config: AnyConfig, parallel: ResolvedParallel, parameters: int
) -> tuple[float, float]:
    """Return the numbers of non-expert and expert parameters of an average rank."""
    shape, sizes, experts = config.resolved_model(), parallel.layout, 0
    if shape.num_moe_experts:
        assert shape.moe_ffn_hidden_size is not None
        matrices = 3 if shape.megatron.get("gated_linear_unit") else 2
        expert = matrices * shape.hidden_size * shape.moe_ffn_hidden_size
        experts = sum(experts_in_layers(shape)) * shape.num_moe_experts * expert
    return (parameters - experts) / (sizes.tp * sizes.pp), experts / sizes.expert_parallel_size


def _traffic(candidate: _Candidate) -> dict[str, float]:
    """Estimate bytes by axis, as if all layers were like those of Qwen3. The result is used only to
    order the layouts to try."""
    config, parallel, work = candidate.config, candidate.parallel, candidate.work
    shape = config.resolved_model()
    tp, pp, ep, cp = (getattr(parallel.layout, axis) for axis in ("tp", "pp", "ep", "cp"))
    element = _BYTES.get(config.training.precision, 2)
    tokens = work.tokens / cp * work.micro_batches_per_step * element  # bytes per hidden channel
    layers, hidden = shape.num_layers / pp, shape.hidden_size
    heads = shape.num_query_groups * shape.kv_channels / tp

    def ring(size: int) -> float:
        return (size - 1) / size

    # The bytes of an update of adapters are negligible.
    update = 0 if config.model.lora.rank else (element + 4) * work.mini_batches
    return {
        "tp": 6 * ring(tp) * layers * hidden * tokens,
        "ep": 5 * ring(ep) * layers * hidden * tokens / tp * (shape.moe_router_topk or 0),
        "etp": 0.0,
        "cp": 5 * ring(cp) * layers * 2 * heads * tokens * cp,
        "pp": 3.0 * (pp > 1) * hidden * tokens / tp,
        "dp": ring(parallel.data_parallel_size * cp) * candidate.dense * update,
        "edp": ring(parallel.expert_data_parallel_size) * candidate.experts * update,
    }
