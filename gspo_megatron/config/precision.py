"""The values of `training.precision`: Megatron-Core's fields, and requirements on the hardware.

FP8 is used for the matrix products of the transformer layers, forward and backward. Weights stay
bf16, with fp32 gradients and optimizer. The router, the norms, attention and the log-prob head
compute as with bf16. The head's inputs are bf16, and its logits and everything after them are fp32.
The gradients of the logits are rounded to bf16 for the two products of the backward pass.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp64", "fp32", "bf16", "fp8-delayed", "fp8-blockwise", "mxfp8"]

ENGINE_PACKAGE = "transformer-engine"
# The first version of Transformer Engine with blockwise scales, and with the scales of experts in
# the order of our checkpoints.
ENGINE_MINIMUM = (2, 3)


@dataclass(frozen=True)
class Fp8:
    """One of Transformer Engine's recipes."""

    recipe: str  # TransformerConfig.fp8_recipe
    format: str  # TransformerConfig.fp8: e4m3 everywhere, or hybrid, with e5m2 for gradients
    multiple: int  # must divide the numbers of tokens and features in FP8 products
    capability: tuple[int, int]  # the lowest that Transformer Engine supports for this recipe
    beyond: tuple[int, int] | None = None  # the first higher capability without support, if any
    cuda: tuple[int, int] = (12, 1)  # the lowest CUDA version of the torch build
    hardware: str = ""  # these requirements in words
    fields: dict[str, Any] = field(default_factory=dict)  # more defaults for TransformerConfig


FP8: dict[str, Fp8] = {
    "fp8-delayed": Fp8(
        recipe="delayed",
        format="hybrid",
        multiple=16,
        capability=(8, 9),
        hardware="an Ada, Hopper or newer GPU (compute capability 8.9)",
        # Transformer Engine's defaults; Megatron-Core's default uses only the last micro-batch
        fields={"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    ),
    "fp8-blockwise": Fp8(
        recipe="blockwise",
        format="e4m3",
        multiple=16,
        capability=(9, 0),
        cuda=(12, 9),
        hardware="a Hopper or newer GPU (compute capability 9.0), and torch for CUDA 12.9 or newer",
    ),
    "mxfp8": Fp8(
        recipe="mxfp8",
        format="e4m3",
        multiple=32,
        capability=(10, 0),
        beyond=(12, 0),
        hardware="a Blackwell GPU for data centres (compute capability 10.x)",
    ),
}


def base_precision(precision: str) -> str:
    """Return the precision of weights and activations outside of FP8: fp64, fp32 or bf16."""
    return "bf16" if precision in FP8 else precision


def megatron_fields(precision: str) -> dict[str, Any]:
    """Return the fields of TransformerConfig for a precision; `model.megatron` overrides them."""
    fp8 = FP8.get(precision)
    return {} if fp8 is None else {"fp8": fp8.format, "fp8_recipe": fp8.recipe, **fp8.fields}


def tokens_multiple(precision: str) -> int:
    """Return the multiple to which the tokens of each tensor-parallel rank are padded."""
    return FP8[precision].multiple if precision in FP8 else 1


def device_lacks(
    precision: str, capability: tuple[int, int], cuda: tuple[int, int] | None
) -> str | None:
    """Return in words what a GPU lacks for a precision, or None if it lacks nothing.

    capability: the GPU's compute capability; cuda: the version that torch was built for, None
    without CUDA.
    """
    fp8 = FP8.get(precision)
    if fp8 is None:
        return None
    fits = fp8.capability <= capability and (fp8.beyond is None or capability < fp8.beyond)
    if fits and cuda is not None and cuda >= fp8.cuda:
        return None
    return f"needs {fp8.hardware}"


def engine_lacks() -> str | None:
    """Return in words what the installed Transformer Engine lacks for FP8, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine: pip install 'gspo-megatron[gpu]'"
    try:
        version = importlib.metadata.version(ENGINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        # The engine was built in place, as in NVIDIA's containers. Any version is accepted.
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < ENGINE_MINIMUM:
        minimum = ".".join(map(str, ENGINE_MINIMUM))
        return f"needs Transformer Engine {minimum} or newer, and {version} is installed"
    return None
