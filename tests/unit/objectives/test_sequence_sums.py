"""Sums of tokens by sequence, compared with numpy in float64. Every call must give the same
bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_megatron.objectives.parts import segment_sum, sequence_sums
from tests.unit.objectives.batches import make_inputs

# (tokens, sequences): no tokens, fewer tokens than sequences, odd numbers, one long response
SIZES = [(0, 0), (0, 3), (1, 1), (1, 5), (7, 4), (23, 6), (1001, 17), (70_001, 1)]


def random_sums(tokens: int, sequences: int, dtype: torch.dtype, rows: tuple[int, ...] = ()):
    """Random values and their sequence numbers. Neighbouring tokens mostly belong to one sequence,
    as after packing and after the zig-zag cut."""
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(*rows, tokens, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.randint(max(sequences, 1), (tokens,), generator=generator).sort().values
    return values, torch.cat([index[::2], index[1::2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_sums_are_those_of_numpy_with_the_same_bits_at_each_call(tokens, sequences, rows, dtype):
    values, index = random_sums(tokens, sequences, dtype, rows)
    expected = np.zeros((*rows, sequences))
    for row in np.ndindex(*rows):
        np.add.at(expected[row], index.numpy(), values[row].double().numpy())
    sums = segment_sum(values, index, sequences)
    # in bfloat16, a sum of ones would stop at 256
    assert sums.dtype == torch.promote_types(dtype, torch.float32)
    precision = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(
        sums.double().numpy(), expected, rtol=precision, atol=precision * tokens**0.5
    )
    assert torch.equal(sums, segment_sum(values, index, sequences))
    assert not sums[..., torch.bincount(index, minlength=sequences) == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_gathered(dtype):
    values, index = random_sums(9, 4, dtype, (2,))
    values.requires_grad_()
    weights = torch.arange(8.0).reshape(2, 4)
    (segment_sum(values, index, 4) * weights).sum().backward()
    assert torch.equal(values.grad, weights[:, index].to(dtype))
    double = values.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, index, 4), double)


def test_no_tokens_at_all_keep_the_graph():
    values = torch.zeros(0, requires_grad=True)
    segment_sum(values, torch.zeros(0, dtype=torch.long), 3).sum().backward()
    assert values.grad.shape == (0,)


@pytest.mark.parametrize(
    ("values", "index", "error"),
    [
        # these shapes would broadcast to a wrong result
        (torch.ones(4, 1), [0, 0, 0, 0], AssertionError),
        # the index names a second sequence, but there is only one
        (torch.ones(2), [0, 1], RuntimeError),
        (torch.ones(2), [0, -1], RuntimeError),
    ],
)
def test_what_belongs_to_no_sequence_is_refused(values, index, error):
    with pytest.raises(error):
        segment_sum(values, torch.tensor(index), 1)


def test_shared_sums_have_the_value_of_all_shards_and_the_gradient_of_this_one():
    inputs = make_inputs(0, lengths=(1, 2, 1))
    values = torch.tensor([1.0, 2.0, 4.0, 0.0], requires_grad=True)

    def reduce_in_place(sums: torch.Tensor) -> torch.Tensor:
        assert not sums.requires_grad
        return sums.add_(torch.tensor([[100.0, 200.0, 400.0]]))

    inputs.sum_over_shards = reduce_in_place
    sums = sequence_sums(inputs, values)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert sums.tolist() == [[101.0, 206.0, 400.0]]
    assert values.grad.tolist() == [1.0, 10.0, 10.0, 100.0]
