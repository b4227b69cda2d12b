"""Rows of input files, one after the other: JSON Lines, Parquet and plain text.

Nothing is read whole: a line or a batch of Parquet rows at a time. Faults of single rows go into a
`Problems`; what makes a file unusable raises DataError at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.data.problems import Problems
from gspo_megatron.errors import DataError

PARQUET_MAGIC = b"PAR1"
UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TEXT_SUFFIXES = (".txt", ".text", ".md")

Row = tuple[str, dict[str, Any]]  # "path:line" (Parquet: row), counted from 1, and the fields


def file_kind(path: Path, what: str = "file") -> str:
    """One of parquet, text, jsonl: by the name's ending or Parquet's magic bytes.

    Raises DataError where there is no such file (`what` is the word for it) or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".parquet" or file.read(4) == PARQUET_MAGIC:
                return "parquet"
    except FileNotFoundError:
        raise DataError(f"{path}: no such {what}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return "text" if path.suffix in TEXT_SUFFIXES else "jsonl"


def read_rows(
    path: Path, columns: Mapping[str, str], problems: Problems, what: str = "file"
) -> Iterator[Row]:
    """The rows of a Parquet file, or of a JSON Lines file in UTF-8 (blank lines are skipped).

    `columns`: the columns that a Parquet file must have, by the name of the setting that chooses
    each. The fields of JSON rows are for the caller to check, who knows their types.
    """
    if file_kind(path, what) == "parquet":
        return read_parquet(path, columns, problems)
    return parse_json_lines(numbered_lines(path), problems)


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """("path:line", line with its end) of each line, without a byte-order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield (
                f"{path}:{number}",
                line.removeprefix(UTF8_BYTE_ORDER_MARK) if number == 1 else line,
            )


def parse_json_lines(lines: Iterable[tuple[str, bytes]], problems: Problems) -> Iterator[Row]:
    """JSON objects, one a line; blank lines are skipped."""
    for where, line in lines:
        if not line.strip():
            continue
        text = decode_line(where, line, problems)
        if text is None:
            continue
        try:
            row = _DECODER.decode(text)
        except json.JSONDecodeError as error:
            problems.add(where, f"not JSON: {error.msg} at column {error.colno}")
        except _KeyTwiceError as error:
            problems.add(where, f"key {error} is there twice; leave one of them")
        except (ValueError, RecursionError) as error:  # a number or nesting beyond Python's
            problems.add(where, f"JSON that cannot be read: {error}")
        else:
            if isinstance(row, dict):
                yield where, row
            else:
                problems.add(where, f"{json_type(row)}; a JSON object is wanted")


class _KeyTwiceError(ValueError):
    """An object names a value twice, of which Python would take the last without a word."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise _KeyTwiceError(f"{key!r:.60}")
            keys.add(key)
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def decode_line(where: str, line: bytes, problems: Problems) -> str | None:
    """The line as text; None, and a problem, where it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.add(where, f"not valid UTF-8 at byte {error.start + 1} of the line")
        return None


def read_parquet(
    path: Path,
    columns: Mapping[str, str],
    problems: Problems,
    row_groups: Sequence[int] | None = None,
    first_row: int = 1,
    only_columns: bool = False,
) -> Iterator[Row]:
    """Rows of a Parquet file, or of some row groups of it, the first of which is row `first_row`.

    With `only_columns` nothing else is read from the file.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    number = first_row - 1
    try:
        with parquet.ParquetFile(path) as file:
            present = file.schema_arrow.names
            for key, name in columns.items():
                if name not in present:
                    names = ", ".join(map(repr, present))
                    what = f"no column {name!r}; the columns are: {names} ({key} chooses one)"
                    problems.add(f"{path}", what)
            if not set(columns.values()) <= set(present):
                return  # one line a column rather than one a row
            wanted = list(columns.values()) if only_columns else None
            for batch in file.iter_batches(row_groups=row_groups, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except UnicodeDecodeError:
        problems.add(f"{path}:{number + 1}", "not valid UTF-8 in this row or shortly after")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def string_fault(row: Mapping[str, Any], name: str, key: str) -> str | None:
    """What keeps `row[name]` from being a string of Unicode text; `key` is its setting."""
    if name not in row:
        present = ", ".join(map(repr, row)) or "none"
        return f"no field {name!r}; the fields are: {present} ({key} chooses one)"
    value = row[name]
    if not isinstance(value, str):
        return f"field {name!r} is {json_type(value)}; a string is wanted"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        return f"field {name!r} holds half a surrogate pair at character {error.start + 1}"
    return None


def json_type(value: object) -> str:
    """A value's type in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "an array"
    return "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
