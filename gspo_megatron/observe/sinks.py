"""The files a run writes while it goes: metrics.jsonl and samples.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gspo_megatron.observe.records import (
    FINE_TUNING,
    METRICS_FILE,
    PRETRAINING,
    RL,
    SAMPLES_FILE,
    WARM_START,
    Record,
    parse_record,
    phase_of,
    read_json_lines,
)
from gspo_megatron.types import Sample

# The order in which a run goes through its phases: a later one is undone with an earlier step.
_PHASES = (PRETRAINING, FINE_TUNING, WARM_START, RL)
_TAIL_BLOCK = 65536  # bytes read at a time when looking for the start of the last line


class JsonLinesWriter(AbstractContextManager):  # type: ignore[type-arg]
    """Appends JSON objects to a file, each on a line of its own and flushed at once.

    Opening a file whose last line was cut short by a crash removes that line and nothing else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(self.path)
        self._file: BinaryIO = self.path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. NaN and infinities, which JSON does not have, are written as null."""
        line = json.dumps(jsonable(record), allow_nan=False, ensure_ascii=False)
        # Sampled text may hold lone surrogates, which are not UTF-8; losing them loses no figure.
        self._file.write(line.encode("utf-8", errors="replace") + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises OSError."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int, phase: str = RL) -> None:
        """Drop everything written after `step` of `phase`, in order to go on from there.

        Records of earlier phases stay, those of later phases go. The file is replaced in one
        piece: a crash leaves either the old file or the new one.

        Raises DataError (file:line) when the file has a damaged line.
        """
        assert phase in _PHASES, phase
        position = (_PHASES.index(phase), step)
        records = read_json_lines(self.path)
        self._file.close()
        kept = [record for record in records if _position(record) <= position]
        if len(kept) < len(records):
            scratch = self.path.with_name(self.path.name + ".partial")
            with scratch.open("wb") as file:
                for record in kept:
                    line = json.dumps(record, allow_nan=False, ensure_ascii=False)
                    file.write(line.encode("utf-8", errors="replace") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self.path)
        self._file = self.path.open("ab")

    def close(self) -> None:
        self._file.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class MetricsWriter(JsonLinesWriter):
    """metrics.jsonl of a run folder: one record a step."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / METRICS_FILE)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step's figures: `step`, optionally `phase`, and numbers by name.

        Numbers may be Python's, numpy's or tensors of one element.
        """
        assert type(metrics.get("step")) is int, "a metric record needs its step"
        assert phase_of(metrics) in _PHASES, metrics["phase"]
        self.append(metrics)


class SampleWriter(JsonLinesWriter):
    """samples.jsonl of a run folder: some responses with what they were asked and their rewards."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / SAMPLES_FILE)

    def write(
        self,
        step: int,
        samples: Sequence[Sample],
        rewards: Sequence[float],
        *,
        split: str = "train",
    ) -> None:
        """Write `samples` of a step with their rewards; `split` is "train" or "evaluation"."""
        assert len(samples) == len(rewards), (len(samples), len(rewards))
        for sample, reward in zip(samples, rewards):
            self.append(
                {
                    "step": step,
                    "split": split,
                    "prompt": sample.prompt,
                    "response": sample.response,
                    "answer": sample.answer,
                    "reward": reward,
                    "truncated": sample.truncated,
                }
            )


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


def _position(record: Record) -> tuple[int, int]:
    return (_PHASES.index(phase_of(record)), record["step"])


def _mend_last_line(path: Path) -> None:
    """Make the file end in a line feed: complete its last line if it parses, else cut it off."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - _TAIL_BLOCK)
            file.seek(start)
            tail = file.read(size - start)
        last_line = tail[tail.rfind(b"\n") + 1 :]
        if not last_line:
            return
        if parse_record(last_line) is not None:
            file.seek(size)
            file.write(b"\n")
        else:
            file.truncate(size - len(last_line))
