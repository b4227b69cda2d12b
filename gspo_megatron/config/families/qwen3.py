"""Qwen3ForCausalLM: the dense Qwen3 models."""

from __future__ import annotations

from gspo_megatron.config.families import family as f

FAMILY = f.Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(*f.SIZES, f.Field("head_dim", "kv_channels", 128)),
    always={"qk_layernorm": True, "add_qkv_bias": False},
    only={"attention_bias": (False,)},
    names={**f.EMBEDDINGS, **f.NORMS, **f.ATTENTION, **f.QK_NORMS, **f.DENSE},
)
