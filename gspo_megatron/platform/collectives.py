"""What all ranks have to know of each other between steps: a few numbers or lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gspo_megatron.errors import UserError

T = TypeVar("T")


def on_main(work: Callable[[], T]) -> T:
    """Do `work` on rank 0; every rank returns what it returned, or raises its UserError, which an
    error about a named file is too: the others wait here, and would never hear of another."""
    if dist.get_world_size() == 1:
        return _telling_files(work)
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = _telling_files(work)
        except UserError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise UserError(told[1])
    return told[0]


def _telling_files(work: Callable[[], T]) -> T:
    try:
        return work()
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}") from error


def all_gather_objects(value: T) -> list[T]:
    """What every rank passes, by rank."""
    if dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def gather_objects(value: T) -> list[T] | None:
    """What every rank passes, by rank, on rank 0; None on the others."""
    if dist.get_world_size() == 1:
        return [value]
    is_main = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_main else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Which of the flags is set on any rank."""
    if dist.get_world_size() == 1:
        return list(flags)
    device = torch.device(torch.cuda.current_device())
    values = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [bool(value) for value in values.tolist()]
