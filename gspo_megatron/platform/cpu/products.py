"""Chooses between torch's two libraries for float32 matrix products on a CPU.

torch takes MKL. For AMD's processors, MKL has no AVX-512 kernels, and it is slow with the few rows
of a decoding pass. oneDNN is up to twice as fast there. Only decoding (inference mode) uses it:
torch offers oneDNN's float32 product without gradients, and old log-probs, updates and recomputed
layers must agree bit for bit (docs/decisions/0118-float32-stays-with-mkl.md).
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_megatron.platform.cpu import faster

# oneDNN prepares each new shape, which takes 0.17 ms. Smaller products take no longer than this.
FEWEST_MULTIPLICATIONS = 2**23


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] and a weight [out, in] -> [..., out], as torch.nn.functional.linear."""
    if takes_onednn(rows, weight):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return F.linear(rows, weight, bias)


def takes_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN shall multiply rows [..., in] by a weight [out, in], or by a stack of
    weights [experts, out, in] of which each gets its share of the rows."""
    products = weight.shape[0] if weight.dim() == 3 else 1
    return (
        rows.numel() * weight.shape[-2] >= products * FEWEST_MULTIPLICATIONS
        and rows.dtype is torch.float32
        and torch.is_inference_mode_enabled()
        and faster.applies_to(rows)
        and _is_onednn_faster()
    )


@functools.cache
def _is_onednn_faster() -> bool:
    """Decided by the processor and not by a measurement: the two libraries round differently, and
    two runs with the same seed shall have the same samples."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "AuthenticAMD" in processor and torch.backends.mkldnn.is_available()
