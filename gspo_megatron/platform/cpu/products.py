"""Chooses the library that computes a matrix product on a CPU: MKL, which is torch's default for
float32, or oneDNN.

MKL has no AVX-512 kernels for AMD's processors. There, oneDNN computes large float32 products, in
rollouts and in training. Old log-probs, updates and recomputed layers use the same library for the
same shapes, so they agree bit for bit.

Decoding reads all weights for each token, and has few rows. oneDNN is faster there if a weight is
in oneDNN's own layout. `packed_weights` makes such copies for a rollout. They also serve bf16,
which torch always computes with oneDNN. The measurements are in
docs/decisions/0118-float32-products-on-amd.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.platform.cpu import faster
from gspo_megatron.platform.cpu.needed import is_needed

# oneDNN prepares each new shape, which takes 0.17 ms. Smaller products take no longer than this.
FEWEST_MULTIPLICATIONS = 2**23
# Smaller weights are not packed: their products are too short to gain. MKL is good at float32 on
# Intel's processors, so oneDNN only takes the large weights there.
SMALLEST_PACKED = 2**18
SMALLEST_PACKED_BESIDE_MKL = 2**20

_packed: dict[int, Tensor] | None = None  # by address; None: outside of `packed_weights`


def adapt_megatron() -> None:
    """Let `linear` compute Megatron-Core's linear layers on a CPU."""
    if not (faster.IS_ON and is_needed()):
        return
    from megatron.core.tensor_parallel import layers

    for layer in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        layer._forward_impl = _unless_exchanging(layer._forward_impl)


def _unless_exchanging(native: Any) -> Any:
    """Replace the product of a linear layer. A layer that exchanges its input or its gradient with
    other ranks stays as it is, because stock Megatron-Core does this beside the product."""

    @functools.wraps(native)
    def multiply(self: Any, input: Tensor, weight: Tensor, *others: Any, **named: Any) -> Tensor:
        switches = [value for name, value in named.items() if name not in ("bias", "tp_group")]
        if others or any(switches) or not takes_onednn(input, weight):
            return native(self, input, weight, *others, **named)
        return linear(input, weight, named.get("bias"))

    return multiply


@contextlib.contextmanager
def packed_weights() -> Generator[None]:
    """Keep copies of large weights in oneDNN's layout while the context lasts. The weights must not
    change meanwhile. A weight is packed when it is first used."""
    global _packed
    _packed = {}
    try:
        yield
    finally:
        _packed = None


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] and a weight [out, in] -> [..., out], as torch.nn.functional.linear."""
    if not takes_onednn(rows, weight):
        return F.linear(rows, weight, bias)
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        output = _Linear.apply(rows, weight)
        return output if bias is None else output + bias
    if _packed is not None and weight.numel() >= SMALLEST_PACKED:
        address = weight.data_ptr()
        if address not in _packed:
            _packed[address] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        weight = _packed[address]
    return _by_onednn(rows, weight, bias)


def _by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """Rows [..., in] @ weight [out, in].t() by oneDNN, for which torch has no gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        return _by_onednn(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (rows, weight), (needs_rows, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradient.contiguous()  # it may repeat one row, which oneDNN does not know
        rows_grad = _by_onednn(gradient, weight.t()) if needs_rows else None
        if not needs_weight:
            return rows_grad, None
        columns = gradient.flatten(0, -2).t().contiguous()  # [out, rows], faster than the view
        return rows_grad, _by_onednn(columns, rows.flatten(0, -2).t())


def takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN shall multiply rows [..., in] by a weight [out, in], or by a stack of
    weights [experts, out, in] of which each gets its share of the rows."""
    if not faster.applies_to(rows):
        return False
    products = weight.shape[0] if weight.dim() == 3 else 1
    size = weight.numel() // products
    if rows.dtype is torch.bfloat16:
        return _packed is not None and size >= SMALLEST_PACKED and _has_bf16()
    if rows.dtype is not torch.float32:
        return False
    if _is_onednn_faster() and (_has_avx512() or torch.is_inference_mode_enabled()):
        return rows.numel() * weight.shape[-2] >= products * FEWEST_MULTIPLICATIONS
    return _packed is not None and size >= SMALLEST_PACKED_BESIDE_MKL and _has_avx512()


@functools.cache
def _is_onednn_faster() -> bool:
    """Decided by the processor and not by a measurement: the two libraries round differently, and
    two runs with the same seed shall have the same samples."""
    return "AuthenticAMD" in _processor() and torch.backends.mkldnn.is_available()


@functools.cache
def _has_avx512() -> bool:
    return " avx512f " in _processor() and torch.backends.mkldnn.is_available()


@functools.cache
def _has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return ""
