"""Checks Megatron-Core's indexed datasets, without Megatron-Core.

PREFIX.bin has the tokens of all documents, PREFIX.idx their positions. Megatron-Core does not check
that the two files belong together. PREFIX.json is optional; earlier releases wrote it. It says
which tokenizer made the tokens and which token ends a document."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.data.rows import Problems
from gspo_megatron.errors import DataError
from gspo_megatron.files import os_errors, parse_json

# The file format: magic, version, type code, number of sequences, number of document ends.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # codes of the integer types
_CHECKED_TOKENS = 1 << 22  # tokens that are checked, at the beginning of a dataset


@dataclass(frozen=True)
class Manifest:
    """The keys of PREFIX.json that this program reads."""

    vocab_size: int  # size of the tokenizer
    eod_id: int | None  # the token that ends every document
    tokenizer: dict[str, str]  # name and sha256


@dataclass(frozen=True)
class Index:
    """The content of an .idx file."""

    dtype: np.dtype[Any]
    lengths: np.ndarray  # [sequences] int32, in tokens
    pointers: np.ndarray  # [sequences] int64, in bytes
    document_ends: np.ndarray  # [documents + 1] int64, sequence numbers, beginning with 0


def data_files(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Return the paths of a dataset's .bin, .idx and .json file."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def read_index(path: str | Path) -> Index:
    """Read an .idx file. Raises DataError if it is missing or is not an index."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; docs/data.md says how to make it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise DataError(f"{path}: not an index of Megatron-Core's indexed datasets")
    _, version, code, sequences, ends = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{path}: version {version}, type code {code}: not an index of tokens")
    needed = _HEADER.size + sequences * (4 + 8) + ends * 8
    if len(content) != needed:
        raise DataError(
            f"{path}: has {len(content)} bytes, {needed} are wanted for its {sequences} sequences: "
            "cut off or damaged"
        )
    at = _HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + lengths.nbytes)
    document_ends = np.frombuffer(content, "<i8", ends, at + lengths.nbytes + pointers.nbytes)
    return Index(np.dtype(f"<{_DTYPES[code]}"), lengths, pointers, document_ends)


def read_manifest(prefix: str | Path) -> Manifest | None:
    """Return the content of PREFIX.json; None if there is no such file."""
    path = data_files(prefix)[2]
    try:
        content = parse_json(path.read_bytes())
        tokenizer = {key: content["tokenizer"][key] for key in ("name", "sha256")}
        size, end = content["vocab_size"], content["eod_id"]
        if not (type(size) is int and isinstance(end, int | None)):
            raise ValueError("vocab_size and eod_id are no numbers")
        return Manifest(size, end, tokenizer)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the description of a dataset: {error}") from error


def check_dataset(prefix: str | Path, model_vocab_size: int | None = None) -> Manifest | None:
    """Check that the files of a dataset belong together, and that its token ids are in the model's
    vocabulary.

    Reads the index, the sizes and the first tokens. Returns the manifest.

    Raises DataError with all problems.
    """
    bin_path, idx_path, _ = data_files(prefix)
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
    expected = int(lengths.sum(dtype=np.int64)) * index.dtype.itemsize
    with os_errors(bin_path, "cannot be read"):
        size = bin_path.stat().st_size
        tokens = np.fromfile(bin_path, index.dtype, _CHECKED_TOKENS)
    if size != expected:
        problems.add(
            f"{bin_path}",
            f"has {size} bytes, but {idx_path} describes {expected}: they do not belong together",
        )
    if model_vocab_size is not None:
        wrong = tokens[(tokens < 0) | (tokens >= model_vocab_size)]
        if manifest is not None and manifest.vocab_size > model_vocab_size:
            problems.add(
                f"{bin_path}",
                f"made with a tokenizer of {manifest.vocab_size} ids, but the model's vocabulary "
                f"has {model_vocab_size}; allowed: model.vocab_size = {manifest.vocab_size} or "
                "more",
            )
        elif len(wrong):
            problems.add(
                f"{bin_path}",
                f"has the token {wrong[0]}, but the model's vocabulary has {model_vocab_size} ids; "
                "name the tokenizer that made it in data.tokenizer",
            )
    problems.raise_if_any()
    return manifest
