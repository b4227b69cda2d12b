"""Bytes that a rank sends in a training step, by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist

from gspo_megatron.estimate.activations import ChunkPass
from gspo_megatron.estimate.model import EXPERTS, RankModel, StateBytes
from gspo_megatron.estimate.workload import Workload
from gspo_megatron.platform.megatron_meta import Collective

AXES = ("tp", "pp", "ep", "etp", "cp", "dp", "edp")


def step_traffic(
    model: RankModel, state: StateBytes, passes: list[ChunkPass], work: Workload, stage: int
) -> dict[str, int]:
    """Of all mini-batches, and of the old policy's and the reference's pass where there are such;
    the rollout is not in it.

    A ring or a tree sends (n - 1) / n of a gather's output, of a scatter's input and of an
    all-to-all's buffer, and twice that of an all-reduce.
    """
    traffic: Counter[str] = Counter(dict.fromkeys(AXES, 0))
    forward, training = work.forward_only, work.micro_batches_per_step
    for each in passes:
        for axis, sent in _sent(model, each.forward).items():
            traffic[axis] += sent * (forward + training)
        for axis, sent in _sent(model, each.backward).items():
            traffic[axis] += sent * training
    traffic["pp"] = _between_stages(model, passes, forward, training, stage)
    parallel = model.parallel
    cp = parallel.context_parallel_size
    experts = parallel.expert_data_parallel_size
    for axis, size in (("dp", parallel.data_parallel_size * cp), ("edp", experts)):
        # an update: gradients to where their optimizer is, weights back from there
        kinds = [kind for kind in state.gradients if (kind == EXPERTS) == (axis == "edp")]
        num_bytes = sum(state.gradients[k] + state.parameters[k] for k in kinds)
        traffic[axis] = num_bytes * (size - 1) // size * work.mini_batches
    return {axis: round(traffic[axis]) for axis in AXES}


def _between_stages(
    model: RankModel, passes: list[ChunkPass], forward: int, training: int, stage: int
) -> int:
    """Hidden states to the next stage, and their gradients to the one before."""
    stages = model.parallel.pipeline_model_parallel_size
    if stages == 1:
        return 0
    hidden = max(max(each.output_bytes, each.input_bytes) for each in passes)
    chunks = len(passes)
    onward = chunks - (stage == stages - 1)  # the last chunk of all sends nothing on
    back = chunks - (stage == 0)
    return hidden * (onward * (forward + training) + back * training)


def _sent(model: RankModel, collectives: Iterable[Collective]) -> Counter[str]:
    axes = _axes(model)
    sent: Counter[str] = Counter()
    for each in collectives:
        axis = axes.get(each.ranks, "other")
        if each.kind == "all_to_all":
            axis = "ep"
        if axis == "other":
            continue  # token counts and losses over joined groups: a few numbers each
        size = len(each.ranks)
        rounds = 2 if each.kind == "all_reduce" else 1
        sent[axis] += rounds * each.num_bytes * (size - 1) // size
    return sent


def _axes(model: RankModel) -> dict[tuple[int, ...], str]:
    """The groups by their ranks. Where two of them have the same ranks, the first stands for
    both; all-to-alls are told apart by what they are."""
    groups = model.policy.models[0].pg_collection
    named = (("tp", "tp"), ("cp", "cp"), ("etp", "expt_tp"), ("ep", "ep"))
    axes: dict[tuple[int, ...], str] = {}
    for axis, attribute in named:
        group = getattr(groups, attribute, None)
        if group is not None and group.size() > 1:
            axes.setdefault(tuple(dist.get_process_group_ranks(group)), axis)
    return axes
