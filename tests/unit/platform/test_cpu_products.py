"""The choice between MKL and oneDNN for float32 products changes no result beyond rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder, run_chunk
from gspo_megatron.models.build import Policy
from gspo_megatron.models.experts import grouped_linear
from gspo_megatron.platform.cpu import faster, products
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from tests.unit.models.one_rank import (
    PAD,
    micro_batch,
    one_rank_groups,
    random_sequences,
    tiny_policy,
)

ONEDNN = "_linear_pointwise"
LENGTHS = [(4, 9), (7, 5), (1, 8)]

needs_onednn = pytest.mark.skipif(
    not (faster.IS_ON and torch.backends.mkldnn.is_available()),
    reason="torch was built without oneDNN, or GSPO_CPU_FASTER=0",
)


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(operator.__name__.split(".")[0])
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """On any processor, every product in float32 goes to oneDNN."""
    monkeypatch.setattr(products, "_is_onednn_faster", lambda: True)
    monkeypatch.setattr(products, "_has_avx512", lambda: True)
    monkeypatch.setattr(products, "FEWEST_MULTIPLICATIONS", 1)
    return monkeypatch


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_product(output: Tensor, rows: Tensor, weight: Tensor) -> None:
    """The output is rows @ weight.t(), within float32's rounding of sums of `in` terms."""
    exact = rows.double() @ weight.double().t()
    bound = rows.double().abs() @ weight.double().abs().t() * rows.shape[-1] * 2.0**-24
    assert ((output.double() - exact).abs() <= bound + 1e-12).all()


def gradients_of(policy: Policy, batch: MicroBatch) -> dict[str, Tensor]:
    """The log-probs of a batch, and the gradients of their sum by the name of the parameter."""
    (model,) = policy.models
    model.zero_grad()
    logprobs, _ = run_chunk(model, batch)
    logprobs.sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients | {"log-probs": logprobs.detach()}


@needs_onednn
def test_packed_weights_give_the_same_bits(onednn: pytest.MonkeyPatch) -> None:
    onednn.setattr(products, "SMALLEST_PACKED", 1)
    rows, weight = random(5, 37), random(19, 37)
    with torch.inference_mode():
        plain = products.linear(rows, weight)
        with products.packed_weights(), Operators() as operators:
            packed = [products.linear(rows[:n], weight) for n in (5, 3)]
    assert operators.names.count("_reorder_linear_weight") == 1 and products._packed is None
    assert torch.equal(packed[0], plain) and torch.equal(packed[1], plain[:3])


@needs_onednn
@pytest.mark.skipif(not products._has_bf16(), reason="oneDNN has no bf16 for this processor")
def test_packed_weights_in_bf16(onednn: pytest.MonkeyPatch) -> None:
    rows, weight = random(5, 64).bfloat16(), random(32, 64).bfloat16()
    with torch.inference_mode(), products.packed_weights():
        assert not products.takes_onednn(rows, weight)  # too small
        onednn.setattr(products, "SMALLEST_PACKED", 1)
        assert products.takes_onednn(rows, weight)
        found = products.linear(rows, weight)
    assert found.dtype is torch.bfloat16
    exact = rows.double() @ weight.double().t()
    # sums in float32, rounded once
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.01, atol=1e-4)


@needs_onednn
def test_large_weights_on_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_onednn_faster", lambda: False)
    monkeypatch.setattr(products, "_has_avx512", lambda: True)
    monkeypatch.setattr(products, "SMALLEST_PACKED_BESIDE_MKL", 48)
    rows, weight, smaller = random(2, 8), random(6, 8), random(5, 8)
    with torch.inference_mode():
        assert not products.takes_onednn(rows, weight)
        with products.packed_weights():
            assert products.takes_onednn(rows, weight)
            assert products.takes_onednn(rows, weight.expand(3, 6, 8))
            assert not products.takes_onednn(rows, smaller)


@needs_onednn
@pytest.mark.parametrize("is_packed", [False, True])
def test_greedy_responses_are_the_same(onednn: pytest.MonkeyPatch, is_packed: bool) -> None:
    """All three users in decoding: linear layers, experts, and the head."""
    onednn.setattr(products, "SMALLEST_PACKED", 1 if is_packed else 2**40)
    with one_rank_groups():
        engine = MegatronEngine(tiny_policy(), pad_id=0, eos_id=1)
        prompts = Requests([[3, 4], [5, 6, 7, 8, 9], [10]], [0, 1, 2])
        sampling = Sampling(12, temperature=0.0)
        with Operators() as operators:
            ours = engine.generate(prompts, sampling, 1)
        assert ONEDNN in operators.names and "_grouped_mm" not in operators.names
        assert ("_reorder_linear_weight" in operators.names) is is_packed
        onednn.setattr(products, "_is_onednn_faster", lambda: False)
        with Operators() as operators:
            native = engine.generate(prompts, sampling, 1)
        assert ONEDNN not in operators.names
    assert torch.equal(ours.tokens, native.tokens)
    # a dozen sums in float32, one after the other
    torch.testing.assert_close(ours.rollout_logprobs, native.rollout_logprobs, rtol=2e-5, atol=2e-6)


