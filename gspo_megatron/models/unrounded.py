"""Products of bf16 matrices in float32: logits that are not rounded to the inputs' 8 bits.

The product of two numbers of bf16 is exact in float32. What torch's ordinary product loses is at
its end, where it rounds the sums to the dtype of the inputs: by up to 0.06 at logits of 16 to 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of each matrix, converted at a time where a device cannot multiply bf16 into float32: small enough
# for the caches, and still large enough for the products to be about as fast as that of the whole.
STRIP_BYTES = 4 * 2**20


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left [rows, width] @ right [columns, width].t() in `out` [rows, columns], which is returned.

    `left` and `right` are of one dtype, `out` is of the same or, for low precision, of float32, in
    which the sums are then taken and left. A GPU needs no memory for that, a CPU two strips of
    STRIP_BYTES (or of a single row, where that is more).
    """
    if left.dtype == out.dtype:
        return torch.mm(left, right.t(), out=out)
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=out.dtype, out=out)
    if left.is_meta:  # no numbers; some versions of torch have no such product of shapes alone
        return out
    step = max(STRIP_BYTES // max(left.shape[1] * out.itemsize, 1), 1)
    for rows, result in zip(left.split(step), out.split(step), strict=True):
        rows = rows.to(out.dtype)
        for columns, part in zip(right.split(step), result.split(step, dim=1), strict=True):
            torch.mm(rows, columns.to(out.dtype).t(), out=part)
    return out
