"""Advantages of responses relative to their group, the other responses to the same prompt.

`rewards` and `group_index` are [num_sequences] with whole groups in any order; group numbers need
not be consecutive. The result is float32 [num_sequences], computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives.custom import custom_advantages

# Rewards that are equal but for float32 rounding have no spread; dividing by what rounding left
# over would make advantages of +-1 out of nothing.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


def group_mean_std(
    rewards: Tensor, group_index: Tensor, std: Literal["sample", "population"] = "sample"
) -> Tensor:
    """(reward - mean of the group) / standard deviation of the group (GSPO paper, eq. 6).

    `std` "sample" divides by size - 1 (rewards 0.8, 0.4, 0.6 give 1, -1, 0), "population" by size
    (1.22, -1.22, 0). No epsilon is added. A group without spread has advantages of exactly 0.
    """
    assert std in ("sample", "population"), f"std {std!r}"
    groups, sizes, has_spread = _groups(rewards, group_index)
    centred = _centre(rewards, groups, sizes)
    squares = _sum(centred.square(), groups, len(sizes))
    degrees = sizes - 1 if std == "sample" else sizes
    deviation = (squares / degrees.clamp_min(1)).sqrt()
    # Groups without spread are left out below; 1 keeps the division free of 0/0.
    deviation = deviation.where(has_spread, 1.0)
    return (centred / deviation[groups]).where(has_spread[groups], 0.0).float()


def group_mean(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean of the group (Dr. GRPO, arXiv 2503.20783); exactly 0 without spread."""
    return _centred_or_zero(rewards, group_index).float()


def batch_std(
    rewards: Tensor, group_index: Tensor, std: Literal["sample", "population"] = "sample"
) -> Tensor:
    """(reward - mean of the group) / standard deviation of all rewards of the step: groups that
    are nearly all right or all wrong are not blown up (arXiv 2508.08221)."""
    assert std in ("sample", "population"), f"std {std!r}"
    centred = _centred_or_zero(rewards, group_index)
    rewards = rewards.double()
    if not centred.any():  # no group has a spread: perhaps the batch has none either
        return centred.float()
    return (centred / rewards.std(correction=1 if std == "sample" else 0)).float()


def leave_one_out(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean of the group's other rewards (RLOO, arXiv 2402.14740); exactly 0 without
    spread, and in a group of one."""
    groups, sizes, has_spread = _groups(rewards, group_index)
    factor = sizes / (sizes - 1).clamp_min(1)
    advantages = _centre(rewards, groups, sizes) * factor[groups]
    return advantages.where(has_spread[groups], 0.0).float()


def build_advantages(section: ObjectiveSection) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of (rewards, group_index) that the configuration asks for.

    Raises UserError where one of the user's own cannot be loaded or returns what is none.
    """
    if section.advantage_import_path is not None:
        return custom_advantages(section.advantage_import_path)
    name = resolve_objective(section).advantage
    if name == "group_mean_std":
        return partial(group_mean_std, std=section.advantage_std)
    if name == "batch_std":
        return partial(batch_std, std=section.advantage_std)
    return {"group_mean": group_mean, "leave_one_out": leave_one_out}[name]


def zero_spread_groups(rewards: Tensor, group_index: Tensor) -> Tensor:
    """[2] float64: how many groups have no spread, and thus no gradient, of how many groups."""
    _, sizes, has_spread = _groups(rewards, group_index)
    return torch.stack([(~has_spread).sum().double(), sizes.new_tensor(len(sizes))])


def _centred_or_zero(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean of the group in float64; exactly 0 without spread."""
    groups, sizes, has_spread = _groups(rewards, group_index)
    return _centre(rewards, groups, sizes).where(has_spread[groups], 0.0)


def _groups(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Consecutive group number of each sequence; size and whether there is a spread, by group."""
    assert rewards.dim() == 1 and rewards.shape == group_index.shape, (
        f"rewards {tuple(rewards.shape)}, group_index {tuple(group_index.shape)}"
    )
    numbers, groups, sizes = group_index.unique(return_inverse=True, return_counts=True)
    rewards = rewards.double()
    extremes = rewards.new_empty(len(numbers))
    highest = extremes.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    lowest = extremes.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    magnitude = torch.maximum(highest.abs(), lowest.abs())
    return groups, sizes.double(), highest - lowest > _ROUNDING * magnitude


def _centre(rewards: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    rewards = rewards.double()
    return rewards - (_sum(rewards, groups, len(sizes)) / sizes)[groups]


def _sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, groups, values)
