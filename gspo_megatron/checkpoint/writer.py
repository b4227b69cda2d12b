"""Write one checkpoint, at once or in the background, and publish it when it is complete."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.checkpoint.folder import Publication, free_bytes, owned_by
from gspo_megatron.checkpoint.manifest import Files, files_below, record_of
from gspo_megatron.checkpoint.tensors import save_tensors, start_work, writers
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import gather_objects, on_main

_OPTIMIZER_BYTES = 12  # of each parameter: an fp32 copy and two moments


@dataclass
class Writing:
    """A checkpoint that this rank is writing."""

    publication: Publication
    is_full: bool  # with the optimizer's state
    files: Files  # of this rank; filled when `save` is done
    save: Future[None]
    published: Callable[[Path], None]  # called on the main rank afterwards


class CheckpointWriter:
    """Writes one checkpoint at a time into a folder; every rank calls every method."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder, self.policy = folder, policy
        self._bytes = _expected_bytes(policy)  # of a checkpoint; on the main rank
        self._under_way: Writing | None = None
        self._removal: threading.Thread | None = None

    def lacks_room(self) -> str | None:
        """Why a checkpoint does not fit on the disk; None where it fits, and on all ranks but the
        main one."""
        if dist.get_rank() > 0:
            return None
        free = free_bytes(self.folder)
        if free >= self._bytes:
            return None
        return f"it takes {self._bytes:,} bytes, and {free:,} are free"

    def begin(
        self,
        name: str,
        trainer: Trainer | None,
        write_small: Callable[[Path], None],
        published: Callable[[Path], None],
        *,
        asynchronous: bool,
    ) -> str | None:
        """Start a checkpoint: the weights, with a trainer the optimizer's state, and the files of
        `write_small` on each rank. After `finish` has published it, the main rank calls
        `published`. Returns, on all ranks alike, why no checkpoint was started, or None.
        """
        assert self._under_way is None, "one checkpoint at a time"
        token, refusal = on_main(lambda: self._make_folder(name))
        if refusal is not None:
            return refusal
        publication = Publication(self.folder, name, token)
        tensors = save_tensors(publication.folder, self.policy, trainer, asynchronous=asynchronous)
        files: Files = {}
        problem = None
        try:
            write_small(publication.folder)
        except (OSError, DataError) as error:
            problem = error

        def complete() -> None:
            """Compute the checksums of this rank's files, so that no other rank reads them."""
            tensors.result()
            written = _all_written(publication.folder)
            if problem is not None:
                raise problem
            names = owned_by(written, dist.get_rank(), dist.get_world_size())
            files.update({name: record_of(publication.folder / name) for name in names})

        save = start_work(complete, asynchronous=asynchronous)
        self._under_way = Writing(publication, trainer is not None, files, save, published)
        return None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._under_way is not None and not self._under_way.save.done()

    def finish(self) -> str | None:
        """Wait for all ranks and publish the checkpoint, if one was started. Returns what went
        wrong, on all ranks alike; the checkpoint is removed then."""
        writing, self._under_way = self._under_way, None
        if writing is None:
            return None
        problem = None
        try:
            writing.save.result()
        except (OSError, DataError) as error:
            problem = _message(error)
        everyones = gather_objects((writing.files, problem))
        return on_main(lambda: self._publish(writing, everyones or []))

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove hidden folders in the background; on the main rank."""
        self.wait_for_removal()
        if paths:
            self._removal = threading.Thread(target=_remove, args=(list(paths),), daemon=True)
            self._removal.start()

    def wait_for_removal(self) -> None:
        """Return when nothing is being removed."""
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _make_folder(self, name: str) -> tuple[str, str | None]:
        publication = Publication(self.folder, name)
        if self.lacks_room():
            self.wait_for_removal()  # an old checkpoint may still be on the disk
        refusal = self.lacks_room()
        if refusal is None:
            try:
                publication.begin()
            except OSError as error:
                refusal = _message(error)
        return publication.token, refusal

    def _publish(
        self, writing: Writing, everyones: Sequence[tuple[Files, str | None]]
    ) -> str | None:
        problem = next((text for _, text in everyones if text is not None), None)
        files = {name: record for own, _ in everyones for name, record in own.items()}
        if problem is None:
            try:
                path = writing.publication.publish(files)
            except OSError as error:
                problem = _message(error)
        if problem is not None:
            writing.publication.abandon()
            return problem
        if writing.is_full:
            self._bytes = sum(record.bytes for record in files.values())
        try:
            writing.published(path)
        except OSError as error:
            return f"it is complete, but old checkpoints could not be removed: {_message(error)}"
        return None


def _all_written(folder: Path) -> list[str]:
    """The files that all ranks have written, on every rank; each calls it after its last file. Only
    the main rank lists the folder: thousands of ranks at once would slow down a shared file system.
    Raises OSError on the main rank; the others get an empty list then.
    """
    if dist.get_world_size() == 1:
        return files_below(folder)
    group, names, problem = writers(), [[]], None
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        try:
            names = [files_below(folder)]
        except OSError as error:
            problem = error
    dist.broadcast_object_list(names, src=0, group=group)
    if problem is not None:
        raise problem
    return names[0]


def _message(error: OSError | DataError) -> str:
    if isinstance(error, OSError):
        return f"rank {dist.get_rank()} cannot write: {error.strerror or error}"
    return str(error)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _expected_bytes(policy: Policy) -> int:
    """The size of the first checkpoint with an optimizer. Copies on tensor-parallel ranks are
    counted separately."""
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_world_size()
    total = 0.0
    for model in policy.models:
        for parameter in model.parameters():
            copies = dense if getattr(parameter, "allreduce", True) else experts
            size = parameter.element_size() + _OPTIMIZER_BYTES
            total += parameter.numel() * size / copies
    count = torch.tensor(total, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(count)
    return int(count)
