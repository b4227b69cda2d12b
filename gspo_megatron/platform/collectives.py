"""Small collectives between steps: a few numbers or lines of text that all ranks must know."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.errors import DataError, UserError, error_of

T = TypeVar("T")
_LINES_SHOWN = 16  # the most problems in one message


def on_main(work: Callable[[], T]) -> T:
    """Call `work` on rank 0. Every rank returns the result of `work` or raises its UserError. The
    error's class is the same on all ranks, because they must agree on what follows, such as saving
    the run.

    An OSError that names a file becomes a UserError, so that all ranks end with it. Any other error
    is raised on rank 0 alone. The other ranks wait here until the launcher ends them.
    """
    result: Any = None
    error: UserError | None = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except UserError as caught:
            error = caught
        except OSError as caught:
            if caught.filename is None:
                raise
            error = UserError(f"{caught.filename}: {caught.strerror}")
    failure = None if error is None else (type(error).__name__, str(error))
    result, failure = from_rank((result, failure), 0)
    if failure is not None:
        raise error or error_of(*failure)
    return result


def from_rank(value: T, source: int, group: dist.ProcessGroup | None = None) -> T:
    """Return, on all ranks of a group (None: on all ranks), the value of the rank `source`."""
    holder = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(holder, src=source, group=group)
    return holder[0]


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group (None: of all ranks), by rank."""
    size = dist.get_world_size(group)
    gathered = [value] * size
    if size > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_objects(value: T) -> list[T] | None:
    """Return the values of all ranks, by rank, on rank 0, and None on the other ranks."""
    if dist.get_world_size() == 1:
        return [value]
    is_main = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def all_gather_numbers(numbers: Sequence[float]) -> Tensor:
    """Return the numbers of all ranks, by rank: [ranks, numbers] float64."""
    own = torch.tensor([numbers], dtype=torch.float64, device=torch.cuda.current_device())
    if dist.get_world_size() == 1:
        return own
    gathered = own.new_empty((dist.get_world_size(), len(numbers)))
    dist.all_gather_into_tensor(gathered, own)
    return gathered


def maxima(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the maximum of each value over the ranks of a group; None: over all ranks."""
    if dist.get_world_size(group) == 1:
        return list(values)
    tensor = torch.tensor(values, device=torch.device(torch.cuda.current_device()))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is true on at least one rank."""
    return [bool(value) for value in maxima([int(flag) for flag in flags])]


def all_reduce_by_name(
    values: Mapping[tuple[str, str], Tensor],
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
) -> dict[tuple[str, str], Tensor]:
    """Reduce all values, which are sorted by kind and name, by one collective. All values must have
    the same dtype, and every rank of the group must have the same names and shapes."""
    ordered = dict(sorted(values.items()))
    if group.size() == 1 or not ordered:
        return ordered
    joined = torch.cat([value.flatten() for value in ordered.values()])
    dist.all_reduce(joined, operation, group=group)
    pieces = joined.split([value.numel() for value in ordered.values()])
    reduced = zip(ordered.items(), pieces, strict=True)
    return {name: piece.view_as(value) for (name, value), piece in reduced}


def all_gather_columns(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the `values` [..., n] of all ranks of a group, by rank. n may differ between ranks."""
    if group.size() == 1:
        return [values]
    counts = torch.zeros(group.size(), dtype=torch.long, device=values.device)
    counts[group.rank()] = values.shape[-1]
    dist.all_reduce(counts, group=group)
    padded = values.new_zeros((*values.shape[:-1], int(counts.max())))
    padded[..., : values.shape[-1]] = values
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    return [each[..., :n] for each, n in zip(gathered, counts.tolist(), strict=True)]


@contextmanager
def raised_everywhere(kind: type[UserError] = DataError) -> Generator[None]:
    """Raise an error of this kind on all ranks, at the end of the context, if any rank raised one
    inside the context. Every rank must call this."""
    error = None
    try:
        yield
    except kind as caught:
        error = str(caught)
    raise_everywhere(error, kind)


def raise_everywhere(error: str | None, kind: type[UserError] = DataError) -> None:
    """Raise an error of this kind on all ranks if `error` is not None on any rank. Every rank must
    call this."""
    errors = all_gather_objects(error)
    lines = list(dict.fromkeys(line for text in errors if text for line in text.splitlines()))
    more = len(lines) - _LINES_SHOWN
    if more > 0:
        lines[_LINES_SHOWN:] = [f"... and {more} more"]
    if lines:
        raise kind("\n".join(lines))
