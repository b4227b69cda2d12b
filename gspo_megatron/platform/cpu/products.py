"""Chooses torch's way to compute a matrix product on a CPU while the policy decodes.

Decoding reads all weights for each token, and has few rows. oneDNN is faster there if a weight is
in oneDNN's own layout. `packed_weights` makes such copies for a rollout. They also serve bf16,
which torch always computes with oneDNN. For float32, torch's default is MKL, which has no AVX-512
kernels for AMD's processors.

Only inference mode uses this file: torch offers oneDNN's products without gradients, and old
log-probs, updates and recomputed layers must agree bit for bit
(docs/decisions/0118-float32-stays-with-mkl.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_megatron.platform.cpu import faster

# oneDNN prepares each new shape, which takes 0.17 ms. Smaller products take no longer than this.
FEWEST_MULTIPLICATIONS = 2**23
# Smaller weights are not packed: their products are too short to gain. MKL is good at float32 on
# Intel's processors, so oneDNN only takes the large weights there.
SMALLEST_PACKED = 2**18
SMALLEST_PACKED_BESIDE_MKL = 2**20

_packed: dict[int, Tensor] | None = None  # by address; None: outside of `packed_weights`


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
    if _packed is not None and weight.numel() >= SMALLEST_PACKED:
        address = weight.data_ptr()
        if address not in _packed:
            _packed[address] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        weight = _packed[address]
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN shall multiply rows [..., in] by a weight [out, in], or by a stack of
    weights [experts, out, in] of which each gets its share of the rows."""
    if not torch.is_inference_mode_enabled() or not faster.applies_to(rows):
        return False
    products = weight.shape[0] if weight.dim() == 3 else 1
    size = weight.numel() // products
    if rows.dtype is torch.bfloat16:
        return _packed is not None and size >= SMALLEST_PACKED and _has_bf16()
    if rows.dtype is not torch.float32:
        return False
    if _is_onednn_faster():
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
