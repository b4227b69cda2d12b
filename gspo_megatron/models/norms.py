"""RMSNorm and LayerNorm of the torch_native backend."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as `config.normalization` says.

    Megatron-Core's own torch norm refuses sequence parallelism, which tensor parallelism with
    experts demands. All it takes is a mark on the weights: their gradients are partial sums over
    the tensor-parallel ranks' tokens, and `finalize_model_grads` adds up what bears the mark.
    The normalisation itself runs in fp32, as Transformer Engine's does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        assert config.normalization in ("RMSNorm", "LayerNorm")
        self.eps = eps
        self.centered = config.normalization == "LayerNorm"
        # (1 + weight) keeps weight decay from shrinking the scale; a checkpoint stores the offset
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        start = 0.0 if self.zero_centered else 1.0
        device = torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), start, **kind))
        self.weight.sequence_parallel = config.sequence_parallel
        if self.centered:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **kind))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1.0 if self.zero_centered else self.weight
        if self.centered:
            shape = (hidden.shape[-1],)
            return torch.nn.functional.layer_norm(hidden, shape, weight, self.bias, self.eps)
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), weight, self.eps)
