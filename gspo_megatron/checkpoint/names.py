"""One name for a tensor, whatever layers the model is built of.

Checkpoints, and the map to Hugging Face's tensors, use the names of the torch_native backend. So a
run goes on where Transformer Engine is not installed, and the converter need not know which it was.
"""

from __future__ import annotations

import re

# Transformer Engine fuses norms into the linear layers that follow them, and keeps gate and up
# projection of an expert in one matrix.
_ALIASES = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(\w+)"), r".input_layernorm.\1"),
    (
        re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(\w+)"),
        r".self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(\w+)"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.mlp\.experts\.experts\.linear_fc([12])\.weight"), r".mlp.experts.weight\1"),
)


def native_name(name: str) -> str:
    """What the torch_native backend calls a tensor of either backend."""
    for pattern, ours in _ALIASES:
        name = pattern.sub(ours, name)
    return name


def is_one_matrix(name: str) -> bool:
    """Of a tensor's own name: whether gate and up projection of an expert are the halves of one
    matrix in it, [2 x ffn, hidden], which are [2, ffn, hidden] under the native name."""
    known = native_name(name)
    return known != name and ".experts.weight1" in known
