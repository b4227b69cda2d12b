"""Reads rows of input files, JSON Lines or Parquet, one line or one batch of rows at a time.

`Problems` gathers the faults of single rows. If a whole file cannot be used, DataError is raised at
once.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError
from gspo_megatron.files import parse_json

PARQUET_MAGIC = b"PAR1"
_COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh")  # gzip, xz, zstd, bzip2
_TABLES = (".csv", ".tsv", ".xls", ".xlsx", ".ods")
SHOWN_ROWS = 5  # few, because a file of the wrong kind has a problem on every line

Row = tuple[str, dict[str, Any]]  # "path:line" (Parquet: row), counted from 1, and the fields
Choice = tuple[str, str]  # a setting, and the field or column that it names


class Problems:
    """The texts of the first `shown` problems, and the number of all problems."""

    def __init__(self, shown: int = SHOWN_ROWS) -> None:
        self._shown = shown
        self._lines: list[str] = []
        self._count = 0

    def add(self, where: str, what: str) -> None:
        """Add a problem. `where` is a file, "file:line" or a setting."""
        self._count += 1
        if self._count <= self._shown:
            self._lines.append(f"{where}: {what}")

    def __bool__(self) -> bool:
        return self._count > 0

    def raise_if_any(self) -> None:
        """Raise one DataError with the first problems and the number of the remaining ones. Without
        a problem, do nothing."""
        hidden = self._count - len(self._lines)
        if self._count:
            raise DataError("\n".join(self._lines + ([f"… and {hidden} more"] if hidden else [])))


def read_rows(
    path: Path, columns: Sequence[Choice], problems: Problems, what: str = "file"
) -> Iterator[Row]:
    """Yield the rows of a Parquet file or a JSON Lines file in UTF-8, or of the files in a folder.
    Blank lines are skipped.

    A Parquet file must have all `columns`. The caller checks the fields of JSON rows.

    Raises DataError if the file or folder does not exist or cannot be read. `what` names the kind
    of file in the message.
    """
    if path.is_dir():
        for file in files_of(path):
            yield from read_rows(file, columns, problems, what)
        return
    if is_parquet(path, what):
        yield from _read_parquet(path, columns, problems)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            row = _parse_line(where, line, problems)
            if row is not None:
                yield where, row


def files_of(folder: Path) -> list[Path]:
    """Return the .jsonl and .parquet files in a folder, sorted by name. Raises DataError."""
    found = sorted(file for ending in ("jsonl", "parquet") for file in folder.glob(f"*.{ending}"))
    packed = sorted(folder.glob("*.jsonl.*z*"))  # .gz, .xz, .zst, .bz2
    if left_out := [file for file in packed if file.with_suffix("") not in found]:
        raise DataError(f"{left_out[0]}: a compressed file, which is not read; unpack it")
    if not found:
        raise DataError(f"{folder}: a folder without .jsonl and .parquet files")
    return found


def check_rows(path: Path, what: str) -> None:
    """Raise DataError if the file does not exist, or if the folder has no file of rows."""
    for file in files_of(path) if path.is_dir() else [path]:
        is_parquet(file, what)


def is_parquet(path: Path, what: str) -> bool:
    """Whether a file is Parquet, by its suffix or by Parquet's magic bytes."""
    if path.is_fifo():
        raise DataError(f"{path}: a pipe, which can be read only once; give a file")
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except FileNotFoundError:
        where = "" if path.is_absolute() else f"; the current folder is {os.getcwd()}"
        raise DataError(f"{path}: no such {what}{where}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start.startswith(_COMPRESSED):
        raise DataError(f"{path}: a compressed file, which is not read; unpack it")
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise DataError(
            f"{path}: a JSON array; JSON Lines are wanted, one object a line. jq -c '.[]' {path} "
            "writes them"
        )
    if path.suffix.lower() in _TABLES:
        raise DataError(
            f"{path}: a table; JSON Lines are wanted, one object a line. Save it as CSV; "
            "docs/data.md has a command that converts CSV"
        )
    return path.suffix == ".parquet" or start.startswith(PARQUET_MAGIC)


def _parse_line(where: str, line: bytes, problems: Problems) -> dict[str, Any] | None:
    """Return the JSON object on a line. Returns None for a blank line, and for a bad line after
    adding a problem."""
    try:
        # The line feed is stripped: Python would report an error at the line feed as column 1 of
        # the next line.
        text = line.rstrip().decode("utf-8").removeprefix("\ufeff")  # a byte-order mark
        row = parse_json(text, _unique_keys) if text else None
    except UnicodeDecodeError as error:
        problems.add(where, f"not valid UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        problems.add(where, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except ValueError as error:
        problems.add(where, f"JSON that cannot be read: {error}")
    else:
        if not text or isinstance(row, dict):
            return row
        problems.add(where, f"{json_type(row)}; a JSON object is wanted")
    return None


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of a JSON Lines file. Values that JSON lacks, such as the dates of a
    Parquet file, become texts."""
    line = json.dumps(row, ensure_ascii=False, default=str)
    if text_fault(line) is not None:  # the row holds half a surrogate pair
        line = json.dumps(row, default=str)
    return f"{line}\n"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ValueError for a duplicate key, which Python's parser accepts."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        duplicate = _first_duplicate(key for key, _ in pairs)
        raise ValueError(f"key {duplicate} is there twice; keep one of them")
    return unique


def _first_duplicate(names: Iterable[str]) -> str:
    """Return the first of the names that occurs several times, for a message."""
    return f"{next(name for name, count in Counter(names).items() if count > 1)!r:.60}"


def _without_nulls(value: Any) -> Any:
    """Return a value of a Parquet row without the nulls of its mappings."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _read_parquet(path: Path, columns: Sequence[Choice], problems: Problems) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            present = file.schema_arrow.names
            if len({*present}) < len(present):
                raise DataError(
                    f"{path}: column {_first_duplicate(present)} is there twice; keep one of them"
                )
            absent = [each for each in columns if not {each[1], _top(each[1])} & {*present}]
            for key, name in absent:
                names = ", ".join(map(repr, present))
                what = f"no column {name!r}; the columns are: {names} ({key} chooses one)"
                problems.add(f"{path}", what)
            if absent:
                return  # one problem for each column is enough, not one for each row
            # Parquet gives all rows the keys of any row, also inside of a column, such as tool
            # calls or IFEval's `kwargs`. Rows of JSON lack these keys.
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    plain = {key: _without_nulls(value) for key, value in row.items()}
                    yield f"{path}:{number}", plain
    except UnicodeDecodeError:
        problems.add(f"{path}:{number + 1}", "not valid UTF-8 in this row or shortly after")
    except (pyarrow.ArrowException, OSError, OverflowError) as error:  # a date that Python lacks
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: not a readable Parquet file: {reason}") from error


def find_field(row: Mapping[str, Any], name: str, key: str) -> tuple[Any, str | None]:
    """Return (value, None) for a field, or (None, fault) if the row does not have this field.

    "a.b" is field b of the object in field a, unless a field is called "a.b". `key` is the setting
    that chooses the field."""
    if name in row:
        return row[name], None
    value: Any = row
    parts = name.split(".")
    for number, part in enumerate(parts):
        above = ".".join(parts[:number])
        if not isinstance(value, Mapping):
            return None, f"field {above!r} is {json_type(value)}; {name!r} needs an object ({key})"
        if part not in value:
            present = ", ".join(map(repr, value)) or "none"
            of = f" of {above!r}" if above else ""
            return None, f"no field {name!r}; the fields{of} are: {present} ({key} chooses one)"
        value = value[part]
    return value, None


def _top(name: str) -> str:
    """Return the top-level field of a dotted name: "a" for "a.b"."""
    return name.partition(".")[0]


def text_fault(value: object) -> str | None:
    """Return why a value is not a string of valid Unicode, or None. In a message, the returned text
    follows the field's name."""
    if not isinstance(value, str):
        return f"is {json_type(value)}; a string is wanted"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair, UTF-8 cannot
        return f"holds half a surrogate pair at character {error.start + 1}"
    return None


def json_fault(value: object) -> str | None:
    """Return why JSON cannot hold a value (such as a date in Parquet), or None. In a message, the
    returned text follows the field's name."""
    if isinstance(value, str):
        return text_fault(value)
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        faults = filter(None, map(json_fault, inner))
        return next((f"holds a value that {fault}" for fault in faults), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}; a JSON value is wanted"  # pandas writes NaN for an absent value
    return None if type(value) in _JSON_TYPES else f"is {json_type(value)}; a JSON value is wanted"


def json_type(value: object) -> str:
    """Return JSON's name for the type of a value."""
    return _JSON_TYPES.get(type(value), f"of type {type(value).__name__}")


_JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
