"""Estimates the bytes that a rank sends in a training step, and the time of the step. Layouts are
ordered by this time.

Rough model of a step's seconds:

    compute   FLOPs of all passes, with attention, at a fixed share of a GPU's peak
    exchange  bytes sent along tp, ep, etp and cp, at NVLink's rate if the group is inside a node,
              else at the network's rate
    bubble    (compute + exchange) * idle share / (1 - idle share)
    update    gradients and weights over dp and edp, activations over pp, at the same rates

The model leaves out the items of LEFT_OUT, message sizes, rollouts, evaluations and file systems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from gspo_megatron.config import ResolvedParallel
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.estimate.activations import ChunkPass
from gspo_megatron.estimate.model import EXPERTS, RankModel, StateBytes, frozen_bytes
from gspo_megatron.estimate.workload import Workload, bubble_share
from gspo_megatron.families.model_shape import (
    ModelShape,
    delta_net_layers,
    delta_net_sizes,
    windows_in_layers,
)
from gspo_megatron.models.delta_rule import CHUNK
from gspo_megatron.platform.megatron_meta import Collective

AXES = ("tp", "pp", "ep", "etp", "cp", "dp", "edp")


def step_traffic(
    model: RankModel, state: StateBytes, passes: list[ChunkPass], work: Workload
) -> dict[str, int]:
    """Return the bytes that the rank sends in a step, by axis.

    The bytes include all mini-batches, and the forward passes of the old policy and the reference
    policy, but not the rollout. In a group of n ranks, a rank sends (n - 1) / n of a gather's
    output, a scatter's input or an all-to-all's buffer, and twice as much for an all-reduce.
    """
    traffic: Counter[str] = Counter(dict.fromkeys(AXES, 0))
    forward, training = work.forward_only, work.micro_batches_per_step
    for each in passes:
        for axis, sent in _sent(model, each.forward).items():
            traffic[axis] += sent * (forward + training)
        for axis, sent in _sent(model, each.backward).items():
            traffic[axis] += sent * training
    parallel = model.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages > 1:
        # Hidden states go to the next stage, their gradients to the previous stage.
        hidden = max(max(each.output_bytes, each.input_bytes) for each in passes)
        # The model's last chunk sends no hidden states, and its first chunk no gradients.
        onward = len(passes) - (model.stage == stages - 1)
        back = len(passes) - (model.stage == 0)
        traffic["pp"] = hidden * (onward * (forward + training) + back * training)
    cp = parallel.context_parallel_size
    experts, frozen = parallel.expert_data_parallel_size, frozen_bytes(model.policy)
    for axis, size in (("dp", parallel.data_parallel_size * cp), ("edp", experts)):
        # In an update, each rank sends gradients to the ranks with their optimizer state, and gets
        # the trained weights back.
        kinds = [kind for kind in state.gradients if (kind == EXPERTS) == (axis == "edp")]
        num_bytes = sum(state.gradients[k] + state.parameters[k] - frozen[k] for k in kinds)
        traffic[axis] = num_bytes * (size - 1) // size * work.mini_batches
    return {axis: traffic[axis] for axis in AXES}


def _sent(model: RankModel, collectives: Iterable[Collective]) -> Counter[str]:
    """Return the bytes by axis. If the groups of two axes have the same ranks, the first axis gets
    the bytes of both. All all-to-alls belong to ep."""
    groups, axes = model.policy.models[0].pg_collection, {}
    for axis, attribute in (("tp", "tp"), ("cp", "cp"), ("etp", "expt_tp"), ("ep", "ep")):
        group = getattr(groups, attribute, None)
        if group is not None and group.size() > 1:
            axes.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
    sent: Counter[str] = Counter()
    for each in collectives:
        axis = "ep" if each.kind == "all_to_all" else axes.get(each.ranks)
        if axis is None:
            continue  # groups over several axes send only token counts and losses
        size = len(each.ranks)
        rounds = 2 if each.kind == "all_reduce" else 1
        sent[axis] += rounds * each.num_bytes * (size - 1) // size
    return sent


LEFT_OUT = (
    "overlap of communication and compute, latencies, matrix products too small to fill a GPU, "
    "uneven stages and experts"
)


# The assumed hardware is an H100 with its usual network. The factors are the shares of the peaks
# that training of such models reaches.
FLOPS = 0.4 * 989e12  # dense BF16
NODE_BYTES = 0.75 * 450e9  # bytes per second that one GPU sends over NVLink
NETWORK_BYTES = 0.8 * 50e9  # bytes per second over InfiniBand, 400 Gbit/s for each GPU
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
    # average, half of the sequence. An input embedding is a look-up without FLOPs.
    has_one = shape.tie_embeddings or shape.scores
    outside = 0 if has_one else shape.hidden_size * (shape.vocab_size or 0)
    kinds = delta_net_layers(shape)
    windows = windows_in_layers(shape.megatron, shape.num_layers)
    seen = sum(
        min(work.longest, 2 * (window or work.longest))
        for window, is_delta in zip(windows, kinds, strict=True)
        if not is_delta
    )
    attention = seen * shape.num_attention_heads * sum(shape.head_channels)
    flops = 2.0 * (active_parameters - outside) + attention + sum(kinds) * _delta_flops(shape)
    # Passes per token, in units of a forward pass. A backward pass counts as two, or as one if the
    # weights are frozen. Adapters have next to no FLOPs.
    passes = 2.0 if config.model.lora.rank else 3.0
    passes += config.training.recompute == "full"
    passes += work.forward_only / work.micro_batches_per_step
    compute = flops * passes * tokens / (sizes.tp * sizes.cp * sizes.pp) / FLOPS
    rates = axis_rates(parallel)
    exchange = work.filled * sum(traffic[a] / rates[a] for a in ("tp", "ep", "etp", "cp"))
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
