"""Parts of a rank's parameters are stored as boxes (one slice for each axis) of global tensors. An
optimizer may cut the parameters at any element."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor

from gspo_megatron.checkpoint.model_pieces import ModelPiece, _piece, boxes


def place_all(piece: ModelPiece, flat: Tensor, cuts: list[int]) -> Tensor:
    """Assemble the global tensor from ranges of `flat`. Each element must be in exactly one
    range."""
    whole = torch.full(piece.global_shape, -1, dtype=flat.dtype)
    for first, last in zip(cuts, cuts[1:]):
        for part in piece.range_of(flat[first:last], first, "key"):
            assert (whole[part.slices] == -1).all()
            whole[part.slices] = part.data
    return whole


def test_expert_of_a_stack_that_axes_before_it_number() -> None:
    """In the global tensor, the number of an expert is an additional first axis."""
    parameter = torch.arange(6.0).view(2, 3)
    shard = ShardedTensor.from_rank_offsets(
        "experts.weight", parameter, (0, 3, 5), (1, 1, 2), replica_id=(0, 0, 7), prepend_axis_num=1
    )
    piece = _piece(shard, parameter, vocab_size=45)
    assert piece.is_original
    assert (piece.global_shape, piece.offset, piece.shape) == ((5, 4, 3), (3, 2, 0), (1, 2, 3))
    for cuts in ([0, 6], [0, 1, 6], [0, 2, 4, 6], [0, 5, 6]):
        whole = place_all(piece, parameter.view(-1), cuts)
        assert torch.equal(whole[3, 2:], parameter)
        assert (whole >= 0).sum() == 6


def test_half_of_a_parameter() -> None:
    """Gate and up projection are one parameter of a rank, but two parts of the global tensor."""
    parameter = torch.arange(20.0).view(10, 2)
    gate, up = (
        _piece(ShardedTensor.from_rank_offsets("fc1", half, (0, 1 + 3 * number, 6)), parameter, 45)
        for number, half in enumerate(parameter.chunk(2))
    )
    assert (gate.start, gate.stop, up.start, up.stop) == (0, 10, 10, 20)
    cuts = [0, 7, 13, 20]
    whole = torch.maximum(*(place_all(p, parameter.view(-1), cuts) for p in (gate, up)))
    assert torch.equal(whole[5:10], parameter[:5]) and torch.equal(whole[20:25], parameter[5:])
    assert (whole >= 0).sum() == 20


def test_gated_experts_of_transformer_engine_lie_where_those_of_torch_native_do() -> None:
    """Gate and up projection are one matrix, split over two tensor-parallel ranks in
    Megatron-Core's way."""
    experts, width, hidden = 3, 4, 5
    whole = torch.full((experts, 2, width, hidden), -1.0)
    weights = torch.arange(float(whole.numel())).view(experts, 2, width, hidden)
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    for expert in range(experts):
        for rank in range(2):
            rows = slice(rank * width // 2, (rank + 1) * width // 2)
            parameter = weights[expert, :, rows].reshape(width, hidden).contiguous()
            stacked = (0, expert, experts)
            shard = ShardedTensor.from_rank_offsets(
                key, parameter, stacked, (1, rank, 2), prepend_axis_num=1
            )
            for half in apply_swiglu_sharded_factory(shard, (stacked,)).build():
                piece = _piece(half, parameter, 45)
                assert piece.key == "decoder.layers.0.mlp.experts.weight1"
                whole = torch.maximum(
                    whole, place_all(piece, parameter.view(-1), [0, 7, width * hidden])
                )
    assert torch.equal(whole, weights)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (3, 2, 4), (2, 1, 3, 2)])
def test_every_run_in_order(shape: tuple[int, ...]) -> None:
    """A run is a range of the flattened tensor. For every run, the boxes together have the elements
    of the run, in order."""
    count = math.prod(shape)
    whole = torch.arange(count).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            found = list(boxes(shape, start, stop))
            elements = []
            for offset, size in found:
                assert len(offset) == len(size) == len(shape) and 0 not in size
                box = whole[tuple(slice(o, o + n) for o, n in zip(offset, size))]
                assert box.shape == size
                elements += box.flatten().tolist()
            assert elements == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_backward_run_is_empty() -> None:
    assert list(boxes((3, 4), 7, 5)) == []
