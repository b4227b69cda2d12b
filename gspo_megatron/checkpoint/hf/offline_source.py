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
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    Files,
    damage_notes,
    find_damage,
    read_manifest,
)
from gspo_megatron.checkpoint.run_state import MODEL_FILE, TOKENIZER, RunState, read_model
from gspo_megatron.config.model_shape import ModelShape
from gspo_megatron.errors import DataError


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a path means; `notes` tell of damaged newer ones, `advice` what to do
    where this one turns out to be damaged too."""

    folder: Path
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def raise_for(self, damage: Sequence[str]) -> None:
        """Raise DataError where there is damage, a line for each."""
        if damage:
            lines = [f"{self.folder}: {line}" for line in damage]
            raise DataError("\n".join([*self.notes, *lines, *self.advice]))


@dataclass(frozen=True)
class Source:
    """A whole checkpoint. `hf_config` is the config.json that its weights were imported with;
    `tokenizer` the path that the run's configuration named, and `fingerprint` that of its contents
    then, where it is known; `unchecked` are the files of blocks in model/ whose size alone was
    looked at."""

    choice: Choice
    shape: ModelShape
    vocab_size: int
    tokenizer: str | None
    fingerprint: str | None
    hf_config: Mapping[str, Any] | None
    unchecked: Files

    @property
    def folder(self) -> Path:
        """The checkpoint's."""
        return self.choice.folder

    @property
    def imported(self) -> Path | None:
        """Settings and tokenizer of the folder that it was converted from; None for a run's."""
        folder = self.folder / "hf"
        return folder if folder.is_dir() else None

    @contextmanager
    def damage_told(self) -> Iterator[None]:
        """Within it, what fails for the damage of a file that was not checked names the file."""
        try:
            yield
        except (DataError, OSError):
            damage = find_damage(self.folder, only=self.unchecked.__contains__)
            self.choice.raise_for(damage)
            raise


def open_checkpoint(path: Path, share: Share = ALONE) -> Source:
    """`path` is a checkpoint, or a folder of them, or a run: then the newest one whose files all
    have their sizes.

    The main process of `share` chooses, because a run may publish another one at any time; all look
    at its files together. One alone leaves the blocks of tensors to be checked by
    `TorchDistReader.damage`, when it has read them anyway. Raises DataError with all that is wrong.
    """
    choice = share.of_main(lambda: _find(path))
    folder = choice.folder
    choice.raise_for(find_damage(folder, contents=False, only=_matters))
    if share.world_size == 1:
        choice.raise_for(find_damage(folder, only=lambda n: _matters(n) and not _has_blocks(n)))
        files = read_manifest(folder)
        return _read(choice, {n: files[n] for n in files if _matters(n) and _has_blocks(n)})
    threads = thread_count()
    first, count = share.rank * threads, share.world_size * threads
    found = in_threads(
        lambda number: find_damage(folder, share=(number, count), only=_matters),
        range(first, first + threads),
    )
    choice.raise_for([line for lines in found for line in lines])
    return _read(choice, {})


def _has_blocks(name: str) -> bool:
    return name.endswith(".distcp")


def _matters(name: str) -> bool:
    """Not the optimizer: what is exported is the weights."""
    return name.startswith(("model/", "hf/")) or name == MODEL_FILE


def _find(path: Path) -> Choice:
    if (path / MANIFEST).exists():
        return Choice(path)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    checkpoints = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    problems, notes = [], []
    for position in positions(checkpoints):
        folder = checkpoints / position.name
        damage = find_damage(folder, contents=False, only=_matters)
        if not damage:
            advice = f"{path}: to convert another checkpoint of it, give that one's path"
            return Choice(folder, tuple(notes), (advice,))
        notes += damage_notes(position.name, damage)
        problems += [f"{folder}: {line}" for line in damage]
    raise DataError(
        "\n".join([*problems, f"{path}: not a checkpoint of ours, and there is no whole one in it"])
    )


def _read(choice: Choice, unchecked: Files) -> Source:
    folder = choice.folder
    document = read_model(folder)
    try:
        known = {field.name for field in dataclasses.fields(ModelShape)}
        sizes = {name: value for name, value in document["shape"].items() if name in known}
        return Source(
            choice,
            ModelShape(**sizes),
            int(document["vocab_size"]),
            document.get("tokenizer"),
            _fingerprint(folder),
            document.get("hf"),
            unchecked,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / MODEL_FILE}: does not describe a model: {error}") from error


def _fingerprint(folder: Path) -> str | None:
    """Of the run's tokenizer. Unknown where no run wrote the checkpoint, or its run.json cannot be
    read: the weights do not need it."""
    try:
        return RunState.read(folder).fingerprints.get(TOKENIZER)
    except DataError:
        return None
