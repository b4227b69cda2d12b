"""Which layers of Qwen's MoE models have experts: two keys of config.json together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read(hf: Mapping[str, Any]) -> list[bool]:
    """A layer has experts unless `mlp_only_layers` names it or `decoder_sparse_step` skips it."""
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    some = (hf.get("num_experts") or hf.get("num_local_experts") or 0) > 0
    return [
        some and layer not in dense and (layer + 1) % step == 0
        for layer in range(hf["num_hidden_layers"])
    ]


def write(experts: list[bool]) -> dict[str, Any]:
    dense = [layer for layer, has_experts in enumerate(experts) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
