"""The checkpoint that a path means, and the model that it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
from gspo_megatron.checkpoint.hf.offline_share import ALONE, Share, in_threads, thread_count
from gspo_megatron.checkpoint.manifest import MANIFEST, Files, find_damage, read_manifest
from gspo_megatron.checkpoint.run_state import MODEL_FILE, read_model
from gspo_megatron.config.shape import ModelShape
from gspo_megatron.errors import DataError


@dataclass(frozen=True)
class Source:
    """A whole checkpoint. `hf_config` is the config.json that its weights were imported with;
    `tokenizer` the path that the run's configuration named; `unchecked` are the files of blocks in
    model/ whose size alone was looked at."""

    folder: Path
    shape: ModelShape
    vocab_size: int
    tokenizer: str | None
    hf_config: Mapping[str, Any] | None
    unchecked: Files

    @contextmanager
    def damage_told(self) -> Iterator[None]:
        """Within it, what fails for the damage of a file that was not checked names the file."""
        try:
            yield
        except (DataError, OSError):
            raise_for(self.folder, find_damage(self.folder, only=self.unchecked.__contains__))
            raise


def open_checkpoint(path: Path, share: Share = ALONE) -> Source:
    """`path` is a checkpoint, or a folder of them, or a run: the newest whole one then.

    The processes of `share` look at its files together. One alone leaves the blocks of tensors to
    be checked by `TorchDistReader.damage`, when it has read them anyway. Raises DataError with all
    that is wrong.
    """
    folder = _find(path)
    raise_for(folder, find_damage(folder, contents=False, only=_matters))
    if share.world_size == 1:
        raise_for(folder, find_damage(folder, only=lambda n: _matters(n) and not _has_blocks(n)))
        files = read_manifest(folder)
        return _read(folder, {n: files[n] for n in files if _matters(n) and _has_blocks(n)})
    threads = thread_count()
    first, count = share.rank * threads, share.world_size * threads
    found = in_threads(
        lambda number: find_damage(folder, share=(number, count), only=_matters),
        range(first, first + threads),
    )
    raise_for(folder, [line for lines in found for line in lines])
    return _read(folder, {})


def raise_for(folder: Path, damage: Sequence[str]) -> None:
    """Raise DataError where there is damage to a checkpoint, a line for each."""
    if damage:
        raise DataError("\n".join(f"{folder}: {line}" for line in damage))


def _has_blocks(name: str) -> bool:
    return name.endswith(".distcp")


def _matters(name: str) -> bool:
    """Not the optimizer: what is exported is the weights."""
    return name.startswith(("model/", "hf/")) or name == MODEL_FILE


def _find(path: Path) -> Path:
    if (path / MANIFEST).exists():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    problems = []
    for position in positions(checkpoints):
        folder = checkpoints / position.name
        damage = find_damage(folder, contents=False, only=_matters)
        if not damage:
            return folder
        problems += [f"{folder}: {line}" for line in damage]
    raise DataError(
        "\n".join([*problems, f"{path}: not a checkpoint of ours, and there is no whole one in it"])
    )


def _read(folder: Path, unchecked: Files) -> Source:
    document = read_model(folder)
    try:
        known = {field.name for field in dataclasses.fields(ModelShape)}
        sizes = {name: value for name, value in document["shape"].items() if name in known}
        return Source(
            folder,
            ModelShape(**sizes),
            int(document["vocab_size"]),
            document.get("tokenizer"),
            document.get("hf"),
            unchecked,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / MODEL_FILE}: does not describe a model: {error}") from error
