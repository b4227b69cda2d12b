"""Reads and writes metrics.jsonl, draws.jsonl, samples.jsonl and evaluation.jsonl of a run folder.

A metric record is a flat JSON object: `step`, an optional `phase` (default "rl"), and numbers under
nested names such as "ratio/sequence/p50". A number that was not finite is null.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError, UserError, problem
from gspo_megatron.files import make_folder, os_errors, write_durably
from gspo_megatron.types import Sample

METRICS_FILE = "metrics.jsonl"
DRAWS_FILE = "draws.jsonl"  # one record for each group: what became of a prompt of a step
SAMPLES_FILE = "samples.jsonl"
CHANGES_FILE = "changes.jsonl"  # one record for each step after which configuration values change
EVALUATION_FILE = "evaluation.jsonl"
RL = "rl"
# stages that are runs of their own
PRETRAINING, FINE_TUNING, PREFERENCES = "pretrain", "sft", "reward_model"
# In the order of training, because going back to a phase drops the records of later phases. Runs
# that earlier versions made have a warm start before RL.
STAGES = (PRETRAINING, FINE_TUNING, PREFERENCES)
_PHASES = (*STAGES, "warm_start", RL)
# Matches the seed in a run's name: "gspo_seed1", "gspo-seed=2", "seed3", "gspo_s4".
_SEED = re.compile(r"(?:^|[-_.])(?:seed[-_=]?|s)\d+(?=$|[-_.])", re.IGNORECASE)

Record = dict[str, Any]
# The values of a record of draws.jsonl that readers need, and their types.
_DRAW: dict[str, Any] = {
    **dict.fromkeys(("step", "responses", "solved"), int),
    **dict.fromkeys(("prompt", "row_id"), str),
    "reward": int | float,
    "length": int | float,
    "spread": bool,
}


# --- reading --------------------------------------------------------------------------------------


def parse_record(line: bytes) -> Record | None:
    """Return the JSON object on one line, or None if the line is damaged."""
    try:
        # Other writers may put NaN into JSON; this program always reads it as None.
        record = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> list[Record]:
    """Return all records of a file with one JSON object on each line.

    An incomplete last line is left out: it is being written, or its writer died. Raises DataError
    with file:line for any other damaged line.
    """
    with os_errors(path, "cannot be read"):
        lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif line.strip() and number < len(lines):
            excerpt = repr(line[:60].decode("utf-8", errors="replace"))
            more = "..." if len(line) > 60 else ""
            raise DataError(f"{path}:{number}: not a JSON object: {excerpt}{more}")
    return records


def read_metrics(run_dir: str | Path) -> list[Record]:
    """Return the metric records of a run in the order in which they were written.

    Raises DataError if `run_dir` holds no metrics.jsonl, if a line is damaged (file:line), or if
    the step of a record is not a whole number.
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
    """Return the sample records of a run. Returns an empty list without the file. Raises DataError
    for a damaged line, or if the reward or the turns of a record have a wrong type."""
    path = Path(run_dir) / SAMPLES_FILE
    records = read_json_lines(path) if path.is_file() else []
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("reward", 0.0), int | float | None):
            raise DataError(f"{path}: the `reward` of record {number} is not a number")
        turns = record.get("turns") or []
        if not isinstance(turns, list) or not all(map(_is_turn, turns)):
            raise DataError(f"{path}: the `turns` of record {number} are not a list of turns")
    return records


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("reward"), int | float | None):
        return False
    return all(isinstance(turn.get(key), str) for key in ("role", "text"))


def read_draws(run_dir: str | Path) -> list[Record]:
    """Return the record of each group of responses of a run. Returns an empty list without the
    file. Raises DataError for a damaged line, or if a value of a record is missing or has a wrong
    type."""
    path = Path(run_dir) / DRAWS_FILE
    records = read_json_lines(path) if path.is_file() else []
    for number, record in enumerate(records, start=1):
        for name, kind in _DRAW.items():
            has_failed = name == "reward" and not record.get("responses")  # all calls
            value = record.get(name)
            if not (isinstance(value, kind) or (has_failed and value is None)):
                raise DataError(f"{path}: the `{name}` of record {number} is missing or wrong")
    return records


