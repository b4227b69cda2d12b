"""A tokenizer's files, and whether all its ids are in a model's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.checkpoint.hf.files import SIDE_FILES
from gspo_megatron.checkpoint.hf.offline_source import Source
from gspo_megatron.errors import DataError
from gspo_megatron.files import fingerprint


def tokenizer_files(checkpoint: Source) -> tuple[list[Path], list[str]]:
    """What goes beside the weights, and notes for the user: what the checkpoint has of the folder
    that it was imported from, else the tokenizer that the run named; config.json is made anew."""
    folder = checkpoint.imported
    if folder is None:
        if checkpoint.tokenizer is None:
            return [], []
        folder = Path(checkpoint.tokenizer)
        if not folder.exists():
            return [], [f"{folder}: the run's tokenizer is not there (any more), and is left out"]
        if checkpoint.fingerprint not in (None, fingerprint(folder)):
            lacks = "no longer has the contents that the run's tokenizer had, and is left out"
            return [], [f"{folder}: {lacks}"]
        if folder.is_file():
            return [folder], []
    files = [file for name in SIDE_FILES if (file := folder / name).is_file()]
    return [file for file in files if file.name != "config.json"], []


def check_tokenizer(files: Sequence[Path], vocab_size: int) -> None:
    """Raises DataError where one of the files has a token beyond the vocabulary."""
    for file in files:
        last = _last_id(file)
        if last is not None and last >= vocab_size:
            raise DataError(
                f"{file}: has token ids up to {last}, the model's vocabulary has {vocab_size} "
                "tokens; they do not belong together"
            )


def _last_id(file: Path) -> int | None:
    """The highest token id that a file names, None for a file that names none."""
    try:
        if file.name == "tokenizer.json":
            from tokenizers import Tokenizer

            return max(Tokenizer.from_file(str(file)).get_vocab().values(), default=None)
        if file.name in ("vocab.json", "added_tokens.json"):
            return max(json.loads(file.read_text(encoding="utf-8")).values(), default=None)
        if file.suffix == ".model":
            import sentencepiece

            return sentencepiece.SentencePieceProcessor(model_file=str(file)).get_piece_size() - 1
    except Exception as error:  # tokenizers raises no other kind
        raise DataError(f"{file}: cannot be read: {error}") from error
    return None
