"""Causal attention of the torch_native backend, on torch's scaled_dot_product_attention.

Megatron-Core's local DotProductAttention supports neither packed (THD) sequences nor context
parallelism. This module supports both, with the tensor layouts that Megatron-Core passes to
Transformer Engine.

A layer may have a sliding window: a query sees only its own key and a fixed number of keys before
it. A layer may also have sinks: the softmax of each head has one more logit, which is learned and
has no key and no value. So the weights of the keys add up to less than one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.models.shared_prompts import SharedPrompts, repeat_rows, shared_of
from gspo_megatron.platform.cpu import faster

# The most elements that the mask [sequences, queries, keys] of a tile may have.
MASK_ELEMENTS = 2**22
# Up to this sequence length, the backward pass of torch's attention on a CPU takes three times as
# long in BF16 as in FP32.
SHORT = 256


@dataclass
class Positions:
    """Positions of queries in their sequences, and how the queries are cut into tiles."""

    # on_host (on the host) and of_queries (on the device) have the same values: the positions
    # [sequences, queries], or [1, queries] if they are equal in all sequences.
    on_host: Tensor
    of_queries: Tensor | None  # None for a fused kernel, which needs no mask
    # For each tile: its queries, and the keys that these queries can see.
    tiles: list[tuple[slice, slice]]
    # the number of keys that a query sees, including its own key; None: all keys up to its own
    window: int | None = None


@dataclass
class Block:
    """Sequences of similar length, computed together.

    Rows are indices of packed tokens. Shorter sequences are padded with the last packed token. No
    query of a sequence sees a key after the end of the sequence. The results and gradients of
    padding queries are not used.
    """

    query_rows: Tensor  # [sequences, queries]
    key_rows: Tensor  # [sequences, keys]
    positions: Positions | None  # None: queries and keys have the same positions


@dataclass
class AttentionPlan:
    """How one micro-batch of packed sequences is cut into blocks. Every layer uses the same plan.

    If all sequences have the same length, the packed tokens are one block, and no copy is made.
    """

    # number and length of the sequences if all lengths are equal; else None
    whole: tuple[int, int] | None = None
    blocks: list[Block] = field(default_factory=list)
    # [tokens]: where the output of each token is in the joined outputs of the blocks
    restore: Tensor | None = None


class TorchCoreAttention(torch.nn.Module):
    """Scaled dot-product attention over [sequence, batch, heads, dim] or packed [tokens, heads,
    dim], causal within each sequence. Under context parallelism each rank gathers the keys and
    values of all CP ranks, and the backward pass reduce-scatters their gradients. The sequence is
    cut in Megatron's zig-zag order."""

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
        assert pg_collection is not None
        self.cp_group = pg_collection.cp
        self.cp_size = self.cp_group.size()
        self.window = window_of(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None  # [heads / TP]: the sinks
        if config.softmax_type == "learnable":
            self.tp_group = pg_collection.tp
            heads = config.num_attention_heads // self.tp_group.size()
            device = torch.cuda.current_device()
            sinks = torch.zeros(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = torch.nn.Parameter(sinks)

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
        """Gather [local tokens, ...] of all CP ranks to [all tokens, ...], one shard after the
        other."""
        return gather_from_sequence_parallel_region(
            states.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = None
        if self.cp_size > 1:
            order, of_queries = zigzag_order(query.shape[0], self.cp_group)
            order = order.to(query.device)
            key, value = self._gather(key)[order], self._gather(value)[order]
            positions = cut_into_tiles(of_queries[None], query.shape[1], query.device)
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        out = self._attend(query, key, value, positions)
        return out.permute(2, 0, 1, 3).flatten(2)  # [sequence, batch, heads * dim]

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        plan = plan_of(packed, self.cp_group, query.device)
        if plan.whole is not None:
            parts = (s.unflatten(0, plan.whole).transpose(1, 2) for s in (query, key, value))
            return self._attend(*parts, None).transpose(1, 2).flatten(2).flatten(0, 1)
        if self.cp_size > 1:
            key, value = self._gather(key), self._gather(value)
        take = take_rows if shared_of(packed) is None else repeat_rows
        outputs = []
        for block in plan.blocks:
            parts = (  # [sequences, heads, length, dim] each
                take_rows(query, block.query_rows).transpose(1, 2),
                take(key, block.key_rows).transpose(1, 2),
                take(value, block.key_rows).transpose(1, 2),
            )
            out = self._attend(*parts, block.positions)
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        assert plan.restore is not None
        return take_rows(joined, plan.restore)  # [tokens, heads * dim]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions | None
    ) -> Tensor:
        rest = self.scale, self.window, self.softmax_offset, positions
        return attend_causally(query, key, value, *rest)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sinks, which are divided over the tensor-parallel ranks in the same way as the
        heads."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many keys a query sees in a layer, including its own key; None: all keys up to its
    own. `layer_number` counts from 1."""
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return config.window_size[0] + 1
    return None


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    positions: Positions | None = None,
) -> Tensor:
    """Causal attention of [batch, heads, queries, dim]. `window` and `sinks` [heads] are used if
    they are not None. positions: the positions of the queries, if they differ from those of the
    keys."""
    if window is None and sinks is None:
        if positions is None:
            return attend(query, key, value, scale, mask=None)
        if len(positions.tiles) == 1:  # its mask is small, so it can stay for the backward pass
            return attend(query, key, value, scale, _mask(positions, *positions.tiles[0]))
        return TiledAttention.apply(query, key, value, scale, positions)
    length = query.shape[2]
    of_queries = torch.arange(length)[None] if positions is None else positions.on_host
    # for estimates: one tile without a mask needs as much memory as a fused kernel
    if query.is_meta:
        everything = (slice(0, length), slice(0, key.shape[2]))
        positions = Positions(of_queries, None, [everything], window)
    else:
        matrices = query.shape[0] * (1 if sinks is None else query.shape[1])
        positions = cut_into_tiles(of_queries, matrices, query.device, window)
    return TiledAttention.apply(query, key, value, scale, positions, sinks)


class TiledAttention(torch.autograd.Function):
    """Computes attention that needs a mask, one tile of the queries at a time. A mask is needed for
    a window, and for queries at other positions than the keys.

    Only the small masks of the tiles exist, never a mask of all queries and keys. The backward pass
    computes each tile again. A tile leaves out the keys that none of its queries sees.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        positions: Positions,
        sinks: Tensor | None = None,  # [heads]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.scale, ctx.positions = scale, positions
        tiles = [
            attend(*_tile(query, key, value, *tile), scale, _mask(positions, *tile), _column(sinks))
            for tile in positions.tiles
        ]
        return torch.cat(tiles, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *states, sinks = ctx.saved_tensors
        # Keys get a part of their gradient from each tile, so these parts are summed in fp32.
        query_grad = torch.zeros_like(states[0])
        key_grad, value_grad = (torch.zeros_like(s, dtype=_wide(s.dtype)) for s in states[1:])
        sinks_grad = None if sinks is None else torch.zeros_like(sinks, dtype=_wide(sinks.dtype))
        for queries, keys in ctx.positions.tiles:
            with torch.enable_grad():
                parts = [s.detach().requires_grad_() for s in _tile(*states, queries, keys)]
                if sinks is not None:
                    parts.append(sinks.detach().requires_grad_())
                mask = _mask(ctx.positions, queries, keys)
                out = attend(*parts[:3], ctx.scale, mask, _column(*parts[3:]))
            gradients = torch.autograd.grad(
                out, parts, gradient[:, :, queries], materialize_grads=True
            )
            query_grad[:, :, queries] = gradients[0]
            key_grad[:, :, keys] += gradients[1]
            value_grad[:, :, keys] += gradients[2]
            if sinks_grad is not None:
                sinks_grad += gradients[3]
        if sinks_grad is not None:
            sinks_grad = sinks_grad.to(sinks.dtype)
        key_grad, value_grad = key_grad.to(states[1].dtype), value_grad.to(states[2].dtype)
        return query_grad, key_grad, value_grad, None, None, sinks_grad


def _tile(
    query: Tensor, key: Tensor, value: Tensor, queries: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor]:
    return query[:, :, queries], key[:, :, keys], value[:, :, keys]


def _column(sinks: Tensor | None = None) -> Tensor | None:
    """Sinks [heads] as [heads, 1, 1], the shape that `attend` takes."""
    return None if sinks is None else sinks[:, None, None]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits and sums are computed."""
    return torch.promote_types(dtype, torch.float32)


def _mask(positions: Positions, queries: slice, keys: slice) -> Tensor | None:
    """[sequences or 1, 1, queries, keys], true where a query sees a key."""
    if positions.of_queries is None:
        return None
    of_queries = positions.of_queries[:, None, queries, None]
    of_keys = torch.arange(keys.start, keys.stop, device=of_queries.device)
    mask = of_queries >= of_keys
    return mask if positions.window is None else mask & (of_queries - of_keys < positions.window)


def cut_into_tiles(
    of_queries: Tensor,
    num_sequences: int,
    device: torch.device,
    window: int | None = None,
    *,
    in_halves: bool = True,
) -> Positions:
    """Cut the queries into tiles. A tile has as many queries as its mask of at most MASK_ELEMENTS
    elements allows, and at least one query. of_queries: the positions of the queries, on the host.

    in_halves: the queries are those of two zig-zag chunks, which get different tiles because
    queries of the first chunk see few keys. With a window, a tile has at most `window` queries.
    """
    count = of_queries.shape[1]
    half = max(-(-count // 2), 1) if in_halves else max(count, 1)
    tiles = []
    for first in range(0, count, half):
        last = min(first + half, count)
        most_keys = int(of_queries[:, first:last].max()) + 1
        wide = most_keys if window is None else min(most_keys, 2 * window)
        rows = max(min(MASK_ELEMENTS // (num_sequences * wide), window or count), 1)
        for start in range(first, last, rows):
            queries = slice(start, min(start + rows, last))
            # On the meta device (`estimate`) each new shape costs time, so all tiles get equally
            # many keys.
            stop = most_keys if device.type == "meta" else int(of_queries[:, queries].max()) + 1
            # this minimum includes the positions of padding queries, which are 0
            least = 0 if window is None else int(of_queries[:, queries].min()) + 1 - window
            tiles.append((queries, slice(max(least, 0), stop)))
    return Positions(of_queries, of_queries.to(device, non_blocking=True), tiles, window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of [batch, heads, queries, dim] with grouped key/value heads. Without a mask it is
    causal.

    sinks: [heads, queries or 1, 1], one more logit in the softmax of each query; it has no value.
    """
    if sinks is not None and mask is not None:
        return _attend_with_sinks(query, key, value, scale, mask, sinks)
    if mask is not None and query.shape[1] != key.shape[1] and query.is_cuda:
        return attend_by_key_heads(query, key, value, scale, mask)
    narrow = query.dtype
    if narrow == torch.bfloat16 and query.shape[2] <= SHORT and faster.applies_to(query):
        query, key, value = query.float(), key.float(), value.float()
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.to(narrow)


def attend_by_key_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor
) -> Tensor:
    """`attend`, with the query heads that share a key head as further queries of this head.

    On GPUs, the kernels that need little memory take either a mask or grouped heads. Otherwise
    torch computes in fp32, and keeps the weights of all queries and keys."""
    ratio = query.shape[1] // key.shape[1]
    together = query.unflatten(1, (key.shape[1], ratio)).flatten(2, 3)
    if mask.shape[2] > 1:
        mask = mask.repeat(1, 1, ratio, 1)
    out = attend(together, key, value, scale, mask)
    return out.unflatten(2, (ratio, query.shape[2])).flatten(1, 2)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor, sinks: Tensor
) -> Tensor:
    groups, wide = key.shape[1], _wide(query.dtype)
    query = query.unflatten(1, (groups, -1))  # [batch, groups, heads of a group, queries, dim]
    scores = (query.to(wide) @ key.to(wide).unsqueeze(2).mT) * scale
    scores = scores.masked_fill(~mask.unsqueeze(2), -torch.inf)
    sinks = sinks.to(scores.dtype).unflatten(0, (groups, -1)).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2)


