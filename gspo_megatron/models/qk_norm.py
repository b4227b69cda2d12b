"""RMSNorm of queries or keys over all heads together, where Megatron-Core's is over one head."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class QKNorm(torch.nn.Module):
    """Normalises [..., heads / TP, dim] by the mean square over all heads, as OLMoE does.

    The heads are cut over the tensor-parallel ranks; what crosses them is one sum of squares a
    token. The weight [heads * dim] is whole on every rank, because Megatron-Core adds up the
    gradients of all that is called q_layernorm or k_layernorm over these ranks: each adds what its
    own heads give. Computed in fp32, as the other norms.
    """

    heads_field = ""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.heads = getattr(config, self.heads_field)  # on all ranks
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(self.heads * hidden_size, **kind))

    def forward(self, states: Tensor) -> Tensor:
        wide = states if states.dtype == torch.float64 else states.float()
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        weight = self.weight.view(self.heads, -1)
        if self.tp_group.size() > 1:
            # the sum is everyone's, forward; so is its gradient, backward
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
            weight = weight.chunk(self.tp_group.size())[self.tp_group.rank()]
        scale = torch.rsqrt(squares / self.weight.numel() + self.eps)
        return weight * (wide * scale).to(states.dtype)


class JointQueryNorm(QKNorm):
    heads_field = "num_attention_heads"


class JointKeyNorm(QKNorm):
    heads_field = "num_query_groups"
