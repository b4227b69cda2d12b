"""Prompt files: JSON Lines or Parquet, one prompt a line or row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_megatron.data.problems import Problems
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt

PARQUET_MAGIC = b"PAR1"
UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def load_prompts(
    path: str | Path, prompt_field: str = "prompt", answer_field: str = "answer"
) -> list[Prompt]:
    """Reads a prompt file whole, in the file's order.

    A file that ends in `.parquet` or starts with Parquet's magic bytes is read as Parquet, any
    other as JSON Lines in UTF-8 (blank lines are skipped). Both fields must be strings and the
    prompt must hold more than white space; all other fields of a line are kept in `fields`.
    `source` is "path:line", counted from 1 (for Parquet: the row).

    Raises DataError that names every bad line (the first 20, and how many more).
    """
    path = Path(path)
    problems = Problems()
    prompts = []
    if _is_parquet(path):
        chosen = {"data.prompt_field": prompt_field, "data.answer_field": answer_field}
        rows = _read_parquet(path, chosen, problems)
    else:
        rows = _read_json_lines(path, problems)
    for where, row in rows:
        prompt = _to_prompt(where, row, prompt_field, answer_field, problems)
        if prompt is not None:
            prompts.append(prompt)
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"{path}: holds no prompts; one JSON object a line is wanted")
    return prompts


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.suffix == ".parquet" or file.read(4) == PARQUET_MAGIC
    except FileNotFoundError:
        raise DataError(f"{path}: no such prompt file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_json_lines(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(UTF8_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                problems.add(where, f"not valid UTF-8 at byte {error.start + 1} of the line")
            except json.JSONDecodeError as error:
                problems.add(where, f"not JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # a number or nesting beyond Python's
                problems.add(where, f"JSON that cannot be read: {error}")
            else:
                if isinstance(row, dict):
                    yield where, row
                else:
                    problems.add(where, f"{_json_type(row)}; a JSON object is wanted")


def _read_parquet(
    path: Path, chosen: dict[str, str], problems: Problems
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            for key, name in chosen.items():
                if name not in columns:
                    present = ", ".join(map(repr, columns))
                    what = f"no column {name!r}; the columns are: {present} ({key} chooses one)"
                    problems.add(f"{path}", what)
            if not set(chosen.values()) <= set(columns):
                return  # one line a column rather than one a row
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except UnicodeDecodeError:
        problems.add(f"{path}:{number + 1}", "not valid UTF-8 in this row or shortly after")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {_first_line(error)}") from error


def _to_prompt(
    where: str, row: dict[str, Any], prompt_field: str, answer_field: str, problems: Problems
) -> Prompt | None:
    good = True
    for key, name in (("data.prompt_field", prompt_field), ("data.answer_field", answer_field)):
        fault = _string_fault(row, name, key)
        if fault is None and key == "data.prompt_field" and not row[name].strip():
            fault = f"field {name!r} is empty; a prompt needs some text"
        if fault is not None:
            problems.add(where, fault)
            good = False
    if not good:
        return None
    others = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    return Prompt(text=row[prompt_field], answer=row[answer_field], source=where, fields=others)


def _string_fault(row: dict[str, Any], name: str, key: str) -> str | None:
    if name not in row:
        present = ", ".join(map(repr, row)) or "none"
        return f"no field {name!r}; the fields are: {present} ({key} chooses one)"
    value = row[name]
    if not isinstance(value, str):
        return f"field {name!r} is {_json_type(value)}; a string is wanted"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        return f"field {name!r} holds half a surrogate pair at character {error.start + 1}"
    return None


def _json_type(value: object) -> str:
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
