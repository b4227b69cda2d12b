"""Log-probability of given tokens and entropy from hidden states, with a sharded vocabulary.

One differentiable operation computes both. It works on one tile of the logits at a time (some rows
by some columns of the vocabulary), so the logits [rows, vocab/TP] never exist whole. The backward
pass computes the logits of a tile again and needs only the saved log-sum-exp.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.platform.cpu import faster, products

# The rows of a tile, and the bytes of a tile in the dtype of the result. The forward pass holds two
# tiles, the backward pass one. On a CPU a tile of this size stays in the caches between two
# operations. A GPU is faster with larger tiles: on an H200 (32,768 rows, hidden 2,048, vocabulary
# 151,936, bf16) tiles of 32, 64, 128, 256 and 512 MiB took 0.30, 0.27, 0.25, 0.23 and 0.24 s.
TILE_ROWS = 2048
TILE_BYTES = 8 * 2**20
GPU_TILE_BYTES = 256 * 2**20

# If a batch is a single tile of at most this size, its exponentials are kept for the backward pass.
# Small models then compute the logits only once. For large models this memory is negligible.
KEEP_EXPONENTIALS_BYTES = 16 * 2**20

# A device that cannot multiply bf16 into float32 converts this many bytes of a matrix at a time.
# Such a strip fits into the caches, and is large enough to be about as fast as the whole matrix.
STRIP_BYTES = 4 * 2**20

# Logits are kept in units of log 2, because exp2 takes one or two vector instructions and is
# several times faster than exp on a CPU.
_LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


def logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` and full-vocabulary entropies, both [rows], in nats.

    Args:
        hidden: [rows, hidden], the same on every rank of `process_group`.
        weight: [vocab/TP, hidden], this rank's rows of the output layer, of the dtype of `hidden`.
        targets: [rows] int64, ids of the whole vocabulary. The log-probability of a target that is
            not in the vocabulary is NaN.
        temperature: the logits are divided by it before the softmax.
        chunk_size: rows of a tile, by default TILE_ROWS. A tile has as many columns of the
            vocabulary as fit into TILE_BYTES, which bounds the memory.
        process_group: the tensor-parallel group; None where `weight` is the whole vocabulary.
        vocab_start: id of the first row of `weight`.
        vocab_size: true size of the whole vocabulary. Rows of `weight` beyond this size are
            padding: they are left out of the softmax and get no gradient. None: no padding.
        entropy_gradient: let gradients flow through the entropy too.

    Returns:
        Log-probabilities and entropies in float32 (float64 for float64 inputs). The logits and
        everything after them have this dtype too: the sums of products of low-precision inputs are
        not rounded. Gradients of logits are rounded to the inputs' dtype before they are multiplied
        with hidden states and weight.

    The gradient of `hidden` is only this rank's part, from its shard of the vocabulary: the caller
    sums it over the group. The forward pass has two collectives, the backward pass has none.
    """
    assert hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1], (
        f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply"
    )
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    assert targets.shape == hidden.shape[:1], (
        f"targets {tuple(targets.shape)} for hidden {tuple(hidden.shape)}"
    )
    assert temperature > 0, f"temperature {temperature}"
    assert chunk_size is None or chunk_size > 0, f"chunk_size {chunk_size}"
    used = rows_in_vocabulary(weight, vocab_start, vocab_size)
    local = targets - vocab_start
    return VocabParallelLogProb.apply(
        hidden, weight, local, used, temperature, chunk_size, process_group, entropy_gradient
    )


def rows_in_vocabulary(weight: Tensor, vocab_start: int, vocab_size: int | None) -> int:
    """The number of rows of `weight` that are no padding. The last rank may hold only padding."""
    return len(weight) if vocab_size is None else min(max(vocab_size - vocab_start, 0), len(weight))


