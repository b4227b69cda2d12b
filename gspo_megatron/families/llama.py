"""LlamaForCausalLM (Llama 2 to 3.3, and models of their shape): dense."""

from __future__ import annotations

from gspo_megatron.families import family as f
from gspo_megatron.families.rope import DEFAULT, LLAMA3, RopeKinds

FAMILY = f.Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(*f.SIZES, f.key_value_heads(None), f.Field("head_dim", "kv_channels", None)),
    always={"qk_layernorm": False, "add_qkv_bias": False},
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    rope=RopeKinds((DEFAULT, LLAMA3)),
    max_position_embeddings=2048,
    names={**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.DENSE},
)
