"""Grouped experts compared with a loop over tokens, and norms compared with their formulas in
float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_megatron.models.experts import (
    GroupedExperts,
    WeightedSwiGlu,
    grouped_linear,
    pad_to_blocks,
)
from gspo_megatron.models.lora import kind_of_layer
from gspo_megatron.models.norms import TorchNorm
from gspo_megatron.platform.cpu import faster
from tests.unit.models.one_rank import tiny_policy

# Tolerances relative to the largest entry. The errors come from rounding in dot products of 20 to
# 64 terms.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}
COUNTS = {
    "ragged": [3, 1, 7, 2],
    "empty experts": [0, 5, 0, 0, 4, 0],
    "one expert": [6],
    "one row": [0, 1, 0],
    "no rows": [0, 0, 0],
}
SHAPES = {"aligned": (16, 24), "unaligned": (5, 7), "in unaligned": (6, 8)}


def random_case(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + shape[0])
    inside, outside = shape
    rows = torch.randn(sum(counts), inside, generator=generator).to(dtype)
    weight = torch.randn(len(counts), outside, inside, generator=generator).to(dtype)
    return rows.requires_grad_(), weight.requires_grad_()


def by_row(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """The product of one row and one expert at a time, in float64."""
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    products = [weight[expert].double() @ row.double() for row, expert in zip(rows, expert_of_row)]
    return torch.stack(products) if products else rows.double() @ weight[0].double().T


def assert_near(value: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(value.double(), expected, atol=tolerance * scale, rtol=0.0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_grouped_linear_and_its_gradients(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, weight = random_case(counts, shape, dtype)
    counts = torch.tensor(counts)
    output = grouped_linear(rows, weight, counts, counts.cumsum(0).int())
    assert output.dtype == dtype and output.shape == (sum(counts), shape[1])
    expected = by_row(rows, weight, counts)
    tolerance = TOLERANCES[dtype]
    assert_near(output, expected, tolerance)

    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = torch.autograd.grad((output * weights).sum(), (rows, weight))
    wanted = torch.autograd.grad((expected * weights.double()).sum(), (rows, weight))
    for gradient, by_hand in zip(got, wanted, strict=True):
        assert_near(gradient, by_hand.double(), tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("gated", "activation"), [(True, F.silu), (False, F.gelu)])
def test_experts_as_a_loop_over_tokens(
    one_rank: None, precision: str, gated: bool, activation: object
) -> None:
    policy = tiny_policy(
        model={
            "megatron": {
                "num_layers": 1,
                "gated_linear_unit": gated,
                "activation_func": "silu" if gated else "gelu",
                "init_method_std": 0.3,  # gives outputs of size 1
            }
        },
        training={"precision": precision},
    )
    experts = policy.models[0].decoder.layers[0].mlp.experts
    assert type(experts) is GroupedExperts
    counts = torch.tensor([3, 0, 2, 4, 0, 1, 1, 5])
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(int(counts.sum()), 64, generator=generator).to(experts.weight1.dtype)
    probs = torch.rand(len(tokens), generator=generator)
    with torch.no_grad():
        output, bias = experts(tokens, counts, probs)
    assert bias is None and output.dtype == tokens.dtype

    expert_of_row = torch.arange(8).repeat_interleave(counts).tolist()
    expected = []
    for token, expert, prob in zip(tokens.double(), expert_of_row, probs.double(), strict=True):
        projections = [w.double() @ token for w in experts.weight1[expert].detach()]
        states = activation(projections[0])
        if gated:
            states = states * projections[1]
        expected.append(experts.weight2[expert].detach().double() @ states * prob)
    # bf16 rounds three times before the second product
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
    assert_near(output, torch.stack(expected), tolerance)


def with_kept_bytes(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, int]:
    """The output, and the bytes that are kept for its backward pass."""
    sizes: dict[int, int] = {}  # by the address of the memory

    def look(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        return function(*given), sum(sizes.values())


@pytest.mark.parametrize(("rows", "strip"), [(0, 9), (1, 9), (37, 37), (37, 9), (2, 0)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_weighted_swiglu_is_the_plain_expression(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, strip: int
) -> None:
    """Bit for bit, with the same gradients, for any number of rows that are computed at a time. The
    router's weights are in fp32 at least."""
    monkeypatch.setattr(faster, "STRIP", strip * 2 * 19)
    generator = torch.Generator().manual_seed(rows)
    wide = torch.promote_types(dtype, torch.float32)
    states = torch.randn(rows, 2 * 19, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(rows, 1, generator=generator).to(wide).requires_grad_()
    gradient = torch.randn(rows, 19, generator=generator).to(dtype)

    def plain(states: Tensor, weights: Tensor) -> Tensor:
        gate, up = states.chunk(2, dim=-1)
        return (F.silu(gate) * up * weights).to(dtype)

    found, kept = [], []
    for function in (plain, WeightedSwiGlu.apply):
        output, size = with_kept_bytes(function, states, weights)
        kept.append(size)
        found.append([output, *torch.autograd.grad(output, (states, weights), gradient)])
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)
    if rows:
        # only the inputs are kept
        inputs = states.untyped_storage().nbytes() + weights.untyped_storage().nbytes()
        assert kept[1] == inputs < kept[0]


