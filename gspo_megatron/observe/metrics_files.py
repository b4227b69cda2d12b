"""metrics.jsonl, samples.jsonl and evaluation.jsonl of a run folder: written while the run goes on,
read by reports.

A metric record is a flat JSON object: `step`, an optional `phase` ("rl" when absent), and numbers
under nested names such as "ratio/sequence/p50". A number that was not finite is null.
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

from gspo_megatron.errors import DataError, UserError
from gspo_megatron.files import make_folder
from gspo_megatron.types import Sample

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CHANGES_FILE = "changes.jsonl"  # a record where a run goes on with other values of its keys
PHASE_CONFIG = "config.from_step_"  # and the step: all values of a phase
EVALUATION_FILE = "evaluation.jsonl"
RL = "rl"
PRETRAINING, FINE_TUNING = "pretrain", "sft"  # runs of their own
# In the order of training: going back to a phase drops those after it. Runs of earlier versions
# have a warm start before RL.
_PHASES = (PRETRAINING, FINE_TUNING, "warm_start", RL)
# "gspo_seed1", "gspo-seed=2", "seed3", "gspo_s4": the part of a run's name that is its seed.
_SEED = re.compile(r"(?:^|[-_.])(?:seed[-_=]?|s)\d+(?=$|[-_.])", re.IGNORECASE)

Record = dict[str, Any]


# --- reading --------------------------------------------------------------------------------------


def parse_record(line: bytes) -> Record | None:
    """The JSON object on one line, or None when the line is damaged."""
    try:
        # Other writers may put NaN into JSON; here a number that is not finite is always None.
        record = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):  # also invalid UTF-8
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> list[Record]:
    """All records of a file with one JSON object a line.

    A last line without its line feed that does not parse is left out: it is being written, or its
    writer died. Raises DataError naming file:line for any other damaged line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
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


NOTHING: Record = {"phase": _PHASES[0], "step": -1}  # a position before all records


def phase_of(record: Mapping[str, Any]) -> str:
    """The phase a record belongs to."""
    return str(record.get("phase", RL))


def position_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """A key that sorts the records of a run by the progress of training."""
    return (_PHASES.index(phase_of(record)), record["step"])


def series(
    records: Iterable[Mapping[str, Any]], key: str, phase: str = RL
) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, by step; null is NaN.

    Of two records of one step the later counts: a resumed run may have repeated the step.
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
    """The last step of a phase that was written; 0 when there is none."""
    return max((record["step"] for record in records if phase_of(record) == phase), default=0)


# --- writing --------------------------------------------------------------------------------------


class JsonLinesWriter(AbstractContextManager):
    """Appends JSON objects to a file, each on its own line and given to the system at once.

    Opening a file whose last line was cut short by a crash removes that line and nothing else.
    Every method that writes raises UserError where the system refuses, as on a full disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._refusals():
            make_folder(self.path.parent)
            _repair_last_line(self.path)
            self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. NaN and infinities, which JSON does not have, are written as null."""
        left = memoryview(_encode(jsonable(record)))
        with self._refusals():
            while left:  # a nearly full disk may take only a part of it
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with self._refusals():
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int, phase: str = RL) -> None:
        """Drop everything written after `step` of `phase`, in order to continue from there.

        Records of earlier phases stay, those of later phases go. The file is replaced atomically: a
        crash leaves either the old file or the new one. Raises DataError (file:line) when the file
        has a damaged line, and leaves it as it is then.
        """
        position = position_of({"phase": phase, "step": step})
        records = read_json_lines(self.path)
        self._file.close()
        kept = [record for record in records if position_of(record) <= position]
        with self._refusals():
            if len(kept) < len(records):
                partial = self.path.with_name(self.path.name + ".partial")
                with partial.open("wb") as file:
                    file.writelines(map(_encode, kept))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.path)
            self._open()

    def close(self) -> None:
        with self._refusals():
            self._file.close()

    def _open(self) -> None:
        # Unbuffered: a buffer would try again, when the file is closed, to write what a full disk
        # has refused.
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
    """metrics.jsonl of a run folder: one record a step."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / METRICS_FILE)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics: `step`, optionally `phase`, and numbers by name.

        Numbers may be Python's, numpy's or tensors of one element.
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
    """A response as samples.jsonl has it, but for the step. parts: of the reward, if it has any;
    record: further keys."""
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
    """A sample's answer, or None for a list or mapping: that may be the tests of a program,
    megabytes of them, and `row_id` tells where it is."""
    return None if isinstance(sample.answer, (list, dict)) else sample.answer


def jsonable(value: Any) -> Any:
    """`value` with what JSON lacks replaced: arrays of one element by numbers, NaN by None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):  # numpy scalars and tensors, without importing either library
        return jsonable(value.item())
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def _encode(record: Mapping[str, Any]) -> bytes:
    """One line. Sampled text may hold lone surrogates, which UTF-8 lacks: they become "?"."""
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
    name: str  # distinct among the runs loaded together
    group: str  # the name without its seed: the runs of one group differ by their seed only
    records: tuple[Record, ...]

    def series(self, key: str, phase: str = RL) -> tuple[list[int], list[float]]:
        """Steps and values of one metric."""
        return series(self.records, key, phase)


def load_runs(run_dirs: Sequence[str | Path]) -> list[Run]:
    """Read several runs and name them by the parts in which their paths differ.

    Raises DataError when a folder holds no run, when a file is damaged, or when one is given twice.
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
    """Names for runs: the name of the folder, with its parent's before a bare seed ("gspo/seed1");
    where these are not distinct, the parts of the paths that the runs do not share."""
    names = [p.name if group_name(p.name) else f"{p.parent.name}/{p.name}" for p in paths]
    if len(set(names)) < len(names):
        common = Path(os.path.commonpath([str(path) for path in paths]))
        names = [path.relative_to(common).as_posix() for path in paths]
    return names


def group_name(name: str) -> str:
    """A run's name without its seed; parts of a path that were nothing but a seed are dropped."""
    parts = (_SEED.sub("", part) for part in name.split("/"))
    return "/".join(part for part in parts if part)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by group, in the order in which the groups first appear."""
    by_group: dict[str, list[Run]] = {}
    for run in runs:
        by_group.setdefault(run.group, []).append(run)
    return by_group