def read_changes(run_dir: str | Path) -> list[Record]:
    """Return a record for each step after which values of the configuration changed. Returns an
    empty list without the file. Raises DataError."""
    path = Path(run_dir) / CHANGES_FILE
    records = read_json_lines(path) if path.is_file() else []
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("step"), int):
            raise DataError(f"{path}: the `step` of record {number} is not a number")
    return records


def changed_config(run_dir: str | Path, first: int) -> Path:
    """Return the path of the configuration that a run with changed values has from step `first`
    on."""
    return Path(run_dir) / f"config.from_step_{first:08d}.yaml"


def changed_configs(run_dir: str | Path) -> dict[int, Path]:
    """Return the files of `changed_config` that a run has, in the order of their steps."""
    numbers = (path.stem[-8:] for path in Path(run_dir).glob("config.from_step_*.yaml"))
    steps = sorted({int(number) for number in numbers if number.isdecimal()})
    paths = {step: changed_config(run_dir, step) for step in steps}
    return {step: path for step, path in paths.items() if path.is_file()}


NOTHING: Record = {"phase": _PHASES[0], "step": -1}  # its position is before all records


def phase_of(record: Mapping[str, Any]) -> str:
    """Return the phase of a record."""
    return str(record.get("phase", RL))


def position_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return a key that sorts the records of a run by the progress of training. Raises DataError
    for a phase that no run has, or without a step."""
    phase = phase_of(record)
    if phase not in _PHASES:
        wrong = f"not a phase of training; allowed: {', '.join(_PHASES)}"
        raise DataError(problem("phase", phase, wrong))
    if type(record.get("step")) is not int:
        raise DataError("a record has no whole number as its `step`")
    return (_PHASES.index(phase), record["step"])


def series(
    records: Iterable[Mapping[str, Any]], key: str, phase: str = RL
) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric, sorted by step; null becomes NaN.

    If a step has two records, the later one counts: a resumed run may have repeated the step.
    """
    values: dict[int, float] = {}
    for record in records:
        if key not in record or phase_of(record) != phase:
            continue
        value = record[key]
        if value is None or isinstance(value, (int, float)):
            values[record["step"]] = math.nan if value is None else float(value)
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def steps_done(records: Iterable[Record], phase: str = RL) -> int:
    """Return the last recorded step of a phase; 0 if there is none."""
    return max((record["step"] for record in records if phase_of(record) == phase), default=0)


# --- writing --------------------------------------------------------------------------------------


class JsonLinesWriter(AbstractContextManager):
    """Appends JSON objects to a file, one on each line, without a buffer.

    If a crash cut the last line short, opening the file removes that line and nothing else. Every
    method that writes raises UserError if the system refuses, for example on a full disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._refusals():
            make_folder(self.path.parent)
            _repair_last_line(self.path)
            self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. NaN and infinities become null, because JSON lacks them."""
        unwritten = memoryview(_encode(jsonable(record)))
        with self._refusals():
            while unwritten:  # if the disk is nearly full, write() may take only a part
                unwritten = unwritten[self._file.write(unwritten) :]

    def sync(self) -> None:
        """Wait until all written records are on the disk."""
        with self._refusals():
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int, phase: str = RL) -> list[Record]:
        """Drop all records after `step` of `phase`, so that the run can continue from there.

        Keeps earlier phases and drops later ones. Returns the records that are left. Replaces the
        file atomically: after a crash, either the old file or the new one is there. Raises
        DataError and changes nothing if the file has a damaged line (file:line), or a record of an
        unknown phase.
        """
        position = position_of({"phase": phase, "step": step})
        records = read_json_lines(self.path)
        try:
            kept = [record for record in records if position_of(record) <= position]
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error
        self._file.close()
        with self._refusals():
            if len(kept) < len(records):
                write_durably(self.path, b"".join(map(_encode, kept)))
            self._open()
        return kept

    def close(self) -> None:
        with self._refusals():
            self._file.close()

    def _open(self) -> None:
        # Unbuffered, because a buffer retries a refused write (full disk) when the file is closed.
        self._file = self.path.open("ab", buffering=0)

    @contextlib.contextmanager
    def _refusals(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror or error}; when that is solved "
                "(on a full disk: free some space), the same command continues from the newest "
                "checkpoint"
            ) from error

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsWriter(JsonLinesWriter):
    """Writer of a run's metrics.jsonl: one record for each step."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / METRICS_FILE)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics: `step`, optionally `phase`, and numbers by name.

        Numbers may be Python or numpy numbers, or tensors with one element.
        """
        assert type(metrics.get("step")) is int, "a metric record needs its step"
        assert phase_of(metrics) in _PHASES, metrics["phase"]
        self.append(metrics)


