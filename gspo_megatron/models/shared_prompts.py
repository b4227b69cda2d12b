"""Prompts that a packed micro-batch holds once, although several responses follow them.

Projections, experts and norms treat each token alone, so they compute a shared prompt once. Two
parts of a layer must know to which branches a token belongs. Rotary embeddings take the position of
a token in its branch. Attention takes the keys and values of whole branches: the rows of a shared
prompt are repeated for each branch. In the backward pass their gradients add up, as for any
repeated row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class SharedPrompts:
    """Where the tokens of whole branches are in a micro-batch that holds shared tokens once.

    The whole tokens are those of all branches, branch after branch, with shared ones repeated.
    """

    rows: Tensor  # [whole tokens] int64: the row of the micro-batch with this token
    kept: Tensor  # [tokens] int64: for each row, the first whole token that is in it
    positions: Tensor  # [tokens] int64: the position of each row in its branches
    boundaries: Tensor  # [branches + 1] int32: starts and end of the branches in the whole tokens
    longest: int  # tokens of the longest branch
    skipped: list[int]  # [branches]: how many of its first tokens have rows of earlier branches
    on_host: SharedPrompts | None = None  # the same on the host, if this is on a device
    _angles: Tensor | None = None  # see take_angles

    def to(self, device: torch.device) -> SharedPrompts:
        """Return a copy with the tensors on `device`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("rows", "kept", "positions", "boundaries")
        }
        return replace(self, **moved, on_host=self.on_host or self)

    def take_angles(self, angles: Tensor) -> Tensor:
        """Rotary angles [positions, 1, 1, dim] -> those of the rows, [tokens + 1, 1, 1, dim]. All
        layers of a model have the same angles, so they are taken once in a pass."""
        if self._angles is None:
            # One row more than needed. Otherwise `_apply_rotary_pos_emb_thd` would take the rows at
            # an offset that it reads from the device.
            rows = torch.cat([self.positions, self.positions[:1]])
            self._angles = angles.index_select(0, rows)
        return self._angles

    def forget_angles(self) -> None:
        """Free the angles at the end of a pass."""
        self._angles = None


@dataclass
class SharedSeqParams(PackedSeqParams):
    """Megatron-Core's description of a packed micro-batch, with shared prompts.

    For Megatron-Core the micro-batch is one sequence. It then takes row i of the rotary angles for
    row i of the micro-batch (`_apply_rotary_pos_emb_thd` in rope_utils.py).
    """

    shared: SharedPrompts | None = None


def packed_params(boundaries: Tensor, longest: int, shared: SharedPrompts | None) -> Any:
    """Describe a packed micro-batch. boundaries: [branches + 1] int32, starts and end of the
    branches; longest: tokens of the longest branch."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    values: dict[str, Any] = {
        "qkv_format": "thd",
        **dict.fromkeys(names, boundaries),
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if shared is None:
        return PackedSeqParams(**values)
    return SharedSeqParams(**values, shared=shared)


def shared_of(packed: Any) -> SharedPrompts | None:
    """Return the shared prompts of a micro-batch, if it has any."""
    return packed.shared if isinstance(packed, SharedSeqParams) else None


class RepeatRows(torch.autograd.Function):
    """states[rows], where a row may be taken several times: [tokens, ...] -> [rows, ...].

    The gradient of a row is a sum in fp32, in a fixed order, rounded once. On CUDA the backward
    pass of `index_select` would add with atomics, in any order, and round bf16 at each addition.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = len(states)
        return states.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        counts = torch.zeros(ctx.tokens, dtype=torch.long, device=rows.device)
        counts.scatter_add_(0, rows, torch.ones_like(rows))
        wide = torch.promote_types(gradient.dtype, torch.float32)
        in_order = gradient.index_select(0, rows.argsort(stable=True)).to(wide)
        sums = torch.segment_reduce(  # ty: ignore[missing-attribute]  # torch hides it from checkers
            in_order, "sum", lengths=counts, axis=0, unsafe=True, initial=0
        )
        return sums.to(gradient.dtype), None


def repeat_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return states[rows], where a row may be taken several times. See RepeatRows. On CPUs,
    `index_select` is exact enough and faster."""
    if states.is_cuda:
        return RepeatRows.apply(states, rows.flatten()).unflatten(0, rows.shape)
    return states.index_select(0, rows.flatten()).unflatten(0, rows.shape)


class RotaryAngles(torch.nn.Module):
    """Megatron-Core's rotary angles of the positions 0, 1, 2, ..., or of other positions: those of
    a micro-batch with shared prompts, or the angles in `angles`, if it is set."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock
        self.angles: Tensor | None = None  # [sequences, 1, 1, dim]
        self._shared: SharedPrompts | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Megatron-Core calls this method with the PackedSeqParams, just before it calls the
        module."""
        everything = (*args, *kwargs.values())
        shared = (each.shared for each in everything if isinstance(each, SharedSeqParams))
        self._shared = next(shared, None)
        return self.stock.get_rotary_seq_len(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the angles; for YaRN also the factor of cos and sin."""
        shared, self._shared = self._shared, None
        stock_result = self.stock(*args, **kwargs)
        if self.angles is None and shared is None:
            return stock_result
        angles, *factor = stock_result if isinstance(stock_result, tuple) else (stock_result,)
        taken = self.angles if shared is None else shared.take_angles(angles)
        return (taken, *factor) if factor else taken


def with_shared_prompts(attention: Any) -> Any:
    """Return a subclass of Transformer Engine's attention that takes micro-batches with shared
    prompts."""

    class SharingAttention(attention):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            shared = shared_of(packed_seq_params)
            if shared is not None:
                query, key, value = (repeat_rows(s, shared.rows) for s in (query, key, value))
                packed_seq_params = packed_params(shared.boundaries, shared.longest, None)
            kwargs["packed_seq_params"] = packed_seq_params
            out = super().forward(query, key, value, *args, **kwargs)
            return out if shared is None else out.index_select(0, shared.kept)

    return SharingAttention
