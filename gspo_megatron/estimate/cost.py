"""The stated cost model by which layouts are ranked: seconds of a step's training, roughly.

    compute   model FLOPs of all passes (6 a weight and token forward and backward, 2 forward), with
              attention's, over the ranks at a fixed share of a GPU's peak
    exchange  bytes sent along tp, ep, etp and cp, at NVLink's rate where the group lies within a
              node, else at the network's
    bubble    (compute + exchange) / (1 - idle share)
    update    gradients and weights over dp and edp, activations over pp, at the network's rate

Left out: overlap of any two of these, latencies and message sizes, matrix products too small to
fill a GPU, uneven stages and uneven experts, rollouts and evaluations, file systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gspo_megatron.config import ModelShape, ResolvedParallel
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.estimate.workload import Workload

LEFT_OUT = (
    "overlap of communication and compute, latencies, matrix products too small to fill a GPU, "
    "uneven stages and experts"
)


@dataclass(frozen=True)
class Machine:
    """What the model assumes of the hardware: an H100 and its usual network, at shares of the peak
    that training of such models reaches."""

    flops: float = 0.4 * 989e12  # dense BF16
    node_bytes: float = 0.75 * 450e9  # a second, sent by one GPU over NVLink
    network_bytes: float = 0.8 * 50e9  # over InfiniBand, 400 Gbit/s a GPU
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Cost:
    """Seconds of a step."""

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
    bubble: float,
    machine: Machine,
) -> Cost:
    """`traffic`: bytes that a rank sends in a step, by axis."""
    tokens = work.tokens * work.micro_batches_per_step  # of a model replica
    share = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    share *= parallel.pipeline_model_parallel_size
    shape = config.resolved_model()
    flops = _flops_per_token(shape, work.longest, active_parameters)
    compute = flops * _passes(config, work) * tokens / share / machine.flops
    rates = axis_rates(parallel, machine)
    exchange = sum(traffic[axis] / rates[axis] for axis in ("tp", "ep", "etp", "cp"))
    busy = compute + exchange
    update = sum(traffic[axis] / rates[axis] for axis in ("dp", "edp", "pp"))
    return Cost(compute, exchange, busy * bubble / (1 - bubble), update)


def _flops_per_token(shape: ModelShape, length: int, active_parameters: int) -> float:
    """Of a forward pass: two a weight, and attention over half of the sequence on average."""
    outside = shape.hidden_size * (shape.vocab_size or 0)  # looked up, not multiplied
    attention = 2 * shape.num_layers * shape.num_attention_heads * shape.kv_channels * length
    return 2.0 * (active_parameters - (0 if shape.tie_embeddings else outside)) + attention


def _passes(config: AnyConfig, work: Workload) -> float:
    """Forward passes' worth of work in a step, of each token: a backward pass counts two."""
    passes = 4.0 if config.training.recompute == "full" else 3.0
    return passes + work.forward_only / work.micro_batches_per_step


def axis_rates(parallel: ResolvedParallel, machine: Machine) -> dict[str, float]:
    """Bytes a second along each axis. Megatron-Core numbers ranks tp first, then cp, dp, pp, and
    for the experts etp, then ep, edp, pp."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    etp, ep = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    dp, edp = parallel.data_parallel_size, parallel.expert_data_parallel_size
    extent = {"tp": tp, "cp": tp * cp, "etp": etp, "ep": etp * ep}
    extent |= {"dp": tp * cp * dp, "edp": etp * ep * edp, "pp": parallel.world_size}
    return {
        axis: machine.node_bytes if ranks <= machine.gpus_per_node else machine.network_bytes
        for axis, ranks in extent.items()
    }
