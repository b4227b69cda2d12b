"""Estimates the seconds of a training step, to order layouts, and the hours of a run.

Rough model of a step's seconds:

    compute   FLOPs of all passes, with attention, at a fixed share of a GPU's peak
    exchange  bytes sent along tp, ep, etp and cp, at NVLink's rate if the group is inside a node,
              else at the network's rate
    bubble    (compute + exchange) * idle share / (1 - idle share)
    update    gradients and weights over dp and edp, activations over pp, at the same rates

The model leaves out the items of LEFT_OUT, message sizes, evaluations and file systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gspo_megatron.config import Config, ResolvedParallel
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.estimate.layout import LayoutEstimate
from gspo_megatron.estimate.workload import Workload, bubble_share
from gspo_megatron.families.model_shape import (
    ModelShape,
    delta_net_layers,
    delta_net_sizes,
    windows_in_layers,
)
from gspo_megatron.models.delta_rule import CHUNK

LEFT_OUT = (
    "overlap of communication and compute, latencies, matrix products too small to fill a GPU, "
    "uneven stages and experts"
)

# The assumed hardware is an H100 with its usual network. The factors are the shares of the peaks
# that training of such models reaches.
FLOPS = 0.4 * 989e12  # dense BF16
NODE_BYTES = 0.75 * 450e9  # bytes per second that one GPU sends over NVLink
NETWORK_BYTES = 0.8 * 50e9  # bytes per second over InfiniBand, 400 Gbit/s for each GPU
MEMORY_BYTES = 0.6 * 3.35e12  # bytes per second that a GPU reads from its memory
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Cost:
    """The estimated seconds of a step."""

    compute: float
    exchange: float
    bubble: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.bubble + self.update


def step_cost(
    config: AnyConfig,
    parallel: ResolvedParallel,
    work: Workload,
    active_parameters: int,
    traffic: Mapping[str, float],
) -> Cost:
    """Estimate a step's seconds. `traffic`: bytes that a rank sends, by axis."""
    # tokens of a model replica in a step
    tokens = work.filled * work.tokens * work.micro_batches_per_step
    sizes, shape = parallel.layout, config.resolved_model()
    # FLOPs per token: two for each weight in a matrix product, and attention over a window or, on
    # average, half of the sequence. An input embedding is a look-up without FLOPs. A shared prompt
    # has its products once, but attention with each of its responses.
    is_head = shape.tie_embeddings and not shape.scores
    look_up = 0 if is_head else shape.hidden_size * (shape.vocab_size or 0)
    delta_nets = delta_net_layers(shape)
    windows = windows_in_layers(shape.megatron, shape.num_layers)
    # FLOPs for each channel of a head, over all layers: two for each key that a query sees.
    key_flops = sum(
        min(work.longest, 2 * (window or work.longest))
        for window, is_delta_net in zip(windows, delta_nets, strict=True)
        if not is_delta_net
    )
    attention = key_flops * shape.num_attention_heads * sum(shape.head_channels)
    products = 2.0 * (active_parameters - look_up) * work.computed
    flops = products + attention + sum(delta_nets) * _delta_flops(shape)
    # Passes per token, in units of a forward pass. A backward pass counts as two, or as one if the
    # weights are frozen. The FLOPs of adapters are negligible.
    passes = 2.0 if config.model.lora.rank else 3.0
    passes += config.training.recompute == "full"
    passes += work.forward_only / work.micro_batches_per_step
    compute = flops * passes * tokens / (sizes.tp * sizes.cp * sizes.pp) / FLOPS
    rates = axis_rates(parallel)
    seconds = sum(traffic[axis] / rates[axis] for axis in ("tp", "ep", "etp", "cp"))
    exchange = work.filled * work.computed * seconds
    update = sum(traffic[axis] / rates[axis] for axis in ("dp", "edp", "pp"))
    bubble = bubble_share(sizes.pp, sizes.vpp or 1, work.micro_batches)
    return Cost(compute, exchange, (compute + exchange) * bubble / (1 - bubble), update)


def _delta_flops(shape: ModelShape) -> int:
    """Return the FLOPs per token in the delta rule of a layer.

    Each head has three products with its state, of size key x value. Within a chunk of tokens it
    has five products over the width of a key, and three over the width of a value."""
    sizes = delta_net_sizes(shape.megatron)
    key, value = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    heads = sizes["linear_num_value_heads"]
    return heads * (6 * key * value + CHUNK * (5 * key + 3 * value))


def axis_rates(parallel: ResolvedParallel) -> dict[str, float]:
    """Return the bytes per second along each axis.

    Megatron-Core numbers ranks in the order tp, cp, dp, pp; for the experts etp, ep, edp, pp."""
    sizes, etp = parallel.layout, parallel.expert_tensor_parallel_size
    stage = parallel.world_size // sizes.pp
    extent = {"tp": sizes.tp, "cp": sizes.tp * sizes.cp, "etp": etp, "ep": etp * sizes.ep}
    extent |= {"dp": stage, "edp": stage, "pp": parallel.world_size}
    return {
        axis: NODE_BYTES if ranks <= GPUS_PER_NODE else NETWORK_BYTES
        for axis, ranks in extent.items()
    }


@dataclass(frozen=True)
class RunCost:
    """The estimated times of a run, or of one of its phases."""

    steps: int
    train_seconds: float  # of a step
    generate_seconds: float | None  # of a step; None: servers generate the responses
    ranks: int

    @property
    def hours(self) -> float:
        return self.steps * (self.train_seconds + (self.generate_seconds or 0.0)) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.ranks

    def and_then(self, later: RunCost) -> RunCost:
        """Return the cost of a run with both phases; the seconds of its steps are means."""
        steps = self.steps + later.steps

        def mean(earlier_seconds: float, later_seconds: float) -> float:
            return (self.steps * earlier_seconds + later.steps * later_seconds) / steps

        generate = None
        if self.generate_seconds is not None and later.generate_seconds is not None:
            generate = mean(self.generate_seconds, later.generate_seconds)
        return RunCost(steps, mean(self.train_seconds, later.train_seconds), generate, self.ranks)


def run_cost(
    estimate: LayoutEstimate, active_parameters: int, steps: int | None = None
) -> RunCost | None:
    """Estimate the time of a run, or of the phase with this estimate, which has `steps` steps.
    Returns None for a supervised stage, whose number of steps may depend on its data."""
    config, parallel, work = estimate.config, estimate.parallel, estimate.work
    if not isinstance(config, Config):
        return None
    cost = step_cost(config, parallel, work, active_parameters, estimate.most_traffic())
    generate = None
    if config.rollout.engine == "megatron":
        # A pass gives each response one token. A pass goes through the pipeline stages one after
        # the other, and reads the weights, keys and values of each stage. On average half of the
        # cache is filled, and `kv_cache` is one and a half caches, perhaps for an evaluation.
        passes = work.rollout_rounds * config.rollout.max_response_tokens
        share = work.rollout_rows / max(work.rollout_rows, work.evaluation_rows)
        read = sum(estimate.worst.state.parameters.values()) + share * estimate.worst.kv_cache / 3
        generate = passes * parallel.pipeline_model_parallel_size * read / MEMORY_BYTES
    steps = config.training.steps if steps is None else steps
    return RunCost(steps, cost.total, generate, parallel.world_size)