def sample_row(
    sample: Sample,
    reward: float,
    parts: Mapping[str, float] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Record:
    """Return a response as a row of samples.jsonl, without the step.

    `parts` are the reward's parts, if it has any; `record` holds further keys."""
    return {
        "split": "train",
        "row_id": sample.row_id,
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": written_answer(sample),
        **({"transcript": sample.transcript} if sample.transcript else {}),
        "reward": reward,
        **({} if parts is None else {"parts": parts}),
        "truncated": sample.truncated,
        **(record or {}),
    }


def written_answer(sample: Sample) -> Any:
    """Return a sample's answer, or None for a list or mapping.

    A list or mapping may be megabytes of program tests; `row_id` says from which row it comes."""
    return None if isinstance(sample.answer, (list, dict)) else sample.answer


def jsonable(value: Any) -> Any:
    """Convert `value` for JSON: arrays with one element become numbers, NaN becomes None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):  # numpy scalars and tensors, without an import
        return jsonable(value.item())
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def _encode(record: Mapping[str, Any]) -> bytes:
    """Return the record as one line. Lone surrogates in generated text become "?" in UTF-8."""
    line = json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
    return line.encode("utf-8", errors="replace")


def _repair_last_line(path: Path) -> None:
    """Make the file end in a line feed: complete its last line if it parses, else cut it off."""
    content = path.read_bytes() if path.exists() else b""
    last_line = content.rpartition(b"\n")[2]
    if parse_record(last_line) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    elif last_line:
        os.truncate(path, len(content) - len(last_line))


# --- several runs together ------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder with its metrics."""

    path: Path
    name: str  # unique among the runs that are loaded together
    group: str  # the name without the seed; runs of one group differ only by their seed
    records: tuple[Record, ...]

    def series(self, key: str, phase: str = RL) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric."""
        return series(self.records, key, phase)


def load_runs(run_dirs: Sequence[str | Path]) -> list[Run]:
    """Read several runs. Their names come from the parts in which their paths differ.

    Raises DataError if a folder holds no run, if a file is damaged, or if a folder appears twice.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise DataError(f"given twice: {', '.join(twice)}")
    return [
        Run(path, name, group_name(name) or path.parent.name, tuple(read_metrics(path)))
        for path, name in zip(paths, run_names(paths))
    ]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a unique name for each run folder.

    The name of a run is the name of its folder. If this name is only a seed, the parent's name
    comes before it ("gspo/seed1"). If these names are not unique, the result has the paths below
    the common parent instead."""
    names = [p.name if group_name(p.name) else f"{p.parent.name}/{p.name}" for p in paths]
    if len(set(names)) < len(names):
        common = Path(os.path.commonpath([str(path) for path in paths]))
        names = [path.relative_to(common).as_posix() for path in paths]
    return names


def group_name(name: str) -> str:
    """Return a run's name without its seed. If the name is a path, parts that are only a seed are
    dropped."""
    parts = (_SEED.sub("", part).lstrip("-_.") for part in name.split("/"))
    return "/".join(part for part in parts if part)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs by group, in the order in which the groups first appear."""
    by_group: dict[str, list[Run]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return by_group
