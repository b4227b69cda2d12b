"""Attention and rotary angles of micro-batches that hold shared prompts once, compared with
repeated prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from gspo_megatron.batching.packing import PackSpec, pack
from gspo_megatron.models.core_attention import TorchCoreAttention
from gspo_megatron.models.shared_prompts import (
    RepeatRows,
    RotaryAngles,
    SharedSeqParams,
    packed_params,
    with_shared_prompts,
)
from tests.unit.batching.test_pack import PAD, grouped_batch
from tests.unit.models.test_core_attention import DIM, attention

HEADS, GROUPS = 4, 2


class Kernel(torch.nn.Module):
    """An attention that knows only whole sequences, like that of Transformer Engine."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = attention()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        attn_mask_type: Any = None,
    ) -> Tensor:
        assert type(packed_seq_params) is PackedSeqParams
        return self.inner(query, key, value, packed_seq_params=packed_seq_params)


@pytest.mark.parametrize("build", [attention, with_shared_prompts(Kernel)])
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_attention_is_that_of_repeated_prompts(
    build: Callable[[], TorchCoreAttention], seed: int, multiple: int
) -> None:
    batch = grouped_batch(seed)
    columns = batch.tokens, batch.response_lengths, batch.response_offsets
    spec = PackSpec(PAD, share_prompts=True, multiple=multiple)
    packed = pack(spec, *columns, range(12))
    assert packed.shared is not None
    total = packed.input_ids.numel()
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        drawn = torch.randn(total, heads, DIM, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    states = [random(HEADS), random(GROUPS), random(GROUPS)]
    params = packed_params(packed.boundaries, packed.longest, packed.shared)
    found = build()(*states, None, packed_seq_params=params)

    # each whole sequence by itself, from the rows of the micro-batch
    expected = torch.full_like(found, torch.nan)
    ends = packed.shared.boundaries.tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        rows = packed.shared.rows[start:end]
        own = (each[rows].unsqueeze(1) for each in states)  # [length, 1, heads, dim]
        expected = expected.index_put((rows,), attention()(*own)[:, 0])
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    # In float64 only the order of sums differs.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((found * weights).sum(), states)
    wanted = torch.autograd.grad((expected * weights).sum(), states)
    for mine, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_repeated_rows_are_summed_once(dtype: torch.dtype) -> None:
    """RepeatRows runs on CUDA only. Here its rule is tested on the CPU."""
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(7, 3, 5, generator=generator, dtype=torch.float64).to(dtype)
    states.requires_grad_()
    rows = torch.tensor([2, 0, 2, 2, 6, 0, 2, 2, 2])  # four rows are never taken
    taken = RepeatRows.apply(states, rows)
    assert torch.equal(taken, states[rows])
    weights = torch.randn(taken.shape, generator=generator, dtype=torch.float64).to(dtype)
    (found,) = torch.autograd.grad((taken * weights).sum(), states)
    expected = torch.zeros(states.shape, dtype=torch.float64)
    for row, weight in zip(rows.tolist(), weights.double(), strict=True):
        expected[row] += weight
    assert found.dtype == dtype
    # The sum is rounded once: half a unit in the last place, of 8 bits in bf16.
    exact = dtype == torch.float64
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-14 if exact else 2**-8, atol=1e-14 if exact else 1e-6
    )


class Stock(torch.nn.Module):
    """Rotary angles with Megatron-Core's interface. The angle is the position."""

    def forward(self, length: int, packed_seq: bool = False) -> tuple[Tensor, float]:
        return torch.arange(length).view(-1, 1, 1, 1), 0.5

    def get_rotary_seq_len(self, *arguments: Any) -> int:
        return next(a for a in arguments if isinstance(a, PackedSeqParams)).max_seqlen_q


def test_angles_are_those_of_the_positions() -> None:
    batch = grouped_batch(1)
    columns = batch.tokens, batch.response_lengths, batch.response_offsets
    shared, plain = (
        pack(PackSpec(PAD, share_prompts=share), *columns, range(12)) for share in (True, False)
    )
    rotary = RotaryAngles(Stock())
    for packed in (shared, plain, shared):
        params = packed_params(packed.boundaries, packed.longest, packed.shared)
        assert isinstance(params, SharedSeqParams) == (packed is shared)
        length = rotary.get_rotary_seq_len(None, None, None, None, params)
        angles, factor = rotary(length, packed_seq=True)
        positions = packed.position_ids[0] if packed is shared else torch.arange(packed.longest)
        assert angles.flatten()[: len(positions)].tolist() == positions.tolist() and factor == 0.5
        if packed is shared:
            assert rotary(length, packed_seq=True)[0] is not angles
            rotary.get_rotary_seq_len(None, None, None, None, params)
            assert rotary(length, packed_seq=True)[0] is angles  # the same for all layers
    rotary.angles = torch.tensor([[[[7]]]])  # of a cache
    assert rotary(1, packed_seq=True) == (rotary.angles, 0.5)
