"""What keys beside model.hf_path may not say: the folder's weights have one shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gspo_megatron.config.problems import format_value, problem
from gspo_megatron.config.shape import ModelShape, shape_conflicts, start_of_shape

if TYPE_CHECKING:
    from gspo_megatron.config.schema import ModelSection


def hf_problems(model: ModelSection, shape: ModelShape) -> Iterator[str]:
    """Keys of the `model` section that contradict the folder's config.json."""
    if model.hf_path is None:
        return
    usual = type(model).model_fields["preset"].default
    if model.preset != usual:
        yield problem(
            "model.preset",
            model.preset,
            f"model.hf_path = {format_value(model.hf_path)} decides the shape; legal: leave one "
            "of them out",
        )
    for key, ours, theirs in shape_conflicts(shape, start_of_shape(model)):
        yield problem(
            f"model.{key}",
            ours,
            f"the weights in model.hf_path = {format_value(model.hf_path)} have "
            f"{format_value(theirs)}; legal: leave it out",
        )
