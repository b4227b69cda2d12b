"""Estimates the bytes that a rank sends in a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from gspo_megatron.estimate.activations import ChunkPass
from gspo_megatron.estimate.model import EXPERTS, RankModel, StateBytes, frozen_bytes
from gspo_megatron.estimate.workload import Workload
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
