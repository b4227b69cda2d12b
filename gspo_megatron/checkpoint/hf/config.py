"""The config.json of a model of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.checkpoint.hf.files_header import DTYPES
from gspo_megatron.config.families import describe, family_of, family_of_shape
from gspo_megatron.config.model_shape import ModelShape, shape_of
from gspo_megatron.errors import ConfigError

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def export_config(
    shape: ModelShape,
    vocab_size: int,
    dtype: str,
    original: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json for weights of this shape and dtype, by its name in safetensors files.

    `original` is that of the folder which the weights were imported from: what it says beyond the
    model's function is kept, and all of it where the model is still the one that it describes.

    Raises ConfigError for a model that the family, or any where there is no original, cannot have.
    """
    family = family_of_shape(shape) if original is None else family_of(original)
    made = family.config(shape, vocab_size)
    if made is None:
        raise ConfigError(
            [f"a model of this shape is none of the family {family.model_type} (any more)"]
        )
    if original is None:
        return {**made, "torch_dtype": DTYPES[dtype].name}
    if shape_of(describe(original)) == shape_of(describe(made)):
        config = dict(original)
    else:
        config = {key: value for key, value in original.items() if key not in _ROPE} | made
    kept = "dtype" if "dtype" in original else "torch_dtype"
    return {**config, kept: DTYPES[dtype].name}
