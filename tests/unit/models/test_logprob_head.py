"""Log-probability and entropy in tiles and shards, compared with a dense softmax in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.models import logprob_head
from gspo_megatron.models.logprob_head import logprob_and_entropy, multiply

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64 with additions in another order

# The logits have a standard deviation of 8. Rounding to bf16 would change them by up to 0.06. Sums
# of 64 terms in float32 are 4,000 times as precise.
WIDTH = 64
PRECISE = {"rtol": 2e-6, "atol": 2e-5}
# Gradients are products of bf16 matrices and are rounded to bf16, which has 8 bits.
GRADIENTS = 2**-8


def make_case(rows: int, width: int, vocab: int, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(vocab, (rows,), generator=generator)
    # The gradients of the loss with respect to the log-probabilities and to the entropies.
    gradients = normal(rows).double(), normal(rows).double()
    return normal(rows, width), normal(vocab, width), targets, gradients


def dense(hidden, weight, targets, gradients, temperature=1.0, entropy_gradient=False):
    """Log-probability, entropy, and the gradients of both inputs, computed by their definitions."""
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    p = torch.softmax(hidden @ weight.T / temperature, dim=-1)
    logprob = torch.stack([p[row, target].log() for row, target in enumerate(targets.tolist())])
    entropy = -(p * p.log()).sum(-1)
    total = (gradients[0] * logprob).sum()
    if entropy_gradient:
        total = total + (gradients[1] * entropy).sum()
    total.backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def chunked(hidden, weight, targets, gradients, **options):
    """The results of the operation under test."""
    hidden = hidden.detach().clone().requires_grad_()
    weight = weight.detach().clone().requires_grad_()
    logprob, entropy = logprob_and_entropy(hidden, weight, targets, **options)
    total = (gradients[0].to(logprob) * logprob).sum()
    if options.get("entropy_gradient"):
        total = total + (gradients[1].to(entropy) * entropy).sum()
    total.backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_all_close(actual, expected, **tolerance) -> None:
    for name, a, e in zip(
        ("logprob", "entropy", "hidden gradient", "weight gradient"), actual, expected, strict=True
    ):
        torch.testing.assert_close(
            a.double(), e, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_float32_gives_float32():
    case = make_case(40, 8, 50, seed=2, dtype=torch.float32)
    actual = chunked(*case, chunk_size=16)
    assert {value.dtype for value in actual} == {torch.float32}
    assert_all_close(actual, dense(*case), rtol=1e-5, atol=2e-5)


@pytest.fixture
def small_tiles(monkeypatch):
    """A function that limits a tile to a given number of float64 elements, so that columns are
    divided into blocks."""

    def set_elements(count: int) -> None:
        monkeypatch.setattr(logprob_head, "TILE_BYTES", 8 * count)
        monkeypatch.setattr(logprob_head, "KEEP_EXPONENTIALS_BYTES", 0)

    return set_elements


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("elements", [None, 1, 40, 17 * 7, 17 * 64, 17 * 100, 17 * 150])
@pytest.mark.parametrize("chunk_size", [1, 4, 1024, None])
def test_tiles_equal_the_dense_softmax(
    chunk_size, elements, temperature, entropy_gradient, small_tiles
):
    if elements is not None:  # else all columns are one block, whose exponentials are kept
        small_tiles(elements)
    case = make_case(17, 5, 150)
    options = {"temperature": temperature, "entropy_gradient": entropy_gradient}
    actual = chunked(*case, chunk_size=chunk_size, **options)
    assert_all_close(actual, dense(*case, **options), **EXACT)


def test_columns_of_very_different_sizes_of_logits(small_tiles):
    # A block sums relative to its own maximum. The maxima of the blocks differ by a thousand.
    small_tiles(6 * 2)
    hidden, weight, targets, gradients = make_case(6, 4, 8)
    weight[[0, 1, 6]] *= 1000.0
    logprob, entropy, *_ = chunked(hidden, weight, targets, gradients)
    expected = torch.distributions.Categorical(logits=hidden @ weight.T)
    torch.testing.assert_close(logprob, expected.log_prob(targets), **EXACT)
    torch.testing.assert_close(entropy, expected.entropy(), **EXACT)


def test_weight_gradient_of_many_chunks_does_not_lose_the_small_ones():
    # The gradient is the sum of 4096 equal contributions. If they were added one by one in
    # bfloat16, the sum would stop at 256.
    rows = 4096
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    targets = torch.zeros(rows, dtype=torch.long)
    gradients = torch.ones(rows), torch.zeros(rows)
    *_, weight_gradient = chunked(hidden, weight, targets, gradients, chunk_size=1)
    assert weight_gradient.flatten().tolist() == [rows / 2, -rows / 2]


def test_hidden_gradient_of_many_column_blocks_does_not_lose_the_small_ones(monkeypatch):
    # There are 4096 tiles of one column. Each tile except the target's adds 1/4096 to the gradient.
    columns = 4096
    monkeypatch.setattr(logprob_head, "KEEP_EXPONENTIALS_BYTES", 0)
    monkeypatch.setattr(logprob_head, "TILE_BYTES", 4)
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16)
    weight = torch.ones(columns, 1, dtype=torch.bfloat16)
    weight[0] = 0
    gradients = torch.ones(1), torch.zeros(1)
    *_, hidden_gradient, _ = chunked(hidden, weight, torch.tensor([0]), gradients)
    assert float(hidden_gradient) == -1.0


def test_padding_columns_are_not_in_the_softmax_and_get_no_gradient():
    hidden, weight, targets, gradients = make_case(11, 4, 19, seed=3)
    padding = torch.full((5, 4), 1e3, dtype=torch.float64)
    expected = dense(hidden, weight, targets, gradients)
    padded = torch.cat([weight, padding])
    *actual, weight_gradient = chunked(hidden, padded, targets, gradients, vocab_size=19)
    assert_all_close([*actual, weight_gradient[:19]], expected, **EXACT)
    assert (weight_gradient[19:] == 0).all()


@pytest.mark.parametrize("target", [-100, -1, 19, 23])
def test_a_target_outside_the_vocabulary_is_nan_and_harms_no_other_row(target):
    hidden, weight, targets, gradients = make_case(6, 4, 24, seed=4)
    targets = targets.clamp(max=18)
    expected = chunked(hidden, weight, targets, gradients, vocab_size=19)
    targets[2] = target
    logprob, entropy = logprob_and_entropy(hidden, weight, targets, vocab_size=19)
    assert torch.isnan(logprob[2])
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(logprob[others], expected[0][others])
    assert torch.equal(entropy, expected[1])


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[3e4], [-3e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    logprob, entropy = logprob_and_entropy(
        hidden, weight, torch.tensor([0, 0]), entropy_gradient=True
    )
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.tolist() == [0.0, -6e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_no_rows_still_join_the_backward():
    hidden, weight, targets, gradients = make_case(0, 4, 7)
    logprob, entropy, hidden_grad, weight_grad = chunked(hidden, weight, targets, gradients)
    assert logprob.shape == entropy.shape == (0,)
    assert hidden_grad.shape == (0, 4)
    assert (weight_grad == 0).all() and weight_grad.shape == (7, 4)


def test_only_the_gradients_that_are_asked_for():
    hidden, weight, targets, gradients = make_case(6, 4, 9)
    expected = dense(hidden, weight, targets, gradients)
    for wanted in (0, 1):
        inputs = [hidden.clone(), weight.clone()]
        inputs[wanted].requires_grad_()
        logprob, entropy = logprob_and_entropy(*inputs, targets, chunk_size=4)
        assert not entropy.requires_grad
        (logprob * gradients[0]).sum().backward()
        torch.testing.assert_close(inputs[wanted].grad, expected[2 + wanted], **EXACT)
        assert inputs[1 - wanted].grad is None


def test_backward_twice_gives_the_same():
    hidden, weight, targets, _ = make_case(6, 4, 9)
    hidden.requires_grad_()
    logprob, _ = logprob_and_entropy(hidden, weight, targets)
    first = torch.autograd.grad(logprob.sum(), hidden, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(logprob.sum(), hidden)[0])


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("elements", "chunk_size"), [(64 * 128, None), (32 * 1000, 32)])
def test_no_tensor_of_a_large_batch_exceeds_the_tile(
    elements, chunk_size, entropy_gradient, small_tiles
):
    rows, width, vocab = 64, 8, 1000
    small_tiles(elements)
    case = make_case(rows, width, vocab)
    with LargestTensor() as largest:
        chunked(*case, chunk_size=chunk_size, entropy_gradient=entropy_gradient)
    assert largest.elements == elements >= vocab * width
    # An ordinary matrix product, to check that LargestTensor works.
    with LargestTensor() as largest:
        dense(*case)
    assert largest.elements == rows * vocab


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_tiles_of_a_large_vocabulary_are_small_and_cover_it(device):
    limit = {"cpu": logprob_head.TILE_BYTES, "cuda": logprob_head.GPU_TILE_BYTES}[device]
    for rows, columns in ((4096, 151_936), (32_769, 151_936), (300, 151_936), (4096, 18_992)):
        tiles = logprob_head.tiles_of(rows, columns, None, 4, torch.device(device))
        for blocks, total in zip(tiles, (rows, columns)):
            assert blocks[0].start == 0 and blocks[-1].stop == total
            assert all(a.stop == b.start for a, b in zip(blocks, blocks[1:]))
            assert len({b.stop - b.start for b in blocks[:-1]}) <= 1
        height, width = (blocks[0].stop for blocks in tiles)
        assert height * width * 4 <= limit and (
            width == columns or 0.6 * limit <= height * width * 4
        )
        assert (width == columns or width % 64 == 0) and height <= logprob_head.TILE_ROWS
    # Twice the limit is below 5% of the logits of a usual micro-batch.
    assert 2 * limit < 0.05 * {"cpu": 4096, "cuda": 32_768}[device] * 151_936 * 4


def test_logits_of_a_small_batch_are_one_tile():
    for rows, columns in ((4000, 1024), (1, 151_936), (7, 100), (0, 100), (5, 0)):
        tiles = logprob_head.tiles_of(rows, columns, None, 4, torch.device("cpu"))
        assert tiles == tuple([slice(0, n)] if n else [] for n in (rows, columns))


def test_nothing_of_the_size_of_the_logits_is_kept_between_forward_and_backward():
    hidden, weight, targets, _ = make_case(64, 8, 100)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprob_and_entropy(hidden.requires_grad_(), weight, targets, chunk_size=16)
    assert max(saved) == max(hidden.numel(), weight.numel())


SHARD_CASES = [
    # Each case: rows, true vocabulary, rows of the weight on each rank (equal parts of the padded
    # vocabulary), chunk size, temperature, whether the entropy has a gradient, dtype.
    (17, 22, 12, 5, 1.0, False, torch.float64),
    (17, 22, 12, 1024, 0.8, True, torch.float64),
    (9, 12, 12, 4, 1.3, True, torch.float64),  # the last rank has only padding
    (1, 13, 12, 1024, 1.0, False, torch.float64),
    (0, 22, 12, 4, 1.0, False, torch.float64),
    (17, 22, 12, 5, 1.0, False, torch.bfloat16),
]


def compare_shard(rank: int, world_size: int, rendezvous: str) -> None:
    logprob_head.TILE_BYTES = 5 * 4 * 8  # gives blocks of 4 columns
    logprob_head.KEEP_EXPONENTIALS_BYTES = 9 * 12 * 8  # gives one case a single tile
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    try:
        for seed, case in enumerate(SHARD_CASES):
            rows, vocab, part, chunk_size, temperature, entropy_gradient, dtype = case
            width = 6 if dtype == torch.float64 else WIDTH
            hidden, weight, targets, gradients = make_case(rows, width, vocab, seed, dtype)
            expected = (
                dense(hidden, weight, targets, gradients, temperature, entropy_gradient)
                if rows
                else None
            )
            padded = torch.full((part * world_size, width), 50.0, dtype=dtype)
            padded[: min(vocab, len(padded))] = weight[: len(padded)]
            start = rank * part
            logprob, entropy, hidden_grad, weight_grad = chunked(
                hidden,
                padded[start : start + part],
                targets,
                gradients,
                temperature=temperature,
                chunk_size=chunk_size,
                process_group=dist.group.WORLD,
                vocab_start=start,
                vocab_size=vocab,
                entropy_gradient=entropy_gradient,
            )
            # The caller sums the bf16 shares of the ranks in float32.
            hidden_grad = hidden_grad.to(torch.promote_types(dtype, torch.float32))
            dist.all_reduce(hidden_grad)
            if expected is None:
                assert logprob.shape == (0,) and (weight_grad == 0).all()
                continue
            mine = max(min(vocab - start, part), 0)
            actual = (logprob, entropy, hidden_grad.to(dtype), weight_grad[:mine])
            of_shard = (*expected[:3], expected[3][start : start + mine])
            if dtype == torch.float64:
                assert_all_close(actual, of_shard, **EXACT)
            else:
                assert_precise(actual, of_shard)
            assert (weight_grad[mine:] == 0).all()
        count_collectives(rank, world_size)
    finally:
        dist.destroy_process_group()


def count_collectives(rank: int, world_size: int) -> None:
    """Check that the forward pass has two collectives for any number of tiles, and that the
    backward pass has no collective."""
    hidden, weight, targets, gradients = make_case(10, 6, 12 * world_size)
    calls: list[str] = []
    original = dist.all_reduce

    def counting(*args, **kwargs):
        calls.append("all_reduce")
        return original(*args, **kwargs)

    logprob_head.dist.all_reduce = counting
    try:
        chunked(
            hidden,
            weight[rank * 12 : rank * 12 + 12],
            targets,
            gradients,
            chunk_size=4,
            process_group=dist.group.WORLD,
            vocab_start=rank * 12,
        )
    finally:
        logprob_head.dist.all_reduce = original
    assert len(calls) == 2


def test_shards_of_the_vocabulary_equal_the_dense_softmax(tmp_path: Path):
    mp.spawn(compare_shard, (3, str(tmp_path / "rendezvous")), nprocs=3)


def assert_precise(actual, expected) -> None:
    """Check results to the precision of float32, and the Euclidean norm of the gradients' errors to
    the precision of bf16."""
    for got, exact in zip(actual[:2], expected[:2], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, **PRECISE)
    for got, exact in zip(actual[2:], expected[2:], strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - exact).norm()) <= GRADIENTS * float(exact.norm())


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (17, 31), (40, 203)])
@pytest.mark.parametrize("tile_bytes", [None, 4 * 7 * 13, 4 * 16 * 64])
def test_bf16_equals_float64_of_the_same_inputs(
    tile_bytes, rows, vocab, entropy_gradient, monkeypatch
):
    if tile_bytes is not None:  # with many tiles, the backward pass computes the tiles again
        monkeypatch.setattr(logprob_head, "TILE_BYTES", tile_bytes)
        monkeypatch.setattr(logprob_head, "KEEP_EXPONENTIALS_BYTES", 0)
        monkeypatch.setattr(logprob_head, "STRIP_BYTES", 4 * WIDTH * 5)
    case = make_case(rows, WIDTH, vocab, dtype=torch.bfloat16)
    options = {"temperature": 0.7, "entropy_gradient": entropy_gradient}
    actual = chunked(*case, chunk_size=None if tile_bytes is None else 7, **options)
    assert_precise(actual, dense(*case, **options))


@pytest.mark.parametrize("strip_bytes", [1, 4 * WIDTH * 3, 2**20])
def test_products_in_strips_are_those_of_the_whole(strip_bytes, monkeypatch):
    monkeypatch.setattr(logprob_head, "STRIP_BYTES", strip_bytes)
    hidden, weight, *_ = make_case(3, WIDTH, 200, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        product = multiply(hidden, weight, torch.empty(3, 200))
    torch.testing.assert_close(product.double(), hidden.double() @ weight.double().t(), **PRECISE)
    assert multiply(hidden[:0], weight, torch.empty(0, 200)).shape == (0, 200)
    assert multiply(hidden, weight[:0], torch.empty(3, 0)).shape == (3, 0)
    # Some rows of the weight exist in float32, but never the whole weight.
    if strip_bytes < 2**20:
        assert largest.elements == 3 * 200 < weight.numel()


def test_products_of_bf16_leave_those_of_float32_precise():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 64, 512, generator=generator)
    exact = left.double() @ right.double().t()
    errors = []
    for _ in range(2):
        errors.append(float((torch.mm(left, right.t()).double() - exact).abs().max()))
        multiply(left.bfloat16(), right.bfloat16(), torch.empty(64, 64))
        assert settings.fp32_precision == before
    assert max(errors) < 1e-4  # with inputs rounded to bf16, elements would differ by 0.1
    with pytest.raises(RuntimeError):
        multiply(left.bfloat16(), right.bfloat16()[:, :9], torch.empty(64, 64))
    assert settings.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_numbers_shapes_and_dtypes_are_the_same(dtype):
    # The estimate of memory runs this operation on the meta device.
    kind = {"device": "meta", "dtype": dtype, "requires_grad": True}
    hidden, weight = torch.empty(5000, WIDTH, **kind), torch.empty(3000, WIDTH, **kind)
    targets = torch.empty(5000, dtype=torch.long, device="meta")
    logprob, entropy = logprob_and_entropy(hidden, weight, targets)
    logprob.sum().backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.shape) == (dtype, weight.shape)
