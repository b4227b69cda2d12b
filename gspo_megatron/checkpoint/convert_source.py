"""Finds the checkpoint that a conversion reads, and checks that it is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.convert_workers import ALONE, WorkerShard, thread_count
from gspo_megatron.checkpoint.folder import checkpoints_at
from gspo_megatron.checkpoint.manifest import damage_notes, find_damage, first_whole
from gspo_megatron.checkpoint.run_state import MODEL_FILE, TOKENIZER, RunState, read_model
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError, UserError, some_of
from gspo_megatron.families import Family, family_of, family_of_shape
from gspo_megatron.families.model_shape import ModelShape, no_folder
from gspo_megatron.families.weight_map import WeightMap, weight_map
from gspo_megatron.files import WRONG_VALUES, fingerprint
from gspo_megatron.hf.side_files import tokenizer_files
from gspo_megatron.hub import folder_of, tokenizer_in


@dataclass(frozen=True)
class Source:
    """A checkpoint without damage."""

    path: Path  # as the user gave it: the checkpoint or a folder above it
    folder: Path
    notes: list[str]  # texts to print for the user
    document: Mapping[str, Any]  # the contents of model.json
    shape: ModelShape
    vocab_size: int
    # True: the weights come from a Hugging Face folder, whose settings and tokenizer are in hf/.
    is_imported: bool
    side_files: list[Path]  # the files of the model's tokenizer

    @property
    def hf_config(self) -> Mapping[str, Any] | None:
        """The config.json that the weights were imported with."""
        return self.document.get("hf")

    @functools.cached_property
    def family(self) -> Family:
        """The model's family. Raises ConfigError if the model belongs to none."""
        original = self.hf_config
        return family_of_shape(self.shape) if original is None else family_of(original)

    @functools.cached_property
    def weights(self) -> WeightMap:
        """The map of the model. Raises ConfigError like `family`, and DataError if there is no
        model of this shape."""
        try:
            return weight_map(self.family, self.shape, self.vocab_size)
        except UserError:
            raise
        except (AssertionError, *WRONG_VALUES) as error:
            raise _no_model(self.folder, error) from error

    def refuse_damage(self) -> None:
        """Compare the checksums of all files. Raises DataError with all damage."""
        _refuse_damage(self.path, self.folder, ALONE, self.notes)


def open_checkpoint(path: Path, shard: WorkerShard = ALONE) -> Source:
    """Open the checkpoint `path`. If `path` is the folder of a run or of checkpoints, open the
    newest checkpoint in it whose files all have the right sizes.

    Only the main process chooses the checkpoint, because a run may publish a newer checkpoint at
    any time. The processes share the comparison of checksums. A process that works alone compares
    the checksums of tensor files later, while it reads them (`convert._in_file_order`). Raises
    DataError with all problems.
    """
    with shard.barrier():
        chosen = find_checkpoint(path) if shard.is_main else None
    folder, notes = shard.gather(chosen)[0]
    _refuse_damage(path, folder, shard, notes, with_tensors=shard.world_size > 1)
    document = read_model(folder)
    try:
        known = {field.name for field in dataclasses.fields(ModelShape)}
        sizes = {name: value for name, value in document["shape"].items() if name in known}
        shape, vocab_size = ModelShape(**sizes), int(document["vocab_size"])
    except WRONG_VALUES as error:
        raise _no_model(folder, error) from error
    is_imported, tokenizer = (folder / "hf").is_dir(), document.get("tokenizer")
    if tokenizer is not None and not is_imported:
        try:
            tokenizer = str(tokenizer_in(folder_of(tokenizer, "the run's tokenizer:")))
            # a foreign checkpoint may name any file of the user; tokenizer.json is parsed later
            if Path(tokenizer).is_file() and Path(tokenizer).name != "tokenizer.json":
                load_tokenizer(tokenizer)
        except DataError as error:
            notes, tokenizer = [*notes, f"{error}; the tokenizer is left out"], None
    files = tokenizer_files(folder / "hf" if is_imported else tokenizer)
    if not is_imported and tokenizer is not None and (changed := _changed(folder, tokenizer)):
        notes, files = [*notes, f"{tokenizer}: {changed}, so it is left out"], []
    return Source(path, folder, notes, document, shape, vocab_size, is_imported, files)


def _no_model(checkpoint: Path, error: Exception) -> DataError:
    return DataError(f"{checkpoint / MODEL_FILE}: does not describe a model: {error}")


def _refuse_damage(
    path: Path,
    folder: Path,
    shard: WorkerShard,
    notes: Sequence[str] = (),
    *,
    with_tensors: bool = True,
) -> None:
    """Raise DataError in all processes, with all damage, if the checkpoint `folder` is damaged.
    `path`: the path that the user gave; with_tensors: also compare the checksums of the tensor
    files."""
    threads = thread_count()

    def damage(thread: int) -> list[str]:
        share = (shard.rank * threads + thread, shard.world_size * threads)
        small = find_damage(folder, share=share, only=_is_small)
        large = find_damage(folder, share=share, contents=with_tensors, only=holds_tensors)
        return list(dict.fromkeys([*small, *large]))

    with shard.barrier(), ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(damage, range(threads)))
    parts = [part for theirs in shard.gather(found) for part in theirs]
    if lines := some_of([f"{folder}: {line}" for part in parts for line in part]):
        if folder != path:
            lines.append(f"{path}: to convert another checkpoint of this folder, give its path")
        raise DataError("\n".join([*notes, *lines]))


def _changed(checkpoint: Path, tokenizer: str) -> str | None:
    """Return what is wrong if the run's tokenizer is missing or has changed since the run, else
    None."""
    if not Path(tokenizer).exists():
        return "the run's tokenizer is missing"
    known = None
    with contextlib.suppress(DataError):  # no run wrote the checkpoint, or run.json is damaged
        known = RunState.read(checkpoint).fingerprints.get(TOKENIZER)
    if known not in (None, fingerprint(tokenizer)):
        return "its contents have changed since the run"
    return None


def _is_needed(name: str) -> bool:
    """Whether a conversion needs a file. Conversions do not need the optimizer's files."""
    return name.startswith(("model/", "hf/")) or name == MODEL_FILE


def holds_tensors(name: str) -> bool:
    """Whether a file holds tensors of the model."""
    return name.startswith("model/") and name.endswith(".distcp")


def _is_small(name: str) -> bool:
    return _is_needed(name) and not holds_tensors(name)


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint that a path means, and notes about newer checkpoints that are damaged.
    Raises DataError if there is no checkpoint."""
    folders = checkpoints_at(path)
    if folders == [path]:
        return path, []
    if not folders and not path.is_dir():
        raise DataError(f"{path}: {no_folder(path)}")
    if (path / "config.json").is_file():
        advice = "convert it with `gspo-megatron convert hf-to-megatron`"
        raise DataError(f"{path}: is a Hugging Face folder; {advice}")
    whole, damage = first_whole(
        folders, lambda folder: find_damage(folder, contents=False, only=_is_needed)
    )
    if whole is not None:
        return whole, damage_notes(damage)
    problems = [f"{folder}: {line}" for folder, lines in damage.items() for line in lines]
    none = f"{path}: no checkpoint of gspo-megatron, and there is no whole one in it"
    raise DataError("\n".join([*problems, none]))
