"""Estimates a configuration on a number of ranks, one pipeline stage after the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gspo_megatron.config import ResolvedParallel, resolve_parallel
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.estimate.activations import ChunkPass, chunk_passes, micro_batch
from gspo_megatron.estimate.memory import RankMemory, rank_memory
from gspo_megatron.estimate.model import (
    RankModel,
    global_parameters,
    rank_model,
    state_bytes,
    with_values,
)
from gspo_megatron.estimate.traffic import AXES, step_traffic
from gspo_megatron.estimate.workload import NOT_READ, DataSizes, Workload, bubble_share, workload

RECOMPUTE = ("none", "selective", "full")
# A recompute mode is worth its time only if it saves at least this share of the bytes.
LEAST_SAVING = 0.1

# Share of a GPU's memory for fragmentation, NCCL's buffers and the CUDA context.
HEADROOM = 0.08


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimated figures of a layout."""

    config: AnyConfig
    parallel: ResolvedParallel
    work: Workload
    parameters: Counter[str]  # parameters of the whole model, by kind
    ranks: list[RankMemory]  # one rank of each pipeline stage
    traffic: list[dict[str, int]]  # bytes that each of these ranks sends in a step, by axis
    bubble: float

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    def most_traffic(self) -> dict[str, int]:
        """Return, for each axis, the bytes of the rank that sends most along this axis."""
        return {axis: max(rank[axis] for rank in self.traffic) for axis in AXES}

    def fits(self, gpu_bytes: float) -> bool:
        """Whether the rank that needs the most memory fits on the GPU, with HEADROOM left."""
        return self.worst.total <= gpu_bytes * (1 - HEADROOM)


def estimate_layout(
    config: AnyConfig,
    world_size: int,
    vocab_size: int,
    sizes: DataSizes = NOT_READ,
    *,
    limit: float | None = None,
    runs: dict[tuple, list[ChunkPass]] | None = None,
) -> LayoutEstimate:
    """Build and run one rank of each pipeline stage on the meta device.

    config: has passed `check_config` at this world size.
    limit: bytes of a GPU's memory. If it is set, only the first, second and last stage are built,
    because the other stages hold fewer micro-batches in flight than the second one. If a stage
    needs more than `limit`, the stages after it are not built.
    runs: a cache of runs, shared between layouts.

    Raises UserError if Megatron-Core cannot build the model.
    """
    parallel = resolve_parallel(config, world_size)
    work = workload(config, parallel, sizes)
    stages = parallel.pipeline_model_parallel_size
    ranks, traffic, totals = [], [], Counter[str]()
    runs = {} if runs is None else runs
    ends = sorted({0, min(1, stages - 1), stages - 1})
    for stage in range(stages) if limit is None else ends:
        # the first rank of the stage: ranks of a stage have consecutive numbers
        rank = stage * (world_size // stages)
        with rank_model(config, parallel, rank, vocab_size) as model:
            state = state_bytes(model)
            if limit is not None and state.total > limit:
                passes = NO_PASSES  # the stage is too large even without activations
            else:
                key = _run_key(model, work)
                passes = runs[key] = runs.get(key) or run_stage(model, work)
            ranks.append(rank_memory(model, state, passes, work))
            traffic.append(step_traffic(model, state, passes, work))
            totals.update(global_parameters(model))
        if limit is not None and ranks[-1].total > limit:
            break
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    bubble = bubble_share(stages, chunks, work.micro_batches)
    return LayoutEstimate(config, parallel, work, totals, ranks, traffic, bubble)


def _run_key(model: RankModel, work: Workload) -> tuple:
    """Return the key under which the passes of a rank are cached. Ranks with equal keys, in
    configurations that differ only in the layout and in recomputation, run the same passes."""
    sizes = model.parallel.group_sizes()
    del sizes["pipeline_model_parallel_size"], sizes["virtual_pipeline_model_parallel_size"]
    chunks = tuple(
        (m.pre_process, m.post_process, tuple(type(layer.mlp) for layer in m.decoder.layers))
        for m in model.policy.models
    )
    return (*sizes.values(), model.config.training.recompute, work.lengths, chunks)


NO_PASSES = [ChunkPass(0, 0, 0, 0, 0, (), (), 0)]


def run_stage(model: RankModel, work: Workload) -> list[ChunkPass]:
    """Run a full micro-batch forward and backward through each chunk."""
    return chunk_passes(model, micro_batch(model, work.lengths), samples=work.rollout_rows > 0)


def saves_little(with_mode: float, without: float) -> bool:
    """Whether a recompute mode saves less than LEAST_SAVING of the bytes."""
    return with_mode > (1 - LEAST_SAVING) * without


def recompute_modes(estimate: LayoutEstimate, vocab_size: int) -> dict[str, int]:
    """Return, for each recompute mode, the bytes that the rank with the most memory needs during
    training."""
    config, worst = estimate.config, estimate.worst
    totals = {}
    for mode in RECOMPUTE:
        if mode == config.training.recompute:
            totals[mode] = worst.while_training
            continue
        changed = with_values(config, "training", recompute=mode)
        with rank_model(changed, estimate.parallel, worst.rank, vocab_size) as model:
            passes = run_stage(model, estimate.work)
            memory = rank_memory(model, state_bytes(model), passes, estimate.work)
            totals[mode] = memory.while_training
    return totals
