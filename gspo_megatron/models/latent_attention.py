"""Multi-head latent attention (DeepSeek's MLA) with a key/value cache for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.models.attention import KeyValueCache
from gspo_megatron.models.norms import TorchNorm, sum_gradients_over_tp
from gspo_megatron.models.shared_prompts import RotaryAngles

_RESOLVED = (
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "q_layernorm",
    "kv_layernorm",
)
# The value in DeepSeek's models and in transformers, independent of rms_norm_eps.
LATENT_EPSILON = 1e-6


class CachedLatentAttention(MLASelfAttention):
    """Megatron-Core's MLASelfAttention, which decodes while a cache is attached.

    The cache holds keys and values of all heads. This cache takes more memory than a cache of the
    latents, but needs no second implementation of attention.
    """

    key_value_cache: KeyValueCache | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = RotaryAngles(self.rotary_pos_emb)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if isinstance(getattr(self, name, None), ColumnParallelLinear):
                setattr(self, name, ReplicatedLinear(getattr(self, name), self.config))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the layers of the torch_native backend's spec unchanged.

        Megatron-Core 0.19 calls this method to decide which layers it builds. The stock method
        would add a norm to queries without a latent, but no model has a norm there."""
        if submodules.kv_layernorm is not LatentNorm:
            return super()._resolve_qk_norm_config(submodules)
        return {name: getattr(submodules, name) for name in _RESOLVED}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        cache = self.key_value_cache
        if cache is None:
            return super().forward(hidden_states, *args, **kwargs)
        self.rotary_pos_emb.angles = cache.angles
        try:
            query, key, value = self.get_query_key_value_tensors(hidden_states)[:3]
        finally:
            self.rotary_pos_emb.angles = None
        scale = self.softmax_scale
        return self.linear_proj(cache.attend(self.layer_number, query, key, value, scale))


class LatentNorm(TorchNorm):
    """The norms of the latents, which have their own epsilon."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)


class ReplicatedLinear(torch.nn.Module):
    """The projection down to the latent, replicated on every tensor-parallel rank.

    Under sequence parallelism each rank projects its own tokens, as with Transformer Engine's
    layers. Megatron-Core's fallback for other backends shards the latent and gathers it again. The
    heads of all ranks share the positional part of the keys. With the fallback, the gradient of
    this part would come from the heads of one rank only.
    """

    def __init__(self, replaced: ColumnParallelLinear, config: TransformerConfig) -> None:
        super().__init__()
        shape = (replaced.output_size, replaced.input_size)
        self.weight = torch.nn.Parameter(replaced.weight.new_empty(shape).detach())
        sum_gradients_over_tp([self.weight], config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        # The input is flattened to one matrix. Otherwise torch multiplies token by token if the
        # weight is frozen, and rounds differently than for a trained weight.
        rows = F.linear(hidden.flatten(0, -2), self.weight)
        return rows.view(*hidden.shape[:-1], -1), None

    def backward_dw(self) -> None:
        """Do nothing, because this layer does not delay the gradients of its weights."""
