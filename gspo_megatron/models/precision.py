"""Whether this rank's layers and device can compute in the precision that is configured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from gspo_megatron.config.precision import FP8, device_lacks, engine_lacks
from gspo_megatron.config.problems import problem
from gspo_megatron.errors import UserError
from gspo_megatron.platform.devices import built_for_cuda


def refuse_impossible(precision: str, backend: str) -> None:
    """Raise UserError, in one line, where FP8 is wanted and the layers or the device have none."""
    if precision not in FP8:
        return
    if backend != "transformer_engine":
        reason = (
            (engine_lacks() or "needs a CUDA device")
            if not torch.cuda.is_available()
            else f"model.backend is {backend} here, which has no FP8: set transformer_engine"
        )
        raise UserError(problem("training.precision", precision, f"{reason}; legal: fp32 or bf16"))
    reason = engine_lacks() or device_lacks(
        precision, torch.cuda.get_device_capability(), built_for_cuda()
    )
    if reason is not None:
        name = torch.cuda.get_device_name()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise UserError(
            problem(
                "training.precision",
                precision,
                f"{reason}; this is a {name} ({capability}) with torch for CUDA "
                f"{torch.version.cuda}; legal: bf16",
            )
        )


@contextlib.contextmanager
def without_fp8(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let a policy's chunks compute in bf16.

    Decoding has one row a sequence, of which FP8 matrix products would take multiples of 16 or 32
    only; and the weights that are exported in the end are bf16. Transformer Engine's scales are
    left as they are. Megatron-Core looks at the field anew in every forward pass.
    """
    found = (m.config for model in models for m in model.modules() if hasattr(m, "config"))
    configs = {id(config): config for config in found if getattr(config, "fp8", None)}
    formats = {key: config.fp8 for key, config in configs.items()}
    padded = [c for c in configs.values() if getattr(c, "moe_router_padding_for_quantization", 0)]
    for config in configs.values():
        config.fp8 = None
    for config in padded:
        config.moe_router_padding_for_quantization = False
    try:
        yield
    finally:
        for key, config in configs.items():
            config.fp8 = formats[key]
        for config in padded:
            config.moe_router_padding_for_quantization = True
