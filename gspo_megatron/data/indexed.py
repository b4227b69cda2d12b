"""Checks of Megatron-Core's indexed datasets, without Megatron-Core, which does not check that
PREFIX.bin, the tokens of all documents, and PREFIX.idx, where each begins, belong together.
PREFIX.json, which prepare_data writes beside them, describes them and has their checksums."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.data.rows import Problems
from gspo_megatron.errors import DataError
from gspo_megatron.files import fingerprint, parse_json

# The file format: magic, version, type code, number of sequences, number of document ends.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # codes of whole numbers
_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """The content of PREFIX.json."""

    documents: int
    tokens: int
    dtype: str
    largest_token: int
    vocab_size: int  # of the tokenizer
    eod_id: int | None  # ends every document
    tokenizer: dict[str, str]  # name and sha256
    inputs: list[dict[str, Any]]  # name and bytes
    text_field: str
    empty_documents: int  # left out
    duplicates: int  # left out
    bytes: dict[str, int] = field(default_factory=dict)  # of the .bin and the .idx file
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """The content of an .idx file."""

    dtype: np.dtype[Any]
    lengths: np.ndarray  # [sequences] int32, in tokens
    pointers: np.ndarray  # [sequences] int64, in bytes
    document_ends: np.ndarray  # [documents + 1] int64, in sequences, from 0


def data_files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """The .bin, .idx and .json file of a dataset."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def prefix_of(path: str) -> str:
    """The prefix of a dataset, from the prefix or the path of one of its files.

    Raises DataError if no file name is left.
    """
    ending = next((file.name for file in data_files("") if path.endswith(file.name)), "")
    prefix = path.removesuffix(ending)
    if os.path.basename(prefix) in ("", ".", ".."):
        example = os.path.join(prefix or ".", "corpus")
        raise DataError(f"{path}: names a folder and no file in it; write for example {example}")
    return prefix


def read_index(path: str | Path) -> Index:
    """Reads an .idx file. Raises DataError if it is missing or is no index."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; tools/prepare_data.py writes it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise DataError(f"{path}: not an index of Megatron-Core's indexed datasets")
    _, version, code, sequences, ends = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{path}: version {version}, type code {code}: not an index of tokens")
    wanted = _HEADER.size + sequences * (4 + 8) + ends * 8
    if len(content) != wanted:
        raise DataError(
            f"{path}: has {len(content)} bytes, {wanted} are wanted for its {sequences} sequences: "
            "cut off or damaged"
        )
    at = _HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + lengths.nbytes)
    document_ends = np.frombuffer(content, "<i8", ends, at + lengths.nbytes + pointers.nbytes)
    return Index(np.dtype(f"<{_DTYPES[code]}"), lengths, pointers, document_ends)


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The content of PREFIX.json; None without that file."""
    path = data_files(prefix)[2]
    try:
        return Manifest(**parse_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a description that prepare_data wrote: {error}") from error


def check_dataset(prefix: str | Path, model_vocab_size: int | None = None) -> Manifest | None:
    """Checks that the files belong together and that their ids are in the model's vocabulary.

    Reads only the index, the manifest and the sizes. Returns the manifest.

    Raises DataError with all problems.
    """
    bin_path, idx_path, json_path = data_files(prefix)
    index, manifest = read_index(idx_path), read_manifest(prefix)
    problems = Problems()
    lengths, documents = index.lengths, index.document_ends
    ends = np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    starts = np.append(0, ends)[:-1]
    if (lengths < 0).any() or not np.array_equal(index.pointers, starts):
        problems.add(f"{idx_path}", "sequences do not follow each other: damaged")
    covered = len(documents) and documents[0] == 0 and documents[-1] == len(lengths)
    if not covered or (np.diff(documents) < 0).any():
        problems.add(f"{idx_path}", "documents do not cover all sequences: damaged")
    tokens = int(lengths.sum(dtype=np.int64))
    wanted = tokens * index.dtype.itemsize
    try:
        size = bin_path.stat().st_size
    except OSError as error:
        raise DataError(f"{bin_path}: cannot be read: {error.strerror or error}") from error
    if size != wanted:
        problems.add(
            f"{bin_path}",
            f"has {size} bytes, but {idx_path} describes {wanted}: they do not belong together",
        )
    if manifest is not None:
        for path in (bin_path, idx_path):
            noted, size = manifest.bytes.get(path.suffix[1:]), path.stat().st_size
            if noted != size:
                problems.add(f"{path}", f"has {size} bytes, but {json_path} notes {noted}")
        if (len(documents) - 1, tokens) != (manifest.documents, manifest.tokens):
            problems.add(
                f"{idx_path}",
                f"has {len(documents) - 1} documents of {tokens} tokens, but {json_path} notes "
                f"{manifest.documents} of {manifest.tokens}",
            )
        if model_vocab_size is not None and manifest.vocab_size > model_vocab_size:
            problems.add(
                f"{bin_path}",
                f"made with a tokenizer of {manifest.vocab_size} ids, but the model's vocabulary "
                f"has {model_vocab_size}; legal: model.vocab_size = {manifest.vocab_size} or more",
            )
    problems.raise_if_any()
    return manifest


def validate_tokens(prefix: str | Path, vocab_size: int, eod_id: int | None = None) -> None:
    """Does what `check_dataset` does, and reads the tokens: checksums, range of ids, ends of
    documents.

    Raises DataError with all problems.
    """
    manifest = check_dataset(prefix)
    bin_path, idx_path, _ = data_files(prefix)
    index = read_index(idx_path)
    problems = Problems()
    if manifest is not None:
        for path in (bin_path, idx_path):
            if fingerprint(path) != manifest.sha256.get(path.suffix[1:]):
                problems.add(f"{path}", "its checksum is not the one in the manifest")
    tokens = np.memmap(bin_path, index.dtype, mode="r") if len(index.lengths) else np.empty(0)
    bad = 0
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        block = tokens[start : start + _TOKENS_AT_ONCE]
        bad += int(np.count_nonzero((block < 0) | (block >= vocab_size)))
    if bad:
        problems.add(f"{bin_path}", f"{bad} tokens are outside the vocabulary of {vocab_size}")
    if eod_id is not None and len(tokens) and not problems:
        last = index.document_ends[1:] - 1  # the last sequence of each document
        ends = index.pointers[last] // index.dtype.itemsize + index.lengths[last] - 1
        missing = int(np.count_nonzero(tokens[ends] != eod_id))
        if missing:
            problems.add(f"{bin_path}", f"{missing} documents do not end in token {eod_id}")
    problems.raise_if_any()