def take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return states[rows]. The backward pass is three times as fast on a CPU as that of
    indexing."""
    return states.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def zigzag_order(local_length: int, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Megatron's load-balanced cut of one sequence into 2 x CP chunks: rank r holds the chunks r
    and 2 CP - 1 - r.

    Returns two tensors on the host. `order` [length] says in which row of the joined shards of all
    ranks each position is. The other tensor has the positions [local_length] of this rank's tokens.
    """
    size = cp_group.size()
    chunks = torch.arange(size * local_length).view(2 * size, -1)
    held = torch.stack([chunks[[r, 2 * size - 1 - r]].flatten() for r in range(size)])
    return held.flatten().argsort(), held[cp_group.rank()]


def plan_of(packed: PackedSeqParams, cp_group: Any, device: torch.device) -> AttentionPlan:
    """The plan of a micro-batch, made once for all layers."""
    plan = getattr(packed, "attention_plan", None)
    if plan is None:
        plan = packed.attention_plan = plan_attention(packed, cp_group, device)
    return plan


def plan_attention(packed: PackedSeqParams, cp_group: Any, device: torch.device) -> AttentionPlan:
    """Cut packed sequences into blocks of similar lengths, so that blocks hold little padding.

    The shortest sequence of a block has at least half the length of the longest one. So at most
    half of the rows are padding, and a hundred short responses of similar lengths take one call of
    attention instead of a hundred.
    """
    shared = shared_of(packed)
    if shared is not None:
        return _plan_shared(shared, device)
    boundaries = packed.cu_seqlens_q_padded
    boundaries = packed.cu_seqlens_q if boundaries is None else boundaries
    bounds = boundaries.tolist()
    moved = partial(Tensor.to, device=device, non_blocking=True)
    cp_size, cp_rank = cp_group.size(), cp_group.rank()
    tokens = bounds[-1] // cp_size  # on this rank
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if cp_size == 1 and tokens and len(set(lengths)) == 1:
        return AttentionPlan(whole=(len(lengths), lengths[0]))
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
        rows, key_rows, positions = _block(members, bounds, longest, tokens, cp_size, cp_rank)
        valid = rows < tokens
        restore[rows[valid]] = filled + torch.arange(rows.numel()).view_as(rows)[valid]
        filled += rows.numel()
        tiles = None if positions is None else cut_into_tiles(positions, len(members), device)
        rows, key_rows = rows.clamp(max=tokens - 1), key_rows.clamp(max=tokens * cp_size - 1)
        blocks.append(Block(moved(rows), moved(key_rows), tiles))
    return AttentionPlan(blocks=blocks, restore=moved(restore))


