"""Reading the line-by-line JSON files of a run folder.

A metric record is a flat dict: `step`, an optional `phase` ("rl" when absent), and
figures under nested names such as "ratio/sequence/p50". A figure that was not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
RL = "rl"
WARM_START = "warm_start"
PRETRAINING, FINE_TUNING = "pretrain", "sft"  # runs of their own

Record = dict[str, Any]


def parse_record(line: bytes) -> Record | None:
    """The JSON object on one line, or None when the line is damaged."""
    try:
        # Other writers may put NaN into JSON; here a figure that is not finite is always None.
        record = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except ValueError:  # covers both invalid JSON and invalid UTF-8
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> list[Record]:
    """All records of a file with one JSON object a line.

    A last line without its line feed that does not parse is one that is being written at this
    moment, or was when its writer died, and is left out.

    Raises DataError naming file:line for any other damaged line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    records = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise DataError(f"{path}:{number}: not a JSON object: {_excerpt(line)}")
    return records


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The metric records of a run in the order they were written.

    Raises DataError when `run_dir` holds no metrics.jsonl, when a line is damaged (file:line), and
    when a record has no whole number as its step.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path}: no such file; {run_dir} is not the folder of a run")
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):
        if type(record.get("step")) is not int:
            raise DataError(f"{path}: record {number} has no whole number as its `step`")
    return records


def read_samples(run_dir: str | Path) -> list[Record]:
    """The sample records of a run; none when it kept no samples. Raises DataError (file:line)."""
    path = Path(run_dir) / SAMPLES_FILE
    return read_json_lines(path) if path.is_file() else []


def phase_of(record: Mapping[str, Any]) -> str:
    """The phase a record belongs to."""
    return str(record.get("phase", RL))


def series(
    records: Iterable[Mapping[str, Any]], key: str, phase: str = RL
) -> tuple[list[int], list[float]]:
    """Steps and values of one figure, by step; null is NaN.

    Of two records of one step the later counts: a resumed run may have repeated the step.
    """
    values: dict[int, float] = {}
    for record in records:
        if key not in record or phase_of(record) != phase:
            continue
        value = record[key]
        if value is None:
            values[record["step"]] = math.nan
        elif isinstance(value, (int, float)):
            values[record["step"]] = float(value)
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def _excerpt(line: bytes, length: int = 60) -> str:
    text = line[:length].decode("utf-8", errors="replace")
    return repr(text) + ("..." if len(line) > length else "")
