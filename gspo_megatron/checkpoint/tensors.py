"""Save and load the weights and the optimizer's state, on any layout."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from gspo_megatron.checkpoint import optimizer as states
from gspo_megatron.checkpoint.model_pieces import (
    keeps_scales,
    model_pieces,
    pieces_to_read,
    pieces_to_write,
    scale_pieces,
)
from gspo_megatron.checkpoint.storage import Piece, read_pieces, write_pieces
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import raised_everywhere

T = TypeVar("T")
MODEL, OPTIMIZER, SCALES = "model", "optimizer", "fp8_scales"


def start_work(work: Callable[[], T], *, asynchronous: bool) -> Future[T]:
    """Do `work`, in a daemon thread if it is asynchronous. Its error is raised by `result`."""
    future: Future[T] = Future()
    device = torch.cuda.current_device()

    def run() -> None:
        try:
            # A thread begins on the host's first GPU: torch's writer would wait for that one, and
            # every rank would take half a GB of its memory for a context.
            torch.cuda.set_device(device)
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again in the main thread)
            future.set_exception(error)

    if asynchronous:
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
    else:
        run()
    return future


def save_tensors(
    folder: Path, policy: Policy, trainer: Trainer | None, *, asynchronous: bool
) -> Future[None]:
    """Write `folder`/model and, with a trainer, `folder`/optimizer and the FP8 scales; every rank
    calls it. An asynchronous save returns when all tensors are copied to host memory: then the
    weights may change. Ranks communicate over a separate group (`writers`).

    Call `result` before the next save starts and before torch.distributed is shut down; it returns
    when this rank's bytes are on the disk, and raises DataError, on all ranks, where a file of any
    rank cannot be written.
    """
    policy.finish_parameter_gather()
    model = model_pieces(policy)
    parts = [(MODEL, list(pieces_to_write(model)), {})]  # folders: pieces and further files
    if trainer is not None:
        states.prepare_state(trainer.optimizer)
        ranges = states.owned_ranges(trainer.optimizer)
        found = states.state_pieces(model, ranges, originals_only=True)
        moments = [piece for _, _, pieces in found for piece in pieces]
        groups = json.dumps(states.groups_document(trainer.optimizer), indent=1).encode()
        parts.append((OPTIMIZER, moments, {states.GROUPS_FILE: groups}))
        if keeps_scales(policy):
            parts.append((SCALES, scale_pieces(policy, originals_only=True), {}))
    if asynchronous:
        parts = [(name, _copies(pieces), files) for name, pieces, files in parts]
    group = writers()

    def write() -> None:
        for name, pieces, files in parts:
            write_pieces(folder / name, pieces, group, files)

    return start_work(write, asynchronous=asynchronous)


def load_model(folder: Path, policy: Policy, *, adapters: bool = True) -> None:
    """Read `folder`/model, of any layout, into the policy; every rank calls it. An optimizer that
    exists already keeps its fp32 copy of 16-bit weights: load its state too, or call its
    reload_model_params. A policy with adapters reads these alone, or with adapters=False its base.

    Raises DataError, the same on all ranks.
    """
    policy.finish_parameter_gather()
    pieces = list(pieces_to_read(model_pieces(policy, adapters=adapters)))
    with torch.no_grad():
        read_pieces(folder / MODEL, pieces)


def load_optimizer(folder: Path, policy: Policy, trainer: Trainer) -> None:
    """Read `folder`/optimizer, of any layout, into the trainer's optimizer, and the FP8 scales into
    the policy; after load_model of the same folder. Every rank calls it. The schedule is not in it
    (see load_trainer_state).

    Raises DataError, the same on all ranks.
    """
    if keeps_scales(policy):
        with torch.no_grad():
            read_pieces(folder / SCALES, scale_pieces(policy, originals_only=False))
    folder = folder / OPTIMIZER
    model = model_pieces(policy)
    with raised_everywhere():
        document = states.read_groups(folder)
    with torch.no_grad():
        states.prepare_state(trainer.optimizer)
        ranges = states.owned_ranges(trainer.optimizer)
        loaded = list(states.state_pieces(model, ranges, originals_only=False))
        read_pieces(folder, [piece for _, _, listed in loaded for piece in listed])
        for own, tensors, _ in loaded:
            own.set_tensors(tensors)
        with raised_everywhere():
            states.load_groups(trainer.optimizer, document, folder)
            for own in ranges:
                weight = own.parameter.detach().view(-1)[own.start : own.stop]
                if not torch.equal(own.tensors()["param"].to(weight.dtype), weight):  # rounded
                    weights = folder.parent / MODEL
                    raise DataError(f"{folder}: its fp32 weights are not those of {weights}")


def _copies(pieces: list[Piece]) -> list[Piece]:
    """Copies of pieces in host memory, pinned where they come from a device."""
    copied = []
    for piece in pieces:
        pinned = piece.data.is_cuda
        host = torch.empty_like(piece.data, device="cpu", pin_memory=pinned)
        copied.append(replace(piece, data=host.copy_(piece.data, non_blocking=pinned)))
    torch.cuda.synchronize()
    return copied


_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # the world, and its writers
# How long ranks wait for the one with the slowest disk. The heartbeat detects a hang much sooner.
_SLOWEST_WRITER = datetime.timedelta(hours=6)


def writers() -> dist.ProcessGroup:
    """The group of all ranks, over gloo, that one save at a time uses. Collectives of a save in the
    background must not mix with those of training, and its plans do not belong on devices. The
    first call of a process is a collective."""
    global _group
    world = dist.group.WORLD
    assert world is not None
    if _group is None or _group[0] is not world:
        _group = (world, dist.new_group(backend="gloo", timeout=_SLOWEST_WRITER))
    return _group[1]
