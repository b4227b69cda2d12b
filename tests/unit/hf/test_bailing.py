"""Ling 2, for which transformers has no class. Our model is compared with formulas in this
file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.hf.policies import config_of, greedy, logits_of, policy_of
from tests.unit.hf.published import VOCABULARY, model_config, random_tensors, write_folder

pytestmark = pytest.mark.usefixtures("one_rank")
TOLERANCE = 1e-5  # for fp32 logits of magnitude 3 to 5; the largest observed error was 2e-6

VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_qkv_bias": True, "use_qk_norm": False, "partial_rotary_factor": 1.0},
    {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "num_shared_experts": 0},
    {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3]]


def logits_by_hand(config: dict[str, Any], tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The logits [length, vocabulary] in float64. tensors: the contents of the model's file."""
    named = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    hidden = named["word_embeddings.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        start = f"layers.{number}."
        layer = {n.removeprefix(start): t for n, t in named.items() if n.startswith(start)}
        normed = rms_norm(hidden, layer["input_layernorm.weight"], config)
        hidden = hidden + attention(normed, layer, config)
        normed = rms_norm(hidden, layer["post_attention_layernorm.weight"], config)
        if number < config["first_k_dense_replace"]:
            hidden = hidden + mlp(normed, layer, "mlp.")
        else:
            hidden = hidden + torch.stack([mixture(row, layer, config) for row in normed])
    return rms_norm(hidden, named["norm.weight"], config) @ named["lm_head.weight"].T


def rms_norm(states: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    mean = states.square().mean(-1, keepdim=True)
    return weight * states / (mean + config["rms_norm_eps"]).sqrt()


def attention(hidden: Tensor, layer: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    width, length = config["head_dim"], len(hidden)
    mixed = hidden @ layer["attention.query_key_value.weight"].T
    mixed = mixed + layer.get("attention.query_key_value.bias", 0.0)
    q, k, v = mixed.view(length, -1, width).split([heads, keys, keys], dim=1)
    if config["use_qk_norm"]:
        q = rms_norm(q, layer["attention.query_layernorm.weight"], config)
        k = rms_norm(k, layer["attention.key_layernorm.weight"], config)
    q, k = rotate(q, config), rotate(k, config)
    out = []
    for head in range(heads):
        group = head // (heads // keys)
        scores = q[:, head] @ k[:, group].T / width**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ v[:, group])
    return torch.cat(out, dim=-1) @ layer["attention.dense.weight"].T


def rotate(states: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotate the first channels of each head, in two halves. states: [length, heads, width]."""
    turned = int(config["head_dim"] * config["partial_rotary_factor"])
    powers = torch.arange(0, turned, 2, dtype=torch.float64) / turned
    angles = torch.arange(len(states))[:, None] / config["rope_theta"] ** powers
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high, rest = states.split([turned // 2, turned // 2, config["head_dim"] - turned], -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def mlp(hidden: Tensor, layer: dict[str, Tensor], start: str) -> Tensor:
    gate, up, down = (layer[f"{start}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T


def mixture(hidden: Tensor, layer: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The MoE layer's output for one token [hidden]."""
    scores = (layer["mlp.gate.weight"] @ hidden).sigmoid()
    groups = (scores + layer["mlp.gate.expert_bias"]).view(config["n_group"], -1)
    worth = groups.topk(2).values.sum(-1)
    outside = torch.ones(len(groups)).bool()
    outside[worth.topk(config["topk_group"]).indices] = False
    allowed = groups.masked_fill(outside[:, None], -torch.inf).flatten()
    chosen = allowed.topk(config["num_experts_per_tok"]).indices.tolist()
    weights = scores[chosen] * config["routed_scaling_factor"]
    if len(chosen) > 1:  # the published code does not normalise the score of an only expert
        weights = weights / scores[chosen].sum()
    out = torch.zeros_like(hidden)
    for weight, expert in zip(weights, chosen):
        out = out + weight * mlp(hidden, layer, f"mlp.experts.{expert}.")
    if config["num_shared_experts"]:
        out = out + mlp(hidden, layer, "mlp.shared_experts.")
    return out


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = model_config("bailing_moe_v2", **changes)
    tensors = random_tensors(config, seed=4)
    policy = policy_of(config_of(write_folder(tmp_path / "ling", config, tensors)))
    draw = random.Random(4)
    ids = [draw.randrange(VOCABULARY) for _ in range(23)]
    expected = logits_by_hand(config, tensors, ids)
    assert expected.abs().max() > 1
    assert (logits_of(policy, ids) - expected).abs().max() < TOLERANCE
    # The rollout engine decodes with a cache, one token at a time.
    for prompt, said in zip(PROMPTS, greedy(policy, PROMPTS, count=12)[0], strict=True):
        logits = logits_by_hand(config, tensors, prompt + said)
        assert said == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
