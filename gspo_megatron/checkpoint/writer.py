"""Write one checkpoint, at once or in the background, and publish it when it is complete."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.checkpoint.folder import Publication, free_bytes, owned_by
from gspo_megatron.checkpoint.manifest import Files, files_below, record_of
from gspo_megatron.checkpoint.tensors import save_tensors, start_work, writers
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import from_rank, gather_objects, on_main

_OPTIMIZER_BYTES = 12  # per parameter: an fp32 copy and two moments

Shares = Sequence[tuple[Files, str | None]]  # for each rank: its files, and what went wrong


class CheckpointWriter:
    """Writes one checkpoint at a time into a folder. Every rank calls `begin` and `finish`."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder, self.policy = folder, policy
        self._bytes = _expected_bytes(policy)  # the size of a checkpoint, on the main rank
        # this rank's save in progress, and the function that publishes the checkpoint
        self._under_way: tuple[Future[Files], Callable[[Shares], str | None]] | None = None
        self._removal = start_work(lambda: None, asynchronous=False)

    def lacks_room(self) -> str | None:
        """Return why a checkpoint does not fit on the disk, or None. Called on the main rank."""
        if (free := free_bytes(self.folder)) >= self._bytes:
            return None
        return f"it takes {self._bytes:,} bytes, and {free:,} are free"

    def begin(
        self,
        name: str,
        trainer: Trainer | None,
        write_small: Callable[[Path], None],
        published: Callable[[], None] = lambda: None,
        *,
        asynchronous: bool,
    ) -> str | None:
        """Write a checkpoint: the weights, the optimizer's state if there is a trainer, and the
        files that `write_small` writes on each rank.

        The checkpoint is published here or, if `asynchronous`, in `finish`. After that, the main
        rank calls `published`. Returns what went wrong, or None, the same on all ranks.
        """
        assert self._under_way is None, "one checkpoint at a time"
        publication, refusal = on_main(lambda: self._make_folder(name))
        if refusal is not None:
            return refusal
        folder = publication.folder
        tensors = save_tensors(folder, self.policy, trainer, asynchronous=asynchronous)
        problem = None
        try:
            write_small(folder)
        except (OSError, DataError) as error:
            problem = error

        def complete() -> Files:
            """Return the checksums of the files that this rank wrote, so that no other rank must
            read them."""
            tensors.result()
            written = _all_written(folder)
            if problem is not None:
                raise problem
            names = owned_by(written, dist.get_rank(), dist.get_world_size())
            return {name: record_of(folder / name) for name in names}

        publish = functools.partial(self._publish, publication, trainer is not None, published)
        self._under_way = start_work(complete, asynchronous=asynchronous), publish
        return None if asynchronous else self.finish()

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._under_way is not None and not self._under_way[0].done()

    def finish(self) -> str | None:
        """Wait for all ranks and publish the checkpoint, if one was started. Returns what went
        wrong, or None, the same on all ranks. An incomplete checkpoint is removed."""
        if self._under_way is None:
            return None
        (save, publish), self._under_way = self._under_way, None
        files, problem = {}, None
        try:
            files = save.result()
        except (OSError, DataError) as error:
            problem = _message(error)
        shares = gather_objects((files, problem))
        return on_main(lambda: publish(shares or []))

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove folders that `hide` has renamed, in the background. Called on the main rank."""
        self.wait_for_removal()
        self._removal = start_work(lambda: _remove(paths), asynchronous=True)

    def wait_for_removal(self) -> None:
        """Wait until nothing is being removed."""
        self._removal.result()

    def _make_folder(self, name: str) -> tuple[Publication, str | None]:
        publication = Publication(self.folder, name)
        if self.lacks_room():
            self.wait_for_removal()  # an old checkpoint may still be on the disk
        refusal = self.lacks_room()
        if refusal is None:
            try:
                publication.begin()
            except OSError as error:
                refusal = _message(error)
        return publication, refusal

    def _publish(
        self,
        publication: Publication,
        is_full: bool,
        published: Callable[[], None],
        shares: Shares,
    ) -> str | None:
        """Publish a checkpoint if all ranks have written it, else remove it. Returns what went
        wrong, or None. Called on the main rank. `is_full`: the checkpoint holds the optimizer's
        state."""
        problem = next((text for _, text in shares if text is not None), None)
        files = {name: record for own, _ in shares for name, record in own.items()}
        if problem is None:
            try:
                publication.publish(files)
            except OSError as error:
                problem = _message(error)
        if problem is not None:
            publication.abandon()
            return problem
        if is_full:
            self._bytes = sum(record.bytes for record in files.values())
        try:
            published()
        except OSError as error:
            failed = "removing old checkpoints, or writing the file `latest`, failed"
            return f"it is complete, but {failed}: {_message(error)}"
        return None


def _all_written(folder: Path) -> list[str]:
    """Return, on every rank, the files that all ranks have written. Each rank calls it after its
    last file. Only the main rank lists the folder: thousands of ranks at once would slow down a
    shared file system. If the listing fails, the main rank raises OSError and the other ranks get
    an empty list.
    """
    if dist.get_world_size() == 1:
        return files_below(folder)
    group, names, problem = writers(), list[str](), None
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        try:
            names = files_below(folder)
        except OSError as error:
            problem = error
    names = from_rank(names, 0, group)
    if problem is not None:
        raise problem
    return names


def _message(error: OSError | DataError) -> str:
    if isinstance(error, OSError):
        return f"rank {dist.get_rank()} cannot write: {error.strerror or error}"
    return str(error)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _expected_bytes(policy: Policy) -> int:
    """Return the size in bytes of the first checkpoint with an optimizer, on the main rank.
    Parameters of which all tensor-parallel ranks hold a copy are counted on each of these ranks."""
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_world_size()
    total = 0.0
    for model in policy.models:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            copies = dense if getattr(parameter, "allreduce", True) else experts
            size = parameter.element_size() + _OPTIMIZER_BYTES
            total += parameter.numel() * size / copies
    return int(sum(gather_objects(total) or []))
