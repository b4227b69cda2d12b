"""Sums by sequence against loops."""

from __future__ import annotations

import pytest
import torch

from gspo_megatron.objectives.segments import segment_sum, shared_segment_sum


def test_sums_equal_a_loop_and_empty_segments_are_zero():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(23, generator=generator, dtype=torch.float64)
    index = torch.tensor([4, 0, 2] * 7 + [0, 4])
    expected = [0.0] * 6
    for value, segment in zip(values.tolist(), index.tolist(), strict=True):
        expected[segment] += value
    assert segment_sum(values, index, 6).tolist() == pytest.approx(expected, rel=1e-12)


def test_leading_dimensions_are_summed_separately():
    values = torch.arange(10.0).reshape(2, 5)
    index = torch.tensor([1, 1, 0, 1, 0])
    assert segment_sum(values, index, 2).tolist() == [[6.0, 4.0], [16.0, 19.0]]


def test_low_precision_is_summed_in_float32():
    values = torch.ones(1000, dtype=torch.bfloat16)
    sums = segment_sum(values, torch.zeros(1000, dtype=torch.long), 1)
    assert sums.dtype == torch.float32 and float(sums) == 1000  # bfloat16 would stop at 256


def test_gradient_is_that_of_a_sum():
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 1, 1, 3, 0, 3, 3])
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, index, 4), values)


def test_no_tokens_at_all_keep_the_graph():
    values = torch.zeros(0, requires_grad=True)
    sums = segment_sum(values, torch.zeros(0, dtype=torch.long), 3)
    sums.sum().backward()
    assert sums.tolist() == [0, 0, 0] and values.grad.shape == (0,)


def test_columns_are_refused_instead_of_broadcast():
    with pytest.raises(AssertionError):
        segment_sum(torch.ones(4, 1), torch.zeros(4, dtype=torch.long), 1)


def test_shared_sum_has_the_value_of_all_shards_and_the_gradient_of_this_one():
    mine = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    index = torch.tensor([0, 1, 1])
    others = torch.tensor([100.0, 200.0, 400.0])

    def reduce_in_place(vector: torch.Tensor) -> torch.Tensor:
        assert not vector.requires_grad
        return vector.add_(others)

    sums = shared_segment_sum(mine, index, 3, reduce_in_place)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert sums.tolist() == [101.0, 206.0, 400.0]
    assert mine.grad.tolist() == [1.0, 10.0, 10.0]
