"""generation_config.json: where transformers' generate stops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError

FILE = "generation_config.json"


def generation_files(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The file by name, for a model trained here that travels with these `files` of its tokenizer:
    without it transformers would not know which token ends an answer, or take the one that ended
    them before, where the training began with somebody else's model.

    Nothing where it is among them, or they name no such token. Raises DataError where one cannot be
    read. Imports neither torch nor transformers.
    """
    by_name = {file.name: file for file in files}
    if FILE in by_name:
        return {}
    try:
        found = _token_ids(by_name)
    except Exception as error:  # tokenizers raises no other kind
        raise DataError(f"{files[0].parent}: no tokenizer that can be read: {error}") from error
    known = {name: token_id for name, token_id in found.items() if token_id is not None}
    return {FILE: known} if "eos_token_id" in known else {}


def _token_ids(by_name: dict[str, Path]) -> dict[str, int | None]:
    settings, vocabulary = by_name.get("tokenizer_config.json"), by_name.get("tokenizer.json")
    if settings is not None and vocabulary is not None:
        from tokenizers import Tokenizer

        named, tokenizer = json.loads(settings.read_bytes()), Tokenizer.from_file(str(vocabulary))
        return {
            f"{name}_token_id": tokenizer.token_to_id(_text(token))
            for name in ("eos", "pad")
            if (token := named.get(f"{name}_token")) is not None
        }
    for file in by_name.values():
        if file.suffix == ".model":
            from sentencepiece import SentencePieceProcessor

            model = SentencePieceProcessor(model_file=str(file))
            ids = {"eos_token_id": model.eos_id(), "pad_token_id": model.pad_id()}
            return {name: token_id if token_id >= 0 else None for name, token_id in ids.items()}
    return {}


def _text(token: str | dict[str, Any]) -> str:
    """Of a token in tokenizer_config.json, which may be spelled with its settings."""
    return token if isinstance(token, str) else str(token["content"])
