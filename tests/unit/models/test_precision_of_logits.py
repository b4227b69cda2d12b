"""In bf16 the logits are sums in float32 of exact products, never rounded to the inputs' dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gspo_megatron.models import logprob_head
from gspo_megatron.models.logprob_head import logprob_and_entropy, multiply
from tests.unit.models.test_logprob_head import (
    LargestTensor,
    assert_all_close,
    chunked,
    dense,
    make_case,
)

# Logits of a standard deviation of 8, which bf16 would round by up to 0.06: sums of 64 terms in
# float32 are 4,000 times as precise.
WIDTH = 64
FIGURES = {"rtol": 2e-6, "atol": 2e-5}
# Gradients are products of bf16 and come out in bf16, with half a unit in the last place of 8 bits.
GRADIENTS = 2**-8


def assert_precise(actual, expected) -> None:
    """Figures to float32's precision, gradients, in the Euclidean norm, to bf16's."""
    for got, exact in zip(actual[:2], expected[:2], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, **FIGURES)
    for got, exact in zip(actual[2:], expected[2:], strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - exact).norm()) < GRADIENTS * float(exact.norm())


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (17, 31), (40, 203)])
@pytest.mark.parametrize("tile_bytes", [None, 4 * 7 * 13, 4 * 16 * 64])
def test_bf16_equals_float64_of_the_same_inputs(
    tile_bytes, rows, vocab, entropy_gradient, monkeypatch
):
    if tile_bytes is not None:  # many tiles, computed again in the backward pass
        monkeypatch.setattr(logprob_head, "TILE_BYTES", tile_bytes)
        monkeypatch.setattr(logprob_head, "KEEP_EXPONENTIALS_BYTES", 0)
        monkeypatch.setattr(logprob_head, "STRIP_BYTES", 4 * WIDTH * 5)
    case = make_case(rows, WIDTH, vocab, dtype=torch.bfloat16)
    options = {"temperature": 0.7, "entropy_gradient": entropy_gradient}
    actual = chunked(*case, chunk_size=None if tile_bytes is None else 7, **options)
    assert_precise(actual, dense(*case, **options))


def test_float32_comes_out_in_float32():
    case = make_case(40, 8, 50, seed=2, dtype=torch.float32)
    actual = chunked(*case, chunk_size=16)
    assert {figure.dtype for figure in actual} == {torch.float32}
    assert_all_close(actual, dense(*case), rtol=1e-5, atol=2e-5)


def compare_shard(rank: int, world_size: int, rendezvous: str) -> None:
    logprob_head.TILE_BYTES = 5 * 4 * 4  # in this process
    logprob_head.KEEP_EXPONENTIALS_BYTES = 0
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    try:
        hidden, weight, targets, gradients = make_case(17, WIDTH, 22, dtype=torch.bfloat16)
        expected = dense(hidden, weight, targets, gradients)
        part = slice(12 * rank, 12 * (rank + 1))
        padded = torch.cat([weight, torch.full((2, WIDTH), 50.0, dtype=torch.bfloat16)])
        logprob, entropy, hidden_grad, weight_grad = chunked(
            hidden,
            padded[part],
            targets,
            gradients,
            chunk_size=5,
            process_group=dist.group.WORLD,
            vocab_start=part.start,
            vocab_size=22,
        )
        # shares of bf16, summed by the caller
        hidden_grad = hidden_grad.float()
        dist.all_reduce(hidden_grad)
        mine = expected[3][part]
        assert_precise(
            (logprob, entropy, hidden_grad.bfloat16(), weight_grad[: len(mine)]),
            (*expected[:3], mine),
        )
    finally:
        dist.destroy_process_group()


def test_bf16_shards_of_the_vocabulary_equal_float64_of_the_same_inputs(tmp_path: Path):
    mp.spawn(compare_shard, (2, str(tmp_path / "rendezvous")), nprocs=2)


@pytest.mark.parametrize("strip_bytes", [1, 4 * WIDTH * 3, 2**20])
def test_products_in_strips_are_those_of_the_whole(strip_bytes, monkeypatch):
    monkeypatch.setattr(logprob_head, "STRIP_BYTES", strip_bytes)
    hidden, weight, *_ = make_case(3, WIDTH, 200, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        product = multiply(hidden, weight, torch.empty(3, 200))
    torch.testing.assert_close(product.double(), hidden.double() @ weight.double().t(), **FIGURES)
    if strip_bytes < 2**20:  # but for a single row, the weight is never there in float32
        assert largest.elements == 3 * 200 < weight.numel()


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0)])
def test_products_of_nothing(rows, columns):
    hidden, weight = (torch.ones(n, 4, dtype=torch.bfloat16) for n in (rows, columns))
    assert multiply(hidden, weight, torch.empty(rows, columns)).shape == (rows, columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_numbers_shapes_and_dtypes_are_the_same(dtype):
    # as in estimates of memory
    kind = {"device": "meta", "dtype": dtype, "requires_grad": True}
    hidden, weight = torch.empty(5000, WIDTH, **kind), torch.empty(3000, WIDTH, **kind)
    targets = torch.empty(5000, dtype=torch.long, device="meta")
    logprob, entropy = logprob_and_entropy(hidden, weight, targets)
    logprob.sum().backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.shape) == (dtype, weight.shape)