class VocabParallelLogProb(torch.autograd.Function):
    """The autograd function behind `logprob_and_entropy`. `local_targets` [rows] count from the
    first row of `weight`, of which the first `used` rows are in the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local_targets: Tensor,
        used: int,
        temperature: float,
        chunk_size: int | None,
        process_group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        row_blocks, column_blocks = tiles_of(
            len(hidden), used, chunk_size, dtype.itemsize, hidden.device
        )
        # for each block of columns: maximum, sum of exponentials, sum of logits times exponentials
        block_sums = hidden.new_empty((3, len(column_blocks), len(hidden)), dtype=dtype)
        target_logit = hidden.new_zeros(len(hidden), dtype=dtype)
        buffers = [tile_buffer(hidden, row_blocks, column_blocks, dtype) for _ in range(2)]
        inputs, factor = to_base_2(hidden, temperature, dtype)
        exponentials = None
        for place, columns in enumerate(column_blocks):
            for rows in row_blocks:
                logits = tile_logits(inputs[rows], weight[columns], factor, buffers[0])
                index, inside = locate(local_targets[rows], columns)
                target_logit[rows] += logits.gather(1, index[:, None])[:, 0].where(inside, 0.0)
                exponentials = _tile_sums(logits, buffers[1], block_sums[:, place, rows])
        maximum, scale, sums = _merge(block_sums, process_group)
        owned = ((local_targets >= 0) & (local_targets < used)).to(dtype)
        sums = torch.stack([*sums, (target_logit - maximum) * owned, owned])
        if process_group is not None:
            dist.all_reduce(sums, group=process_group)
        sum_exp, weighted_logit, target_logit, owners = sums
        log_sum = sum_exp.log2()
        # 0/0 = NaN where no rank owns the target: such a target has no probability.
        logprob = (target_logit / owners - log_sum) * LN_2
        entropy = (log_sum - weighted_logit / sum_exp) * LN_2
        norm = None
        is_one_tile = len(row_blocks) * len(column_blocks) == 1
        if is_one_tile and exponentials is not None and not entropy_gradient:
            norm = scale[0] / sum_exp if exponentials.nbytes <= KEEP_EXPONENTIALS_BYTES else None
        ctx.save_for_backward(
            hidden,
            weight,
            local_targets,
            maximum + log_sum,
            entropy,
            None if norm is None else exponentials,
            norm,
        )
        ctx.temperature, ctx.tiles = temperature, (row_blocks, column_blocks)
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, logsumexp, entropy, exponentials, norm = ctx.saved_tensors
        # The logits were divided by the temperature, so their gradients are divided by it, too.
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(entropy)
        logprob_grad = logprob_grad / ctx.temperature
        if entropy_grad is not None:
            entropy_grad = entropy_grad / ctx.temperature
        row_blocks, column_blocks = ctx.tiles
        # Without an entropy gradient the gradient of a row's logits is (p - [is the target]) times
        # one factor. It is applied to the rows of the products, not to every element of the tiles.
        factors = -logprob_grad if entropy_grad is None else None
        sums = GradientSums(hidden, weight, row_blocks, ctx.needs_input_grad, factors)
        if exponentials is None:
            inputs, factor = to_base_2(hidden, ctx.temperature, entropy.dtype)
            buffers = [
                tile_buffer(hidden, row_blocks, column_blocks, entropy.dtype)
                for _ in range(1 if entropy_grad is None else 2)
            ]
        for columns in column_blocks:
            for rows in row_blocks:
                index, inside = locate(local_targets[rows], columns)
                if exponentials is not None:
                    gradient = exponentials * norm[:, None]
                else:
                    log_p = tile_logits(inputs[rows], weight[columns], factor, buffers[0])
                    log_p -= logsumexp[rows, None]
                    p_memory = log_p if factors is not None else _tile(buffers[1], log_p.shape)
                    gradient = torch.exp2(log_p, out=p_memory)
                if entropy_grad is None:
                    at_target = -inside.to(gradient.dtype)
                else:
                    gradient = _softmax_gradient(
                        gradient, log_p, logprob_grad[rows], entropy_grad[rows], entropy[rows]
                    )
                    at_target = logprob_grad[rows] * inside
                gradient.scatter_add_(1, index[:, None], at_target[:, None])
                sums.add(rows, columns, gradient.to(hidden.dtype))
        return *sums.result(), None, None, None, None, None, None


class GradientSums:
    """Sums the gradients of hidden states and weight over the tiles, each only if it is needed.

    Products are summed in float32 or better, because small products would be lost in low precision.
    The weight's gradient is summed for one block of columns at a time. So all tiles of a block of
    columns must come before the next block.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        row_blocks: Sequence[slice],
        needs_grad: Sequence[bool],
        factors: Tensor | None,
    ) -> None:
        """factors: [rows], by which the gradients of the logits are multiplied."""
        self.weight, self.factors = weight, factors
        self.hidden = hidden if factors is None else (hidden * factors[:, None]).to(hidden.dtype)
        precise = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden_grad = torch.zeros_like(hidden, dtype=precise) if needs_grad[0] else None
        self.weight_grad = torch.zeros_like(weight) if needs_grad[1] else None
        self.block_dtype = precise if len(row_blocks) > 1 else weight.dtype

    def add(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add a tile. gradient: the gradient of the tile's logits, in the dtype of the inputs."""
        if self.hidden_grad is not None:
            _add_product(self.hidden_grad[rows], gradient, self.weight[columns])
        if self.weight_grad is None:
            return
        target = self.weight_grad[columns]
        if rows.start == 0:
            self.block_sum = target.to(self.block_dtype)  # `target` itself, or zeros as in `target`
        _add_product(self.block_sum, gradient.t(), self.hidden[rows])
        if rows.stop == len(self.hidden) and self.block_sum.dtype != target.dtype:
            target.copy_(self.block_sum)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The two gradients in the dtype of the inputs."""
        hidden_grad = self.hidden_grad
        if hidden_grad is not None:
            if self.factors is not None:
                hidden_grad *= self.factors[:, None]
            hidden_grad = hidden_grad.to(self.hidden.dtype)
        return hidden_grad, self.weight_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which may be more precise. On a GPU one kernel multiplies and
    adds, and does not round the product in between."""
    if products.takes_onednn(left, right.t()):
        total += products.linear(left, right.t())
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def tiles_of(
    rows: int, columns: int, chunk_size: int | None, element_bytes: int, device: torch.device
) -> tuple[list[slice], list[slice]]:
    """The blocks of rows and the blocks of columns. 0 rows or 0 columns have no blocks."""
    if chunk_size is None and rows * columns * element_bytes <= KEEP_EXPONENTIALS_BYTES:
        return _blocks(rows, max(rows, 1), 1), _blocks(columns, max(columns, 1), 1)
    height = max(min(rows, chunk_size or TILE_ROWS), 1)
    tile_bytes = TILE_BYTES if device.type == "cpu" else GPU_TILE_BYTES
    width = max(tile_bytes // (element_bytes * height), 1)
    # tensor cores and vector registers need aligned rows
    unit = 64 if 64 <= width < columns else 1
    return _blocks(rows, height, 1), _blocks(columns, width // unit * unit, unit)


def _blocks(total: int, largest: int, unit: int) -> list[slice]:
    """Blocks of nearly equal size, at most `largest`. The sizes of all but the last block are
    multiples of `unit`."""
    count = max(-(-total // largest), 1)
    size = max(-(-total // (count * unit)), 1) * unit
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def tile_buffer(
    like: Tensor, row_blocks: list[slice], column_blocks: list[slice], dtype: torch.dtype
) -> Tensor:
    """Flat memory for the first tile, which is the largest."""
    tile = [(blocks[0].stop if blocks else 0) for blocks in (row_blocks, column_blocks)]
    return like.new_empty(math.prod(tile), dtype=dtype)


def locate(local_targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """The index of each target [rows] in a block of columns, and whether the target is inside. For
    a target outside, the index is any valid one."""
    place = local_targets - columns.start
    index = place.clamp(0, columns.stop - columns.start - 1)
    return index, index == place


def to_base_2(hidden: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return hidden states and a factor: (hidden @ weight.t()) * factor are the logits, divided by
    the temperature, in units of log 2. Hidden states in float32 or better are multiplied by the
    factor already here, because they have fewer elements than the logits. The returned factor is
    then 1."""
    factor = _LOG2_E / temperature
    return (hidden * factor, 1.0) if hidden.dtype == dtype else (hidden, factor)


def tile_logits(hidden: Tensor, weight: Tensor, factor: float, buffer: Tensor) -> Tensor:
    """The tile's logits [rows, columns], in the memory and dtype of `buffer`."""
    logits = multiply(hidden, weight, _tile(buffer, (hidden.shape[0], weight.shape[0])))
    return logits if factor == 1.0 else logits.mul_(factor)


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write left [rows, width] @ right [columns, width].t() to `out` [rows, columns]; returns it.

    `left` and `right` have one dtype. `out` has the same dtype, or float32 if this dtype is a low
    precision. With a float32 `out`, the sums are not rounded to the dtype of the inputs (torch.mm
    would round them). A GPU needs no further memory for this. A CPU needs two strips of
    STRIP_BYTES, or of one row if a row is larger.
    """
    if left.dtype == out.dtype:
        if products.takes_onednn(left, right):
            return out.copy_(products.linear(left, right))
        return torch.mm(left, right.t(), out=out)
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=out.dtype, out=out)
    if left.is_meta:  # some versions of torch have no such product on the meta device
        return out
    step = max(STRIP_BYTES // max(left.shape[1] * out.itemsize, 1), 1)
    is_bf16 = left.dtype is torch.bfloat16 and faster.applies_to(left)
    with _bf16_instructions() if is_bf16 else contextlib.nullcontext():
        for rows, result in zip(left.split(step), out.split(step), strict=True):
            rows = rows.to(out.dtype)
            for columns, part in zip(right.split(step), result.split(step, dim=1), strict=True):
                torch.mm(rows, columns.to(out.dtype).t(), out=part)
    return out


@contextlib.contextmanager
def _bf16_instructions() -> Generator[None]:
    """Let oneDNN round the elements of float32 matrices to bf16 when it multiplies them. For
    elements that come from bf16 this rounding is exact. On a CPU with bf16 instructions, the
    products then take a fraction of the time. Sums and results stay in float32."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # from torch 2.9 on
    if matmul is None:
        yield
        return
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _tile(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: math.prod(shape)].view(*shape)


def _tile_sums(logits: Tensor, buffer: Tensor, block_sums: Tensor) -> Tensor:
    """Write three numbers of each row of a tile to `block_sums` [3, rows]: the maximum, the sum of
    exponentials, and the sum of shifted logits times exponentials. Overwrites the logits. Returns
    the exponentials, shifted by the maximum, in the memory of `buffer`."""
    maximum = logits.amax(dim=-1)
    logits -= maximum[:, None]
    exponentials = torch.exp2(logits, out=_tile(buffer, logits.shape))
    block_sums[0] = maximum
    block_sums[1] = exponentials.sum(-1)
    block_sums[2] = logits.mul_(exponentials).sum(-1)
    return exponentials


def _merge(
    block_sums: Tensor, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Add up the results of `_tile_sums` [3, blocks, rows] over all blocks, relative to one
    maximum.

    Returns the maximum over all ranks [rows], the factor that makes each block's exponentials
    relative to this maximum [blocks, rows], and this rank's two sums [rows] each.
    """
    maxima, sum_exp, weighted_logit = block_sums
    if len(maxima) == 1 and process_group is None:
        return maxima[0], torch.ones_like(maxima), (sum_exp[0], weighted_logit[0])
    maximum = row_maximum(maxima, process_group)
    shift = maxima - maximum
    scale = shift.exp2()
    weighted_logit = (weighted_logit + shift * sum_exp) * scale
    return maximum, scale, ((sum_exp * scale).sum(0), weighted_logit.sum(0))


def row_maximum(maxima: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """The maximum of each row [rows], from `maxima` [blocks, rows], over all blocks of all
    ranks."""
    # a rank with only padding has no blocks
    lowest = maxima.new_full((1, maxima.shape[1]), -math.inf)
    maximum = (maxima if len(maxima) else lowest).amax(0)
    if process_group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=process_group)
    return maximum


def _softmax_gradient(
    p: Tensor, log_p: Tensor, logprob_grad: Tensor, entropy_grad: Tensor, entropy: Tensor
) -> Tensor:
    """Gradient of the logits [rows, columns], without the targets' term; overwrites `p` and
    `log_p`.

    d logprob / d logit_j = [j is the target] - p_j and d entropy / d logit_j = -p_j (log p_j + H).
    `log_p` is in units of log 2.
    """
    log_p *= LN_2
    log_p += entropy[:, None]
    log_p *= entropy_grad[:, None]
    log_p += logprob_grad[:, None]
    return p.mul_(log_p).neg_()
