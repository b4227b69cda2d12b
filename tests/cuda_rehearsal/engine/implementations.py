"""The functions and classes of Transformer Engine that the stand-in implements, by their names."""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda_rehearsal.engine import attention, experts, layers, optimizers, precision, recompute


class QuantizedTensor(torch.Tensor):
    """The class of weights that are stored in FP8. No run of the package has such weights."""


class Float8Tensor(QuantizedTensor):
    pass


class MXFP8Tensor(QuantizedTensor):
    pass


class NVFP4Tensor(QuantizedTensor):
    pass


def _names(owner: Any, prefix: str, *names: str) -> dict[str, Any]:
    return {f"{prefix}.{name}": getattr(owner, name) for name in names}


IMPLEMENTATIONS: dict[str, Any] = {
    **_names(
        layers,
        "pytorch",
        "Linear",
        "LayerNormLinear",
        "GroupedLinear",
        "RMSNorm",
        "LayerNorm",
        "Fp8Padding",
        "Fp8Unpadding",
    ),
    "pytorch.module.base.TransformerEngineBaseModule": layers.TransformerEngineBaseModule,
    "pytorch.DotProductAttention": attention.DotProductAttention,
    "pytorch.attention.rope.apply_rotary_pos_emb": attention.apply_rotary_pos_emb,
    **_names(
        experts,
        "pytorch.permutation",
        "moe_permute",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ),
    **_names(
        experts,
        "pytorch.router",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
    **_names(optimizers, "pytorch.optimizers", "FusedAdam", "multi_tensor_applier"),
    **_names(recompute, "pytorch.distributed", "checkpoint", "CudaRNGStatesTracker"),
    "pytorch.cpu_offload.get_cpu_offload_context": recompute.get_cpu_offload_context,
    **_names(precision, "pytorch.fp8", "FP8GlobalStateManager", "fp8_autocast"),
    "pytorch.fp8_autocast": precision.fp8_autocast,
    "pytorch.autocast": precision.autocast,
    "pytorch.cpp_extensions.general_gemm": layers.general_gemm,
    **_names(
        precision,
        "common.recipe",
        "Format",
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
    ),
    "pytorch.tensor.QuantizedTensor": QuantizedTensor,
    "pytorch.float8_tensor.Float8Tensor": Float8Tensor,
    "pytorch.tensor.float8_tensor.Float8Tensor": Float8Tensor,
    "pytorch.tensor.mxfp8_tensor.MXFP8Tensor": MXFP8Tensor,
    "pytorch.tensor.nvfp4_tensor.NVFP4Tensor": NVFP4Tensor,
}
# Names of the compiled part. Its functions have no signatures in Python, so the tables do not
# contain these names.
COMPILED: dict[str, Any] = {
    **_names(optimizers, "pytorch.optimizers", "multi_tensor_l2norm", "multi_tensor_scale"),
}
