"""The files beside exported weights: config.json, generation_config.json and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.families import (
    describe,
    family_of,
    family_of_shape,
    is_score_model,
    language_model,
)
from gspo_megatron.families.model_shape import ModelShape, shape_of
from gspo_megatron.files import SIDE_FILES, copied_as, object_in, parse_json

GENERATION = "generation_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")  # either may have the template
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim")


def export_config(
    shape: ModelShape,
    vocab_size: int,
    dtype: torch.dtype,
    original: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json for weights of this shape and dtype. Keys that only vLLM needs are added.

    original: the config.json that the weights were imported with. If it still describes the model,
    all its keys are kept. Otherwise the keys that describe a model are replaced, and the other keys
    are kept. Raises ConfigError if the family of `original` has no models of this shape. Without
    `original`, raises ConfigError if no family has models of this shape.
    """
    original = None if original is None else language_model(original)
    if original is not None and shape.scores and not is_score_model(original):
        original = {**original, **family_of(original).score_keys()}
    family = family_of_shape(shape) if original is None else family_of(original)
    built = family.config(shape, vocab_size)
    if built is None:
        raise ConfigError(
            [f"the shape of this model does not fit its family {family.model_type} (any more)"]
        )
    dtype_name = str(dtype).removeprefix("torch.")
    if original is None:
        return {**built, "torch_dtype": dtype_name}
    if shape_of(describe(original)) == shape_of(describe(built)):
        config = {key: built[key] for key in family.vllm_keys if key in built} | dict(original)
    else:
        config = {key: value for key, value in original.items() if key not in _ROPE} | built
    # The original may have layers that predict further tokens (MTP), FP8 weights and Python code.
    # The exported model has none of them.
    config |= {key: 0 for key in family.next_token_keys if original.get(key)}
    config.pop("quantization_config", None)
    config.pop("auto_map", None)  # it names code that is not exported
    if config.get("model_type") in family.renamed_types:  # only that code knows this name
        config["model_type"] = family.model_type
    return {**config, "dtype" if "dtype" in original else "torch_dtype": dtype_name}


def with_padding(config: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Add the pad_token_id of a tokenizer's `files` to the config.json of a preference model that
    has no pad_token_id. Without this id, transformers scores only one sequence at a time. Other
    configs are returned unchanged. Raises DataError if the files cannot be read."""
    if not is_score_model(config) or config.get("pad_token_id") is not None:
        return dict(config)
    pad_id = _token_ids(files).get("pad_token_id")
    return dict(config) if pad_id is None else {**config, "pad_token_id": pad_id}


def tokenizer_files(tokenizer: str | Path | None) -> list[Path]:
    """The files of a tokenizer that are copied, without config.json. The tokenizer is a folder or
    one file."""
    if tokenizer is None:
        return []
    path = Path(tokenizer)
    if path.is_file():  # a sentencepiece model, which may have the following files beside it
        template, settings = (path.with_name(name) for name in _TEMPLATE_FILES)
        if not template.is_file() and isinstance(object_in(settings).get("chat_template"), str):
            template = settings
        others = (template, path.with_name(GENERATION))
        return [path, *(file for file in others if file.is_file())]
    names = (name for name in SIDE_FILES if name != "config.json")
    return [copied_as(file) for name in names if (file := path / name).is_file()]


def check_tokenizer(files: Sequence[Path], vocab_size: int) -> None:
    """Raise DataError if one of the files has a token beyond the vocabulary."""
    for file in files:
        last = -1
        try:
            if file.name == "tokenizer.json":
                last = max(_tokenizers(file).get_vocab().values(), default=-1)
            elif file.name in ("vocab.json", "added_tokens.json"):
                last = max(parse_json(file.read_bytes()).values(), default=-1)
            elif file.suffix == ".model":
                last = _sentencepiece(file).get_piece_size() - 1
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{file}: cannot be read: {error}") from error
        if last >= vocab_size:
            raise DataError(
                f"{file}: has token ids up to {last}, the model's vocabulary has {vocab_size} "
                "tokens; they do not belong together"
            )


def generation_files(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return {"generation_config.json": its content} for a model trained with a tokenizer of these
    `files`. From this file, transformers' `generate` learns which token ends a response. Returns {}
    if `files` have this file already, or if they name no such token. Raises DataError if a file
    cannot be read.
    """
    if any(file.name == GENERATION for file in files):
        return {}
    ids = {name: token_id for name, token_id in _token_ids(files).items() if token_id is not None}
    return {GENERATION: ids} if "eos_token_id" in ids else {}


def _token_ids(files: Sequence[Path]) -> dict[str, int | None]:
    """Return the ids of the end-of-sequence token and of the padding token, as a tokenizer's files
    name them. Raises DataError if a file cannot be read."""
    try:
        return _read_ids({file.name: file for file in files})
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"{files[0].parent}: no tokenizer that can be read: {error}") from error


def _read_ids(by_name: dict[str, Path]) -> dict[str, int | None]:
    config_file, vocabulary = by_name.get("tokenizer_config.json"), by_name.get("tokenizer.json")
    if config_file is not None and vocabulary is not None:
        config, tokenizer = parse_json(config_file.read_bytes()), _tokenizers(vocabulary)
        special = by_name.get("special_tokens_map.json")
        if special is not None and "added_tokens_decoder" not in config:
            # An older version wrote this folder. Then this file counts more, as in transformers.
            config = {**config, **parse_json(special.read_bytes())}
        ids = {}
        for name in ("eos", "pad"):
            token = config.get(f"{name}_token")
            if token is not None:  # a token may be an object with settings
                text = token if isinstance(token, str) else str(token["content"])
                ids[f"{name}_token_id"] = tokenizer.token_to_id(text)
        return ids
    for file in by_name.values():
        if file.suffix == ".model":
            model = _sentencepiece(file)
            ids = {"eos_token_id": model.eos_id(), "pad_token_id": model.pad_id()}
            return {name: token_id if token_id >= 0 else None for name, token_id in ids.items()}
    return {}


def _tokenizers(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _sentencepiece(file: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(file))
