"""The checkpoint that a conversion to Hugging Face reads, in one or several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
from gspo_megatron.checkpoint.hf.side_files import tokenizer_files
from gspo_megatron.checkpoint.manifest import MANIFEST, damage_notes, find_damage, first_whole
from gspo_megatron.checkpoint.run_state import MODEL_FILE, TOKENIZER, RunState, read_model
from gspo_megatron.config.model_shape import ModelShape
from gspo_megatron.errors import DataError
from gspo_megatron.files import fingerprint

_MOST_THREADS = 4  # each holds a few blocks of tensors in memory


def thread_count() -> int:
    """Threads of a process that converts."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class Share:
    """One of the processes that convert together. `gather`, a collective, returns the values of
    all."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A DataError or OSError of one process inside is raised in all; a collective."""
        problem = None
        try:
            yield
        except (DataError, OSError) as error:
            problem = error
        messages = self.gather(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if any(messages):
            raise DataError("\n".join(filter(None, messages)))


ALONE = Share()


@contextlib.contextmanager
def shared_by_ranks() -> Iterator[Share]:
    """The share of a rank of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        yield ALONE
        return

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    dist.init_process_group("gloo")
    try:
        yield Share(dist.get_rank(), world_size, gather)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Source:
    """A checkpoint without damage."""

    folder: Path
    notes: tuple[str, ...]  # about damaged newer checkpoints
    shape: ModelShape
    vocab_size: int
    tokenizer: str | None  # the path in the run's configuration
    fingerprint: str | None  # of the tokenizer during the run, where it is known
    hf_config: Mapping[str, Any] | None  # the config.json that the weights were imported with

    @property
    def imported(self) -> Path | None:
        """Settings and tokenizer of the folder that it was converted from; None for a run's."""
        folder = self.folder / "hf"
        return folder if folder.is_dir() else None


def open_checkpoint(path: Path, share: Share = ALONE) -> Source:
    """The checkpoint `path`; of a run or a folder of checkpoints, the newest one whose files all
    have their sizes. The main process chooses, because a run may publish another one at any time;
    all processes compare checksums. Raises DataError with all that is wrong.
    """
    with share.together():
        found = _find(path) if share.is_main else None
    folder, notes = share.gather(found)[0]
    threads = thread_count()
    shares = [(share.rank * threads + n, share.world_size * threads) for n in range(threads)]
    with share.together(), ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda n: find_damage(folder, share=n, only=_matters), shares))
    parts = [part for theirs in share.gather(found) for part in theirs]
    if lines := [f"{folder}: {line}" for part in parts for line in part]:
        if folder != path:
            lines.append(f"{path}: to convert another checkpoint of it, give that one's path")
        raise DataError("\n".join([*notes, *lines]))
    document, tokenizer_hash = read_model(folder), None
    with contextlib.suppress(DataError):  # no run wrote the checkpoint, or run.json is damaged
        tokenizer_hash = RunState.read(folder).fingerprints.get(TOKENIZER)
    try:
        known = {field.name for field in dataclasses.fields(ModelShape)}
        sizes = {name: value for name, value in document["shape"].items() if name in known}
        return Source(
            folder,
            tuple(notes),
            ModelShape(**sizes),
            int(document["vocab_size"]),
            document.get("tokenizer"),
            tokenizer_hash,
            document.get("hf"),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / MODEL_FILE}: does not describe a model: {error}") from error


def _matters(name: str) -> bool:
    """Whether a file is needed: the optimizer's are not."""
    return name.startswith(("model/", "hf/")) or name == MODEL_FILE


def _find(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a path means, and notes about damaged newer ones."""
    if (path / MANIFEST).exists():
        return path, []
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    folders = [checkpoints / position.name for position in positions(checkpoints)]
    whole, damage = first_whole(
        folders, lambda folder: find_damage(folder, contents=False, only=_matters)
    )
    if whole is not None:
        return whole, [
            line for folder, lines in damage.items() for line in damage_notes(folder.name, lines)
        ]
    problems = [f"{folder}: {line}" for folder, lines in damage.items() for line in lines]
    raise DataError(
        "\n".join([*problems, f"{path}: not a checkpoint of ours, and there is no whole one in it"])
    )


def tokenizer_of(checkpoint: Source) -> tuple[list[Path], list[str]]:
    """The files of the imported or the run's tokenizer, and notes for the user."""
    if checkpoint.imported is not None or checkpoint.tokenizer is None:
        return tokenizer_files(checkpoint.imported), []
    path = Path(checkpoint.tokenizer)
    if not path.exists():
        return [], [f"{path}: the run's tokenizer is not there (any more), and is left out"]
    if checkpoint.fingerprint not in (None, fingerprint(path)):
        return [], [
            f"{path}: no longer has the contents that the run's tokenizer had, and is left out"
        ]
    return tokenizer_files(path), []