@pytest.mark.parametrize("counts", [[64, 1, 0, 65, 128], [0, 0, 3], [200]], ids=str)
def test_padded_rows_of_experts(counts: list[int]) -> None:
    rows, places, padded = pad_to_blocks(torch.tensor(counts))
    assert padded.tolist() == [-(-count // 64) * 64 for count in counts]
    assert rows[places].tolist() == list(range(sum(counts)))  # each row is found again
    ends = padded.cumsum(0).tolist()
    expert = [sum(place >= end for end in ends) for place in places.tolist()]
    assert expert == [e for e, count in enumerate(counts) for _ in range(count)]
    others = torch.ones(len(rows), dtype=torch.bool)
    others[places] = False
    assert not rows[others].any()


@pytest.mark.parametrize("lora", [False, True])
def test_padding_changes_neither_outputs_nor_gradients_of_experts(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    megatron = {"num_layers": 1, "add_bias_linear": not lora, "init_method_std": 0.3}
    model = {"megatron": megatron} | ({"lora": {"rank": 4}} if lora else {})
    policy = tiny_policy(model=model, training={"precision": "bf16"})
    experts = policy.models[0].decoder.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(5)
    counts = torch.tensor([150, 0, 321, 64, 1, 207, 190, 111])
    weights = [p for p in experts.parameters() if p.requires_grad]
    with torch.no_grad():
        for weight in weights:  # biases and adapters begin with zeros
            weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    tokens = torch.randn(1044, 64, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(1044, generator=generator).requires_grad_()
    upstream = torch.randn(1044, 64, generator=generator).bfloat16()
    results = []
    for is_on in (True, False):
        monkeypatch.setattr(faster, "IS_ON", is_on)
        output, _ = experts(tokens, counts, probs)
        gradients = torch.autograd.grad(output, [tokens, probs, *weights], upstream)
        results.append([output, *gradients])
    for padded, plain in zip(*results, strict=True):
        assert plain.abs().max() > 0
        # sums of up to 321 terms, rounded to BF16 once, perhaps in another order
        assert_near(padded, plain.double(), 1e-2)


# --- RMSNorm and LayerNorm against their formulas in float64 -------------------------------------

WIDTH, EPS = 24, 1e-6


def fresh_norm(
    normalization: str, zero_centered: bool, dtype: torch.dtype, sp: bool = False
) -> TorchNorm:
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        params_dtype=dtype,
        sequence_parallel=sp,
    )
    return TorchNorm(config, WIDTH, eps=EPS)


def make_norm(
    normalization: str, zero_centered: bool, dtype: torch.dtype = torch.float64
) -> TorchNorm:
    norm = fresh_norm(normalization, zero_centered, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += 0.3 * torch.randn(WIDTH, generator=generator).to(dtype)
    return norm


def reference(norm: TorchNorm, hidden: Tensor, zero_centered: bool) -> Tensor:
    hidden = hidden.double()
    weight = norm.weight.double() + (1.0 if zero_centered else 0.0)
    bias: Tensor | float = 0.0
    if norm.centered:
        hidden = hidden - hidden.sum(-1, keepdim=True) / WIDTH
        bias = norm.bias.double()
    mean_square = (hidden * hidden).sum(-1, keepdim=True) / WIDTH
    return hidden / (mean_square + EPS).sqrt() * weight + bias


def random_hidden(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    hidden = 5.0 * torch.randn(11, 3, WIDTH, generator=generator, dtype=torch.float64) + 1.0
    hidden[0] *= 1e-4  # small enough to make eps matter
    return hidden.to(dtype).requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_output_and_gradients(normalization: str, zero_centered: bool) -> None:
    norm = make_norm(normalization, zero_centered)
    hidden = random_hidden(torch.float64)
    output, expected = norm(hidden), reference(norm, hidden, zero_centered)
    torch.testing.assert_close(output, expected, atol=1e-11, rtol=1e-11)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).double()
    inputs = [hidden, *norm.parameters()]
    got = torch.autograd.grad((output * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, by_hand in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, by_hand, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_bf16_is_rounded_once(
    normalization: str, zero_centered: bool, is_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also 1 + weight, by the functions for CPUs and by those for GPUs."""
    monkeypatch.setattr(faster, "IS_ON", is_on_cpu)
    norm = make_norm(normalization, zero_centered, torch.bfloat16)
    hidden = random_hidden(torch.bfloat16)
    output, expected = norm(hidden), reference(norm, hidden, zero_centered)
    assert output.dtype == torch.bfloat16
    # Rounding to bf16 costs up to 2^-8, and the fp32 arithmetic before it a little more.
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=2**-8 * 1.01)


@pytest.mark.parametrize("elements", [faster.STRIP, 5 * WIDTH])
def test_gradients_in_bf16_are_rounded_once(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Also if the rows are computed in strips: here 5 rows, the last strip has 3. The input is a
    slice of a larger tensor, as the queries are."""
    monkeypatch.setattr(faster, "STRIP", elements)
    norm = make_norm("RMSNorm", False, torch.bfloat16)
    whole = torch.cat([random_hidden(torch.bfloat16).detach()] * 2, dim=1).requires_grad_()
    hidden = whole[:, 1:4]
    output, expected = norm(hidden), reference(norm, hidden, False)
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(output.shape, generator=generator).bfloat16()
    got = torch.autograd.grad(output, (whole, norm.weight), upstream)
    wanted = torch.autograd.grad(expected, (whole, norm.weight), upstream.double())
    for gradient, by_hand in zip(got, wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        # 2^-8 of rounding. autograd rounds `by_hand` to bf16, too, so two roundings differ by at
        # most one unit in the last place; the rest is the fp32 arithmetic of sums that cancel.
        torch.testing.assert_close(gradient.double(), by_hand.double(), atol=1e-3, rtol=2**-7)


def test_the_norm_in_bf16_keeps_nothing_but_its_input() -> None:
    """Torch's own norm keeps tensors in fp32, which a large model would feel."""
    norm = make_norm("RMSNorm", False, torch.bfloat16)
    hidden = random_hidden(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(hidden)
    assert [tensor for tensor in kept if tensor.numel() == hidden.numel()] == [hidden]
    assert max(t.numel() for t in kept if t is not hidden) <= hidden.numel() // WIDTH


@pytest.mark.parametrize("flag", [False, True])
def test_a_fresh_norm_scales_by_one_and_bears_the_mark_of_sequence_parallelism(flag: bool) -> None:
    norm = fresh_norm("LayerNorm", flag, torch.float32, sp=flag)
    assert norm.weight.unique().tolist() == [0.0 if flag else 1.0]
    assert norm.bias.unique().tolist() == [0.0]
    marks = {name: p.sequence_parallel for name, p in norm.named_parameters()}
    assert marks == {"weight": flag, "bias": flag}


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("ColumnParallelLinear", "none", "column"),
        ("TELayerNormColumnParallelLinear", "column", "column"),
        # shared experts that overlap with messages
        ("TEColumnParallelLinear", None, "column"),
        ("TERowParallelLinear", None, "row"),
        ("TELinear", None, "copied"),  # latent attention's projections down
        ("ReplicatedLinear", "none", "copied"),
        ("Linear", "none", None),
    ],
)
def test_how_a_layer_is_divided_over_tensor_parallel_ranks(
    name: str, mode: str | None, expected: str | None
) -> None:
    fields = {} if mode == "none" else {"parallel_mode": mode}
    layer = type(name, (torch.nn.Linear,), fields)(3, 2)
    assert kind_of_layer(layer) == expected
