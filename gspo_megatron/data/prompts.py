"""Prompt files: JSON Lines or Parquet, one prompt a line or row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_megatron.data.problems import Problems
from gspo_megatron.data.rows import read_rows, string_fault
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt


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
    problems = Problems()
    prompts = list(read_prompts(path, prompt_field, answer_field, problems))
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"{path}: holds no prompts; one JSON object a line is wanted")
    return prompts


def read_prompts(
    path: str | Path, prompt_field: str, answer_field: str, problems: Problems
) -> Iterator[Prompt]:
    """The prompts of a file one by one, as `load_prompts` reads them; bad rows go to `problems`."""
    chosen = {"data.prompt_field": prompt_field, "data.answer_field": answer_field}
    for where, row in read_rows(Path(path), chosen, problems, what="prompt file"):
        prompt = _to_prompt(where, row, prompt_field, answer_field, problems)
        if prompt is not None:
            yield prompt


def _to_prompt(
    where: str, row: dict[str, Any], prompt_field: str, answer_field: str, problems: Problems
) -> Prompt | None:
    good = True
    for key, name in (("data.prompt_field", prompt_field), ("data.answer_field", answer_field)):
        fault = string_fault(row, name, key)
        if fault is None and key == "data.prompt_field" and not row[name].strip():
            fault = f"field {name!r} is empty; a prompt needs some text"
        if fault is not None:
            problems.add(where, fault)
            good = False
    if not good:
        return None
    others = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    return Prompt(text=row[prompt_field], answer=row[answer_field], source=where, fields=others)
