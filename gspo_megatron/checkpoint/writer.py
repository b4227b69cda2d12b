"""Write one checkpoint into a folder that is published whole, at once or in the background."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.checkpoint.folder import Publication, free_bytes, owned_by
from gspo_megatron.checkpoint.manifest import FileRecord, Files, files_below, record_of
from gspo_megatron.checkpoint.tensors import Save, save_tensors, writers
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import gather_objects, on_main

_OPTIMIZER_BYTES = 12  # of each parameter: an fp32 copy and two moments


@dataclass
class Writing:
    """A checkpoint under way on this rank."""

    publication: Publication
    is_full: bool  # with the optimizer's state
    files: Files  # of this rank, known once `save` is done
    save: Save
    published: Callable[[Path], None]  # what the main rank does then


class CheckpointWriter:
    """Writes one checkpoint at a time into a folder; every rank calls everything."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder, self.policy = folder, policy
        self._bytes = _expected_bytes(policy)  # of a checkpoint; on the main rank
        self._under_way: Writing | None = None
        self._removal: threading.Thread | None = None

    def lacks_room(self) -> str | None:
        """Why a checkpoint does not fit on the disk; None where it does, or on other ranks than the
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
        """Start a checkpoint: weights, with a trainer its optimizer's state, and what `write_small`
        adds on each rank. Once `finish` has given it its name, the main rank calls `published`.

        Returns why there will be none, on all ranks alike; None where all is well so far.
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
            """This rank's checksums: nobody else has to read its files again."""
            tensors.wait()
            written = _all_written(publication.folder)
            if problem is not None:
                raise problem
            names = owned_by(written, dist.get_rank(), dist.get_world_size())
            files.update({name: record_of(publication.folder / name) for name in names})

        save = Save(complete, asynchronous=asynchronous)
        self._under_way = Writing(publication, trainer is not None, files, save, published)
        return None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing what was begun."""
        return self._under_way is not None and not self._under_way.save.done()

    def finish(self) -> str | None:
        """Wait for all ranks and publish what was begun, if anything was. Returns what went wrong,
        on all ranks alike; nothing of the checkpoint is left then."""
        writing, self._under_way = self._under_way, None
        if writing is None:
            return None
        problem = None
        try:
            writing.save.wait()
        except (OSError, DataError) as error:
            problem = _told(error)
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
        refusal = self.lacks_room()
        if refusal is not None:
            self.wait_for_removal()  # what became surplus a moment ago may still be going
            refusal = self.lacks_room()
        publication = Publication(self.folder, name)
        if refusal is None:
            try:
                publication.begin()
            except OSError as error:
                refusal = _told(error)
        return publication.token, refusal

    def _publish(
        self, writing: Writing, everyones: Sequence[tuple[Files, str | None]]
    ) -> str | None:
        problem = next((text for _, text in everyones if text is not None), None)
        files: dict[str, FileRecord] = {}
        for own, _ in everyones:
            files |= own
        path = None
        if problem is None:
            try:
                path = writing.publication.publish(files)
            except OSError as error:
                problem = _told(error)
        if path is None:
            writing.publication.abandon()
            return problem
        if writing.is_full:
            self._bytes = sum(record.bytes for record in files.values())
        try:
            writing.published(path)
        except OSError as error:
            return f"it is whole, but its folder could not be tidied: {_told(error)}"
        return None


def _all_written(folder: Path) -> list[str]:
    """The files that all ranks have written, on every rank; all of them call it, each after its
    last one. The main rank alone looks: thousands of looks at once would keep a shared file system
    busier than the files themselves. Raises OSError on the main rank, and is empty then on others.
    """
    if dist.get_world_size() == 1:
        return files_below(folder)
    group, told, problem = writers(), [[]], None
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        try:
            told = [files_below(folder)]
        except OSError as error:
            problem = error
    dist.broadcast_object_list(told, src=0, group=group)
    if problem is not None:
        raise problem
    return told[0]


def _told(error: OSError | DataError) -> str:
    if isinstance(error, OSError):
        return f"rank {dist.get_rank()} cannot write: {error.strerror or error}"
    return str(error)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _expected_bytes(policy: Policy) -> int:
    """Of a checkpoint with an optimizer, before there is one to go by; what tensor-parallel ranks
    hold alike is counted once each."""
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
