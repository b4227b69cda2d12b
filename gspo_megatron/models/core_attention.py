"""Causal attention of the torch_native backend, on torch's scaled_dot_product_attention.

Megatron-Core's local DotProductAttention knows neither packed (THD) sequences nor context
parallelism. This one does both, in the layouts that Megatron-Core hands to Transformer Engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass
class Block:
    """Sequences of similar length, attended to together.

    Rows index the packed tokens; a row one past the last stands for padding, which reads zeros.
    """

    query_rows: Tensor  # [sequences, queries]
    key_rows: Tensor  # [sequences, keys]
    query_positions: Tensor | None  # [sequences, queries]; None where plain causality holds


@dataclass
class AttentionPlan:
    """How one micro-batch of packed sequences is cut into blocks; the same in every layer."""

    blocks: list[Block]
    restore: Tensor  # [tokens]: where each packed token stands in the blocks' joined output


class TorchCoreAttention(torch.nn.Module):
    """Scaled dot-product attention over [sequence, batch, heads, dim] or packed [tokens, heads,
    dim], causal within each sequence. Context parallelism gathers keys and values over the CP group
    (whose gradient is a reduce-scatter); the sequence is cut in Megatron's zig-zag order."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert attention_type == "self", "only self-attention is built here"
        assert not config.attention_dropout, "attention dropout is not part of RL post-training"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.cp_size = self.cp_group.size()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_bias is None
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        return self._padded(query, key, value)

    def _gather(self, states: Tensor) -> Tensor:
        """[local tokens, ...] -> [all tokens, ...], CP ranks' shards one after the other."""
        return gather_from_sequence_parallel_region(
            states.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = None
        if self.cp_size > 1:
            order, positions = zigzag_order(query.shape[0], self.cp_group, query.device)
            key, value = self._gather(key)[order], self._gather(value)[order]
            mask = positions[:, None] >= torch.arange(len(order), device=query.device)
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out = attend(query, key, value, self.scale, mask=mask)
        return out.permute(2, 0, 1, 3).flatten(2)  # [sequence, batch, heads * dim]

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        plan = getattr(packed, "attention_plan", None)
        if plan is None:
            plan = packed.attention_plan = plan_attention(packed, self.cp_group, query.device)
        if self.cp_size > 1:
            key, value = self._gather(key), self._gather(value)
        key, value, padded_query = _with_zero_row(key), _with_zero_row(value), _with_zero_row(query)
        outputs = []
        for block in plan.blocks:
            parts = (
                states[rows].transpose(1, 2)  # [sequences, heads, length, dim]
                for states, rows in (
                    (padded_query, block.query_rows),
                    (key, block.key_rows),
                    (value, block.key_rows),
                )
            )
            mask = None
            if block.query_positions is not None:
                keys = torch.arange(block.key_rows.shape[1], device=query.device)
                mask = (block.query_positions[:, :, None] >= keys)[:, None]
            out = attend(*parts, self.scale, mask=mask)
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return joined[plan.restore]  # [tokens, heads * dim]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[batch, heads, queries, dim] attention with grouped key/value heads; causal without mask."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _with_zero_row(states: Tensor) -> Tensor:
    return torch.cat([states, states.new_zeros((1, *states.shape[1:]))])


def zigzag_order(local_length: int, cp_group: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Megatron's load-balanced cut of one sequence into 2 x CP chunks: rank r holds r and 2CP-1-r.

    Returns `order` [length], the row of each position when the ranks' shards are joined, and
    `positions` [local_length], the positions of this rank's tokens.
    """
    size, rank = cp_group.size(), cp_group.rank()
    half = local_length // 2
    chunk = torch.arange(half, device=device)
    starts = [torch.tensor((r, 2 * size - 1 - r), device=device) for r in range(size)]
    held = torch.stack([(s[:, None] * half + chunk).flatten() for s in starts])  # [cp, local]
    order = torch.empty(size * local_length, dtype=torch.long, device=device)
    order[held.flatten()] = torch.arange(size * local_length, device=device)
    return order, held[rank]


def plan_attention(packed: PackedSeqParams, cp_group: Any, device: torch.device) -> AttentionPlan:
    """Cut packed sequences into blocks of like lengths, so that padding inside a block is small.

    A block takes sequences down to half of its longest: at most half of its rows are padding, and
    a micro-batch of a hundred short responses is one call instead of a hundred.
    """
    boundaries = packed.cu_seqlens_q_padded
    boundaries = packed.cu_seqlens_q if boundaries is None else boundaries
    bounds = boundaries.tolist()
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    tokens = bounds[-1] // cp_size  # on this rank
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    blocks: list[Block] = []
    restore = torch.empty(tokens, dtype=torch.long)
    filled = 0
    while order:
        longest = lengths[order[0]]
        if longest == 0:
            break
        members = [i for i in order if 2 * lengths[i] >= longest]
        order = order[len(members) :]
        block, targets = _block(members, bounds, longest, tokens, cp_size, cp_rank)
        valid = targets < tokens
        restore[targets[valid]] = filled + torch.arange(targets.numel()).view_as(targets)[valid]
        filled += targets.numel()
        blocks.append(block)
    for block in blocks:
        block.query_rows, block.key_rows = block.query_rows.to(device), block.key_rows.to(device)
        if block.query_positions is not None:
            block.query_positions = block.query_positions.to(device)
    return AttentionPlan(blocks, restore.to(device))


def _block(
    members: list[int], bounds: list[int], longest: int, tokens: int, cp_size: int, cp_rank: int
) -> tuple[Block, Tensor]:
    starts = torch.tensor([bounds[i] for i in members])[:, None]
    lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members])[:, None]
    positions = torch.arange(longest)[None]
    if cp_size == 1:
        rows = torch.where(positions < lengths, starts + positions, tokens)
        return Block(rows, rows, None), rows
    chunk = lengths // (2 * cp_size)  # zig-zag: two chunks of each sequence on each rank
    number = positions // chunk.clamp(min=1)
    holder = torch.minimum(number, 2 * cp_size - 1 - number)
    within = positions - number * chunk + torch.where(number >= cp_size, chunk, 0)
    key_rows = holder * tokens + starts // cp_size + within
    key_rows = torch.where(positions < lengths, key_rows, tokens * cp_size)

    local = torch.arange(longest // cp_size)[None]
    second = local >= chunk
    start = torch.where(second, (2 * cp_size - 1 - cp_rank) * chunk - chunk, cp_rank * chunk)
    query_rows = torch.where(local < 2 * chunk, starts // cp_size + local, tokens)
    # a padding query looks at the first key, or its softmax would be over nothing
    query_positions = torch.where(local < 2 * chunk, start + local, 0)
    return Block(query_rows, key_rows, query_positions), query_rows