def _plan_shared(shared: SharedPrompts, device: torch.device) -> AttentionPlan:
    """The plan of a micro-batch that holds shared prompts once.

    Only the keys of a prompt are repeated for each branch. The queries of a block begin at the
    first position at which one of its branches has a row of its own. So branches with a shared
    prompt and branches without one are in different blocks.
    """
    moved = partial(Tensor.to, device=device, non_blocking=True)
    shared = shared.on_host or shared  # a copy from a device would wait for it
    bounds, skipped = shared.boundaries.tolist(), shared.skipped
    whole = bounds[-1]
    lengths = [end - start for start, end in pairwise(bounds)]
    own = [number for number, length in enumerate(lengths) if length > skipped[number]]
    order = sorted(own, key=lambda i: -lengths[i])
    blocks: list[Block] = []
    restore = torch.empty(whole, dtype=torch.long)
    filled = 0
    while order:
        longest, shares = lengths[order[0]], skipped[order[0]] > 0
        members = [i for i in order if 2 * lengths[i] >= longest and (skipped[i] > 0) == shares]
        taken = set(members)
        order = [i for i in order if i not in taken]
        keys, _, _ = _block(members, bounds, longest, whole, 1, 0)
        first = min(skipped[i] for i in members)
        queries = keys[:, first:]
        valid = queries < whole
        restore[queries[valid]] = filled + torch.arange(queries.numel()).view_as(queries)[valid]
        filled += queries.numel()
        positions = None
        if first:
            of_queries = torch.arange(first, longest)[None]
            positions = cut_into_tiles(of_queries, 1, device, in_halves=False)
        keys = moved(shared.rows[keys.clamp(max=whole - 1)])
        blocks.append(Block(keys[:, first:], keys, positions))
    return AttentionPlan(blocks=blocks, restore=moved(restore[shared.kept]))


def _block(
    members: list[int], bounds: list[int], longest: int, tokens: int, cp_size: int, cp_rank: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three tensors for the sequences `members`: the rows of the queries, the rows of the
    keys, and the positions of the queries (None if they are equal to those of the keys). Rows
    count from 0. Padding has a row beyond the last one: `tokens`, or for keys tokens * cp_size."""
    starts = torch.tensor([bounds[i] for i in members])[:, None]
    lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members])[:, None]
    positions = torch.arange(longest)[None]
    if cp_size == 1:
        rows = torch.where(positions < lengths, starts + positions, tokens)
        return rows, rows, None
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
    # a padding query sees the first key: a softmax over no key is NaN
    query_positions = torch.where(local < 2 * chunk, start + local, 0)
    return query_rows, key_rows, query_positions