@needs_onednn
@pytest.mark.parametrize("shape", [(7,), (1, 5), (3, 4)])
@pytest.mark.parametrize("trained", ["both", "rows", "weight"])
def test_a_linear_layer(onednn: pytest.MonkeyPatch, shape: tuple[int, ...], trained: str) -> None:
    rows, weight, bias = random(*shape, 37), random(19, 37), random(19).requires_grad_()
    factors = random(*shape, 19)
    rows.requires_grad_(trained != "weight")
    weight.requires_grad_(trained != "rows")
    with Operators() as operators:
        output = products.linear(rows, weight, bias)
        (output * factors).sum().backward()
    assert operators.names.count(ONEDNN) == (3 if trained == "both" else 2)
    assert "mm" not in operators.names and "addmm" not in operators.names
    assert_product((output - bias).detach().flatten(0, -2), rows.detach().flatten(0, -2), weight)
    factors = factors.flatten(0, -2)
    if rows.grad is not None:
        assert_product(rows.grad.flatten(0, -2), factors, weight.detach().t())
    if weight.grad is not None:
        assert_product(weight.grad, factors.t(), rows.detach().flatten(0, -2).t())
    assert (rows.grad is None, weight.grad is None) == (trained == "weight", trained == "rows")
    torch.testing.assert_close(bias.grad, factors.sum(0))


@needs_onednn
def test_a_gradient_that_is_one_row_for_all(onednn: pytest.MonkeyPatch) -> None:
    rows, weight = random(5, 37), random(19, 37).requires_grad_()
    products.linear(rows, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, rows.sum(0).expand(19, 37), rtol=1e-5, atol=1e-6)


@needs_onednn
def test_experts_of_which_one_has_no_rows(onednn: pytest.MonkeyPatch) -> None:
    counts, factors = torch.tensor([3, 0, 8]), random(11, 24)
    rows, weight = random(11, 16).requires_grad_(), random(3, 24, 16).requires_grad_()
    with Operators() as operators:
        output = grouped_linear(rows, weight, counts, counts.cumsum(0).int())
        (output * factors).sum().backward()
    assert operators.names.count(ONEDNN) == 6 and "_grouped_mm" not in operators.names
    assert rows.grad is not None and weight.grad is not None
    columns = (rows.detach(), output.detach(), factors, rows.grad)
    parts = [each.split([3, 0, 8]) for each in columns]
    for run, product, factor, run_grad, matrix, matrix_grad in zip(
        *parts, weight.detach(), weight.grad
    ):
        assert_product(product, run, matrix)
        assert_product(run_grad, factor, matrix.t())
        assert_product(matrix_grad, factor.t(), run.t())


@needs_onednn
def test_all_modes_have_the_same_bits(onednn: pytest.MonkeyPatch) -> None:
    """Old log-probs and a recomputed layer's first pass have no gradients, and updates have."""
    rows, weight, bias = random(9, 37), random(19, 37), random(19)
    outputs = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        trained = weight.clone().requires_grad_()
        with mode():
            outputs.append(products.linear(rows, trained, bias).detach())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@needs_onednn
def test_log_probs_and_gradients_of_a_policy(onednn: pytest.MonkeyPatch) -> None:
    """All users in training: the linear layers of Megatron-Core, experts, and the head."""
    with one_rank_groups():
        policy = tiny_policy()
        batch = micro_batch(MicroBatchBuilder(policy, PAD, 1.0), random_sequences(3, LENGTHS))
        with Operators() as operators:
            ours = gradients_of(policy, batch)
        # In each of two layers: queries with keys and values, the output of attention, and the two
        # products of each expert that has rows. A router is no linear layer of Megatron-Core.
        layers = 2 * (2 + 2 * 4)
        assert operators.names.count(ONEDNN) >= 3 * layers + 3
        onednn.setattr(products, "_is_onednn_faster", lambda: False)
        with Operators() as operators:
            native = gradients_of(policy, batch)
        assert ONEDNN not in operators.names
    # sums in float32 in another order, one after the other
    for name, value in ours.items():
        scale = native[name].abs().max()
        torch.testing.assert_close(value, native[name], rtol=2e-5, atol=float(2e-6 * scale) + 1e-9)


@needs_onednn
def test_small_products_and_other_dtypes_stay(onednn: pytest.MonkeyPatch) -> None:
    rows, weight = random(4, 8), random(6, 8)
    weights = weight.expand(3, 6, 8)
    assert products.takes_onednn(rows, weight)
    assert not products.takes_onednn(rows.bfloat16(), weight.bfloat16())
    assert not products.takes_onednn(rows.double(), weight.double())
    assert not products.takes_onednn(rows.to("meta"), weight)
    onednn.setattr(products, "FEWEST_MULTIPLICATIONS", 4 * 8 * 6)
    assert products.takes_onednn(rows, weight)
    assert not products.takes_onednn(rows[:3], weight)
    # 4 rows for three experts are fewer than 4 rows for each
    assert not products.takes_onednn(rows, weights)
    assert products.takes_onednn(rows.repeat(3, 1), weights)
    # without AVX-512, oneDNN has no advantage in training
    onednn.setattr(products, "_has_avx512", lambda: False)
    assert not products.takes_onednn(rows, weight)
    with torch.inference_mode():
        assert products.takes_onednn(rows, weight)


@pytest.mark.parametrize(
    ("vendor", "expected"), [("GenuineIntel", False), ("AuthenticAMD", True), (None, False)]
)
def test_the_processor_decides(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, expected: bool
) -> None:
    def read(self: Path, **_: Any) -> str:
        if vendor is None:
            raise FileNotFoundError(self)
        return f"processor\t: 0\nvendor_id\t: {vendor}\n"

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products._is_onednn_faster.__wrapped__() is expected
