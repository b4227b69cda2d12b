"""What routers choose and how they weigh it, by loops and autograd, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EXPERTS, TOP_K = 8, 4

# Arguments of topk_routing_with_score_function, as TransformerConfig's fields would give them.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid with expert bias": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(0.2, -0.2, EXPERTS),
        "scaling_factor": 2.5,
    },
    "limited groups": {"num_groups": 4, "group_topk": 2},
    "sigmoid, bias, limited groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-0.1, 0.1, EXPERTS),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 1.5,
    },
}


def chosen_experts(logits: Tensor, router: dict[str, Any]) -> list[list[int]]:
    """The k experts of each token, sorted by number."""
    scores = selection_scores(logits, router)
    return [best_experts(row.tolist(), router) for row in scores]


def selection_scores(logits: Tensor, router: dict[str, Any]) -> Tensor:
    """[tokens, experts]: of these a router takes the largest."""
    if router.get("score_function") == "sigmoid":
        scores = torch.sigmoid(logits)
        return scores + router["expert_bias"] if "expert_bias" in router else scores
    return torch.softmax(logits, dim=-1) if router.get("use_pre_softmax") else logits


def best_experts(scores: Sequence[float], router: dict[str, Any]) -> list[int]:
    """Of one token's `selection_scores`, sorted by number."""
    allowed = list(range(EXPERTS))
    if router.get("group_topk"):
        size, each = EXPERTS // router["num_groups"], TOP_K // router["group_topk"]
        groups = [allowed[start : start + size] for start in range(0, EXPERTS, size)]
        worth = [sum(sorted((scores[e] for e in group), reverse=True)[:each]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -worth[g])[: router["group_topk"]]
        allowed = [expert for g in best for expert in groups[g]]
    return sorted(sorted(allowed, key=lambda e: -scores[e])[:TOP_K])


def gate_weights(logits: Tensor, experts: Tensor, router: dict[str, Any]) -> Tensor:
    """[tokens, experts]: the weights of the given experts [tokens, k], 0 elsewhere. Differentiable
    in the logits."""
    rows = []
    for row, chosen in zip(logits, experts.tolist()):
        if router.get("score_function") == "sigmoid":
            scores = torch.stack([torch.sigmoid(row[e]) for e in chosen])
            scores = scores / (scores.sum() + 1e-20)
        elif router.get("use_pre_softmax"):
            scores = torch.stack([row[e].exp() for e in chosen]) / row.exp().sum()
        else:
            scores = torch.stack([row[e].exp() for e in chosen])
            scores = scores / scores.sum()
        scores = scores * router.get("scaling_factor", 1.0)
        weights = dict(zip(chosen, scores))
        rows.append(torch.stack([weights.get(e, row.new_zeros(())) for e in range(EXPERTS)]))
    return torch.stack(rows)
