"""Recipes of FP8, the region in which a recipe applies, and the rounding of a module's operands."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Format(enum.Enum):
    """The formats as pairs. The first number is the largest value of activations and weights, the
    second the largest value of gradients."""

    E2M1 = (6.0, 6.0)
    E4M3 = (448.0, 448.0)
    E5M2 = (57344.0, 57344.0)
    HYBRID = (448.0, 57344.0)


class Recipe:
    """A recipe, with the arguments of its call as attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


class DelayedScaling(Recipe):
    """A recipe with scales from the largest values in earlier steps."""

    def __init__(self, **fields: Any) -> None:
        fields.setdefault("fp8_format", Format.HYBRID)
        super().__init__(**fields)


class Float8CurrentScaling(Recipe):
    """A recipe with scales from the largest value of the whole tensor."""

    block = None


class Float8BlockScaling(Recipe):
    block = 128


class MXFP8BlockScaling(Recipe):
    block = 32


class State:
    """The scales and histories of a module's tensors, for the forward or the backward pass."""

    def __init__(self, recipe: DelayedScaling, tensors: int, largest: float) -> None:
        device = torch.cuda.current_device()
        self.recipe, self.largest = recipe, largest
        self.scale = torch.ones(tensors, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors, device=device)

    @torch.no_grad()
    def update(self, group: Any) -> None:
        """Set the scales by the largest values of this step, and begin a new row of the history."""
        if self.recipe.reduce_amax and group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(self.amax_history[0], op=dist.ReduceOp.MAX, group=group)
        rows = self.amax_history[:1] if self.recipe.amax_compute_algo != "max" else None
        amax = (self.amax_history if rows is None else rows).amax(0)
        scale = self.largest / amax / 2**self.recipe.margin
        self.scale.copy_(torch.where((amax > 0) & scale.isfinite(), scale, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()


class _Region:
    """The state of the process: the innermost region, and the states that must be updated."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the groups and modules of an earlier task, as if the process were new."""
        self.enabled = self.recomputing = self.is_first_module = False
        self.recipe: Any = None
        self.group: Any = None
        self.depth = 0
        # The states are in the order of the model's modules, which is the same on all ranks.
        self.states: dict[bool, dict[State, None]] = {True: {}, False: {}}


region = _Region()


class FP8GlobalStateManager:
    """The functions that Megatron-Core calls."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return region.enabled

    @staticmethod
    def get_fp8_recipe() -> Any:
        return region.recipe

    @staticmethod
    def get_fp8_group() -> Any:
        return region.group

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool) -> None:
        update_scales(forward)


def update_scales(forward: bool) -> None:
    """Update the scales of all modules that have computed in FP8 since the last update."""
    for state in list(region.states[forward]):
        state.update(region.group)
    region.states[forward].clear()


@contextlib.contextmanager
def fp8_autocast(enabled: bool, fp8_recipe: Any, fp8_group: Any) -> Iterator[None]:
    before = region.enabled, region.recipe, region.group
    region.enabled, region.recipe = enabled, fp8_recipe
    region.group = fp8_group or region.group
    region.is_first_module |= region.depth == 0
    region.depth += 1
    try:
        yield
    finally:
        region.depth -= 1
        if enabled and region.depth == 0 and torch.is_grad_enabled() and not region.recomputing:
            update_scales(True)
        region.enabled, region.recipe = before[:2]


def autocast(
    enabled: bool, recipe: Any, amax_reduction_group: Any
) -> contextlib.AbstractContextManager[None]:
    """The newer name of `fp8_autocast`."""
    return fp8_autocast(enabled, recipe, amax_reduction_group)


def quantized(tensor: Tensor, recipe: Any, state: State | None, index: int, largest: float) -> Any:
    """Round a tensor to FP8 and return it in its own dtype. `index`: the number of the tensor in
    the module."""
    if state is not None:
        scale = state.scale[index]
        if not region.recomputing and tensor.numel():
            slot = state.amax_history[0, index]
            slot.copy_(torch.maximum(slot, tensor.abs().amax().float()))
    elif not tensor.numel():
        return tensor
    elif recipe.block is None:
        scale = largest / tensor.abs().amax().float().clamp(min=1e-12)
    else:
        last = tensor.shape[-1]
        block = recipe.block if last % recipe.block == 0 else last
        blocks = tensor.float().unflatten(-1, (-1, block))
        scale = largest / blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        scale = scale.expand_as(blocks).flatten(-2)
    kind = torch.float8_e4m3fn if largest < 1000 else torch.float8_e5m2
    scaled = (tensor.float() * scale).clamp(-largest, largest)
    return (scaled.to(kind).float() / scale).to(tensor.dtype)
