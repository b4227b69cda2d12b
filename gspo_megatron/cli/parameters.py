"""How many parameters a model has, from its shape alone."""

from __future__ import annotations

from gspo_megatron.config import ModelShape

# Each adds parameters that the plain formula leaves out.
_NOT_COUNTED = (
    "add_bias_linear",
    "add_qkv_bias",
    "attention_output_gate",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "mtp_num_layers",
    "multi_latent_attention",
)


def count_parameters(shape: ModelShape, vocab_size: int) -> tuple[int, int] | None:
    """All parameters, and those that take part in one token; None for shapes beyond the formula.

    Counts the vocabulary as it is, without the rows that padding adds.
    """
    megatron = shape.megatron
    if megatron.get("normalization") != "RMSNorm" or any(map(megatron.get, _NOT_COUNTED)):
        return None
    hidden, head = shape.hidden_size, shape.kv_channels
    matrices = 3 if megatron.get("gated_linear_unit") else 2
    attention = hidden * head * 2 * (shape.num_attention_heads + shape.num_query_groups)
    norms = 2 * hidden + (2 * head if megatron.get("qk_layernorm") else 0)
    outside = hidden * vocab_size * (1 if shape.tie_embeddings else 2) + hidden
    total = active = outside + shape.num_layers * (attention + norms)
    for has_experts in _layers_with_experts(shape):
        if not has_experts:
            total += (dense := matrices * hidden * shape.ffn_hidden_size)
            active += dense
            continue
        assert shape.num_moe_experts and shape.moe_router_topk and shape.moe_ffn_hidden_size
        expert = matrices * hidden * shape.moe_ffn_hidden_size
        shared = matrices * hidden * (shape.moe_shared_expert_intermediate_size or 0)
        router = hidden * shape.num_moe_experts
        total += router + shared + expert * shape.num_moe_experts
        active += router + shared + expert * shape.moe_router_topk
    return total, active


def _layers_with_experts(shape: ModelShape) -> list[bool]:
    """One flag a layer, from moe_layer_freq: every n-th from the first on, or a list of flags."""
    if shape.num_moe_experts is None:
        return [False] * shape.num_layers
    frequency = shape.megatron.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(shape.num_layers)]
    return [bool(flag) for flag in frequency]
