"""The routing of tokens to experts: scores, permutations, and the loss that balances experts."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, map_type: str
) -> tuple[Tensor, Tensor]:
    assert map_type == "mask", "the stand-in has no other map"
    rows, row_id_map, _ = _order(routing_map)
    return inp.index_select(0, rows), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, row_id_map, experts = _order(routing_map)
    return inp.index_select(0, rows), probs[rows, experts], row_id_map


def _order(routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make one row for each pair of a token and an expert that it goes to, ordered by expert.
    Returns the token of each row; the row of each token at each expert, or -1; and the expert of
    each row."""
    tokens, experts = routing_map.shape
    by_expert = routing_map.bool().t().contiguous().view(-1).nonzero()[:, 0]
    rows, of_experts = by_expert % tokens, by_expert // tokens
    row_id_map = torch.full(
        (tokens, 2 * experts + 1), -1, dtype=torch.int32, device=routing_map.device
    )
    places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    row_id_map[rows, of_experts] = places
    return rows, row_id_map, of_experts


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    restore_shape: torch.Size | None,
) -> Tensor:
    assert merging_probs is None, "Megatron-Core merges no probabilities here"
    places = row_id_map[:, : row_id_map.shape[1] // 2].long()
    rows = (places >= 0).nonzero()[:, 0]
    out = inp.new_zeros(restore_shape or inp.shape, dtype=torch.float32)
    picked = inp.index_select(0, places[places >= 0]).float()
    return out.index_add(0, rows, picked).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    found = [moe_sort_chunks_by_index(t, split_sizes, sorted_index) for t in (inp, probs)]
    return found[0], found[1]


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert not num_groups and not group_topk, "the stand-in has no groups of experts"
    values = logits.float()
    if score_function == "sigmoid":
        scores = values.sigmoid()
        biased = scores if expert_bias is None else scores + expert_bias
        chosen = biased.topk(topk, dim=1).indices
        scores = scores.gather(1, chosen)
        if topk > 1:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    elif use_pre_softmax:
        scores, chosen = values.softmax(-1).topk(topk, dim=1)
    else:
        scores, chosen = values.topk(topk, dim=1)
        scores = scores.softmax(-1)
    scores = scores * (scaling_factor or 1.0)
    probs = torch.zeros_like(values).scatter(1, chosen, scores).to(logits.dtype)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    values = logits.float()
    if score_function == "softmax":
        scores = values.softmax(-1)
    else:
        scores = values.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = scores.topk(topk, dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True), scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    total = int(total_num_tokens)
    shares = probs.float().sum(0) * tokens_per_expert
    return (shares.sum() * num_experts * coeff / (topk * total * total)).to(probs.dtype)
