"""The files a run writes while it goes: metrics.jsonl and samples.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from gspo_megatron.errors import UserError
from gspo_megatron.observe.records import (
    FINE_TUNING,
    METRICS_FILE,
    PRETRAINING,
    RL,
    SAMPLES_FILE,
    WARM_START,
    parse_record,
    phase_of,
    read_json_lines,
)
from gspo_megatron.types import Sample

# The order in which a run goes through its phases: a later one is undone with an earlier step.
_PHASES = (PRETRAINING, FINE_TUNING, WARM_START, RL)
_TAIL_BLOCK = 65536  # bytes read at a time when looking for the start of the last line


class JsonLinesWriter(AbstractContextManager):  # type: ignore[type-arg]
    """Appends JSON objects to a file, each on a line of its own and handed to the system at once.

    Opening a file whose last line was cut short by a crash removes that line and nothing else.
    Whatever writes raises UserError where the system refuses, as on a full disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._refusals():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend_last_line(self.path)
            self._file = self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. NaN and infinities, which JSON does not have, are written as null."""
        line = json.dumps(jsonable(record), allow_nan=False, ensure_ascii=False)
        # Sampled text may hold lone surrogates, which are not UTF-8; losing them loses no figure.
        left = memoryview(line.encode("utf-8", errors="replace") + b"\n")
        with self._refusals():
            while left:  # a disk may take the half of it before it is full
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with self._refusals():
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int, phase: str = RL) -> None:
        """Drop everything written after `step` of `phase`, in order to go on from there.

        Records of earlier phases stay, those of later phases go. The file is replaced in one
        piece: a crash leaves either the old file or the new one.

        Raises DataError (file:line) when the file has a damaged line, and leaves it as it is then.
        """
        assert phase in _PHASES, phase
        position = (_PHASES.index(phase), step)
        records = read_json_lines(self.path)
        self._file.close()
        kept = [record for record in records if position_of(record) <= position]
        with self._refusals():
            if len(kept) < len(records):
                scratch = self.path.with_name(self.path.name + ".partial")
                with scratch.open("wb") as file:
                    for record in kept:
                        line = json.dumps(record, allow_nan=False, ensure_ascii=False)
                        file.write(line.encode("utf-8", errors="replace") + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(scratch, self.path)
            self._file = self._open()

    def close(self) -> None:
        with self._refusals():
            self._file.close()

    def _open(self) -> FileIO:
        # Without a buffer: what a full disk has not taken would be tried again, and fail again, at
        # the closing of the file.
        return self.path.open("ab", buffering=0)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror or error}; once that is mended "
                "(a full disk: free some of it), the same command goes on from the newest "
                "checkpoint there is"
            ) from error

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


def position_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """What sorts a run's records as it comes past them."""
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
