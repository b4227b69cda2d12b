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
from gspo_megatron.families.weight_map import OUTPUT_LAYER, SCORE_HEAD
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import raised_everywhere

T = TypeVar("T")
MODEL, OPTIMIZER, SCALES = "model", "optimizer", "fp8_scales"


def start_work(work: Callable[[], T], *, asynchronous: bool) -> Future[T]:
    """Call `work`, in a daemon thread if `asynchronous`. The future's `result` raises
    the error of `work`."""
    future: Future[T] = Future()
    device = torch.cuda.current_device()

    def run() -> None:
        try:
            # By default, a new thread uses the host's first GPU. Torch's writer would wait for that
            # GPU, and every rank would create a context of half a GB on it.
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
    """Write `folder`/model; with a trainer, also `folder`/optimizer and the FP8 scales. Every rank
    calls it.

    An asynchronous save returns when all tensors are copied to host memory. The weights may change
    from then on. The ranks communicate over a separate process group (`writers`).

    Call `result` of the returned future before the next save starts and before torch.distributed is
    shut down. `result` returns when this rank's bytes are on the disk. If any rank cannot write a
    file, `result` raises DataError on all ranks.
    """
    policy.finish_parameter_gather()
    model = model_pieces(policy)
    parts = [(MODEL, list(pieces_to_write(model)), {})]  # (folder, pieces, further files)
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


def load_model(
    folder: Path, policy: Policy, *, adapters: bool = True, new_head: bool = False
) -> None:
    """Read `folder`/model, saved on any layout, into the policy. Every rank calls it.

    A policy with adapters reads only the adapters. With adapters=False it reads only its base.
    `new_head`: the folder holds the language model that a preference model begins with; its output
    layer is not read, and the score head stays as it is. An optimizer that exists already keeps its
    fp32 copy of 16-bit weights: load its state too, or call its reload_model_params. Raises
    DataError, the same on all ranks.
    """
    policy.finish_parameter_gather()
    new, unread = ((SCORE_HEAD,), (OUTPUT_LAYER,)) if new_head else ((), ())
    parts = [p for p in model_pieces(policy, adapters=adapters) if p.key not in new]
    pieces = list(pieces_to_read(parts))
    with torch.no_grad():
        read_pieces(folder / MODEL, pieces, unread)


def load_optimizer(folder: Path, policy: Policy, trainer: Trainer) -> None:
    """Read `folder`/optimizer, saved on any layout, into the trainer's optimizer, and the FP8
    scales into the policy. Every rank calls it, after load_model of the same folder.

    load_trainer_state loads the schedule. Raises DataError, the same on all ranks.
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
                # The fp32 weights, rounded, must be the weights of the model.
                if not torch.equal(own.tensors()["param"].to(weight.dtype), weight):
                    weights = folder.parent / MODEL
                    raise DataError(f"{folder}: its fp32 weights differ from those of {weights}")


def _copies(pieces: list[Piece]) -> list[Piece]:
    """Copy pieces to host memory. Copies from a device are pinned."""
    copied = []
    for piece in pieces:
        pinned = piece.data.is_cuda
        host = torch.empty_like(piece.data, device="cpu", pin_memory=pinned)
        copied.append(replace(piece, data=host.copy_(piece.data, non_blocking=pinned)))
    torch.cuda.synchronize()
    return copied


# The group of all ranks, and the gloo group that `writers` has made for it.
_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
# How long ranks wait for the rank with the slowest disk. The heartbeat detects a hang much sooner.
_SLOWEST_WRITER = datetime.timedelta(hours=6)


def writers() -> dist.ProcessGroup:
    """Return the gloo process group of all ranks for saving. Only one save at a time uses it.

    Collectives of a save in the background must not mix with those of training, and the plans that
    ranks exchange should not be copied to devices. The first call in a process is a collective.
    """
    global _group
    world = dist.group.WORLD
    assert world is not None
    if _group is None or _group[0] is not world:
        _group = (world, dist.new_group(backend="gloo", timeout=_SLOWEST_WRITER))
    return _group[1]
