"""The scales of FP8 matrix products as boxes of global tensors, whatever the layout.

Under delayed scaling the next micro-batch is scaled by the largest values of earlier ones: a run
that goes on needs them. (Blockwise scaling and MXFP8 scale by the tensor at hand and keep nothing.)
Transformer Engine's own form, `_extra_state`, is a pickle a module: newer versions refuse to read
it, it is empty after a forward pass in bf16, such as a rollout's, and Megatron-Core cuts the scales
of an expert out of it in an order that versions since 2.3 do not have. So the tensors themselves
are stored; only their places are those of Megatron-Core's sharded state dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor, nn

from gspo_megatron.checkpoint.storage import Piece
from gspo_megatron.models.build import Policy

_EXTRA_STATE = "_extra_state"
_DIRECTIONS = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}
_TENSORS = ("scale", "amax_history")


def keeps_scales(policy: Policy) -> bool:
    """Whether matrix products are scaled by earlier micro-batches."""
    return bool(policy.config.fp8) and policy.config.fp8_recipe == "delayed"


def scale_pieces(policy: Policy, *, originals_only: bool) -> list[Piece]:
    """Scales and histories of all matrix products of this rank, as they are; those of modules that
    have not computed yet are made first. Empty where nothing is kept.

    Every rank of a pipeline stage has the same: Transformer Engine takes the largest values over
    all of them. `originals_only`: of copies, the first rank's alone.
    """
    if not keeps_scales(policy):
        return []
    recipe = get_fp8_recipe(policy.config)
    found: list[Piece] = []
    for model in policy.models:
        entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for name, entry in entries.items():
            # a module with an expert's weights each has more of them, ..._extra_state1 and so on
            if not (isinstance(entry, ShardedObject) and name.endswith(_EXTRA_STATE)):
                continue
            module = model.get_submodule(name.removesuffix(f".{_EXTRA_STATE}"))
            if not _multiplies(module) or (originals_only and any(entry.replica_id)):
                continue
            _initialise(module, recipe)
            key = entry.key.removesuffix(f".{_EXTRA_STATE}")
            found += boxes_of(module, key, entry.global_offset[-1], entry.global_shape[-1])
    return found


def boxes_of(module: Any, key: str, first: int, total: int) -> Iterator[Piece]:
    """What one module keeps; `first` is the number of its first expert among `total`, 0 of 1 where
    it is not one of experts.

    Transformer Engine holds [tensors] and [history, tensors], where the tensors are an expert's
    input, weight and output (backward: the two gradients), then the next expert's.
    """
    experts = module.fp8_meta["num_gemms"]
    for direction, state in _DIRECTIONS.items():
        for name in _TENSORS:
            tensor: Tensor = getattr(module.fp8_meta[state], name)
            rows = tensor.shape[:-1]  # of the history; none for the scale
            data = tensor.view(*rows, experts, -1)
            yield Piece(
                f"fp8.{name}_{direction}.{key}",
                data,
                (*rows, total, data.shape[-1]),
                (*(0 for _ in rows), first, 0),
            )


def _multiplies(module: nn.Module) -> bool:
    """Not attention, whose products are no FP8 ones."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"Linear", "LayerNormLinear", "GroupedLinear"}) and hasattr(
        module, "fp8_meta"
    )


def _initialise(module: Any, recipe: Any) -> None:
    """Allocate the scales, as the module's first forward pass would."""
    if "scaling_bwd" in module.fp8_meta:
        return
    module.fp8_meta["recipe"] = recipe
    module.fp8_meta["num_gemms"] = getattr(module, "num_gemms", 1)
    module.init_fp8_meta_tensors(recipe)
