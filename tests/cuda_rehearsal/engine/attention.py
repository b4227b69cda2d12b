"""Attention and rotary embedding by their formulas, one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda_rehearsal.engine.layers import TransformerEngineBaseModule, gather


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None,
        qkv_format: str,
        attn_mask_type: str,
        tp_size: int,
        tp_group: Any,
        layer_number: int | None,
        cp_group: Any,
        cp_comm_type: str,
        softmax_scale: float | None,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels,) * 2
        groups = num_gqa_groups or num_attention_heads
        self.num_gqa_groups_per_partition = groups // self.tp_size
        self.softmax_scale = softmax_scale or 1 / math.sqrt(self.channels[0])
        assert not attention_dropout, "the stand-in has no dropout"

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_format: str | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_q_padded: Tensor | None,
        attn_mask_type: str | None,
    ) -> Tensor:
        layers = (query_layer, key_layer, value_layer)
        is_causal = "causal" in (attn_mask_type or self.attn_mask_type)
        if (qkv_format or self.qkv_format) == "thd":
            assert cu_seqlens_q is not None
            starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            bounds = starts.tolist()
            out = self._packed(layers, list(zip(bounds, bounds[1:])), is_causal)
            return out.flatten(1)
        rows = range(query_layer.shape[1])  # the layout is sbhd
        parts = [layer.transpose(0, 1).flatten(0, 1) for layer in layers]
        length = query_layer.shape[0] * (1 if self.cp_group is None else self.cp_group.size())
        out = self._packed(parts, [(i * length, (i + 1) * length) for i in rows], is_causal)
        return out.unflatten(0, (len(rows), -1)).transpose(0, 1).flatten(2)

    def _packed(self, layers: Any, bounds: list[tuple[int, int]], is_causal: bool) -> Tensor:
        """Attention of packed [tokens, heads, dim]. With context parallelism, rank r has the chunks
        r and 2 * ranks - 1 - r of every sequence."""
        query, key, value = layers
        ranks = 1 if self.cp_group is None else self.cp_group.size()
        rank = 0 if ranks == 1 else self.cp_group.rank()
        tokens, out = len(query), query.new_zeros(*query.shape[:2], value.shape[-1])
        places = [_places(start, stop, ranks) for start, stop in bounds]
        mine = [place[rank] for place in places]
        if ranks > 1:
            key, value = gather(key, self.cp_group), gather(value, self.cp_group)
        pieces = []
        for (start, stop), of_ranks in zip(bounds, places):
            length = (stop - start) // ranks
            rows = slice(start // ranks, start // ranks + length)
            found = [torch.arange(rows.start, rows.stop) + r * tokens for r in range(ranks)]
            of_keys, columns = torch.cat(of_ranks), torch.cat(found).to(query.device)
            of_queries = of_ranks[rank]
            hidden = of_keys[None, :] > of_queries[:, None] if is_causal else None
            pieces.append(
                self._attend(query[rows], key[columns], value[columns], hidden, query.device)
            )
        assert sum(map(len, mine)) <= tokens
        joined = torch.cat(pieces) if pieces else out[:0]
        # Tokens after the last sequence are padding.
        return torch.cat([joined, out[len(joined) :]])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, device: torch.device
    ) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1).float() for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * self.softmax_scale
        if hidden is not None:
            scores = scores.masked_fill(hidden.to(device), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)


def _places(start: int, stop: int, ranks: int) -> list[Tensor]:
    """The positions of a sequence's tokens, for each rank."""
    positions = torch.arange(stop - start)
    if ranks == 1:
        return [positions]
    chunks = positions.chunk(2 * ranks)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotary embedding of [s, b, h, d] or [t, h, d]."""
    if tensor_format == "sbhd":
        return _turn(t, freqs[: len(t)], interleaved)
    assert cu_seqlens is not None
    bounds = cu_seqlens.tolist()
    places = [_places(a, b, cp_size)[cp_rank] for a, b in zip(bounds, bounds[1:])]
    positions = torch.cat(places).to(t.device)
    rest = t[len(positions) :]
    turned = _turn(t[: len(positions), None], freqs[positions], interleaved)[:, 0]
    return torch.cat([turned, rest])


def _turn(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    assert not interleaved, "the stand-in has no interleaved channels"
    size = freqs.shape[-1]
    turned, rest = t[..., :size].float(), t[..., size:]
    low, high = turned.chunk(2, -1)
    turned = turned * freqs.cos() + torch.cat((-high, low), -1) * freqs.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)
