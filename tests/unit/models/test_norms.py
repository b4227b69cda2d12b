"""RMSNorm and LayerNorm against their formulas in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gspo_megatron.models.norms import TorchNorm

SIZE, EPS = 24, 1e-6


def fresh_norm(
    normalization: str, zero_centered: bool, dtype: torch.dtype, sp: bool = False
) -> TorchNorm:
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        params_dtype=dtype,
        sequence_parallel=sp,
    )
    return TorchNorm(config, SIZE, eps=EPS)


def make_norm(
    normalization: str, zero_centered: bool, dtype: torch.dtype = torch.float64
) -> TorchNorm:
    norm = fresh_norm(normalization, zero_centered, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += 0.3 * torch.randn(SIZE, generator=generator).to(dtype)
    return norm


def reference(norm: TorchNorm, hidden: Tensor, zero_centered: bool) -> Tensor:
    hidden = hidden.double()
    weight = norm.weight.double() + (1.0 if zero_centered else 0.0)
    bias: Tensor | float = 0.0
    if norm.centered:
        hidden = hidden - hidden.sum(-1, keepdim=True) / SIZE
        bias = norm.bias.double()
    mean_square = (hidden * hidden).sum(-1, keepdim=True) / SIZE
    return hidden / (mean_square + EPS).sqrt() * weight + bias


def random_hidden(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    hidden = 5.0 * torch.randn(11, 3, SIZE, generator=generator, dtype=torch.float64) + 1.0
    hidden[0] *= 1e-4  # where eps matters
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


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_bf16_is_rounded_once(normalization: str) -> None:
    norm = make_norm(normalization, False, torch.bfloat16)
    hidden = random_hidden(torch.bfloat16)
    output, expected = norm(hidden), reference(norm, hidden, False)
    assert output.dtype == torch.bfloat16
    # bf16 keeps 8 bits, so rounding costs up to 2^-8; a little more for the fp32 arithmetic before
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=2**-8 * 1.01)


@pytest.mark.parametrize("flag", [False, True])
def test_a_fresh_norm_scales_by_one_and_bears_the_mark_of_sequence_parallelism(flag: bool) -> None:
    norm = fresh_norm("LayerNorm", flag, torch.float32, sp=flag)
    assert norm.weight.unique().tolist() == [0.0 if flag else 1.0]
    assert norm.bias.unique().tolist() == [0.0]
    marks = {name: p.sequence_parallel for name, p in norm.named_parameters()}
    assert marks == {"weight": flag, "bias": flag}
