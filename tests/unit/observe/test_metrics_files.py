from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.errors import DataError, UserError
from gspo_megatron.observe.metrics_files import (
    SAMPLES_FILE,
    JsonLinesWriter,
    MetricsWriter,
    read_metrics,
    read_samples,
    sample_row,
    series,
)
from gspo_megatron.types import Sample


def test_a_record_is_on_disk_at_once_with_numbers_as_json_has_them(tmp_path: Path) -> None:
    arrays = {"b": np.float32("inf"), "c": np.int64(3), "d": np.array([2.0])}
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 1, "a": math.nan, **arrays, "phase": "rl"})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "a": None, "b": None, "c": 3, "d": 2.0, "phase": "rl"}
    with pytest.raises(TypeError, match="object"):
        writer.write({"step": 2, "a": object()})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_opening_cuts_in_every_place_leave_whole_records(tmp_path: Path) -> None:
    content = b'{"step": 1, "a": 0.5}\n{"step": 2, "a": "\xc3\xa9"}\n'
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        with MetricsWriter(tmp_path) as writer:
            writer.write({"step": 9})
        steps = [record["step"] for record in read_metrics(tmp_path)]
        # If the file is cut behind the closing brace of a line, this line counts, even without its
        # line feed.
        expected = [step for step, end in ((1, 21), (2, len(content) - 1)) if cut >= end]
        assert steps == [*expected, 9], cut


@pytest.mark.parametrize("damage", [b'{"step": 2,', b"\xff\xfe", b"[1, 2]", b"\x00\x00"])
def test_a_damaged_middle_line_is_named_with_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(DataError) as caught:
        read_metrics(tmp_path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_folder_without_metrics_and_a_record_without_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 1}\n{"step": 2, "lo')
    with pytest.raises(DataError, match="record 2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("phase", "step", "kept"),
    [("rl", 1, [("sft", 1), ("sft", 2), ("rl", 0), ("rl", 1)]), ("sft", 1, [("sft", 1)])],
)
def test_truncating_keeps_earlier_phases_and_drops_later_ones(
    tmp_path: Path, phase: str, step: int, kept: list[tuple[str, int]]
) -> None:
    with MetricsWriter(tmp_path) as writer:
        for record in (("sft", 1), ("sft", 2), ("rl", 0), ("rl", 1), ("rl", 2)):
            writer.write({"phase": record[0], "step": record[1]})
        writer.truncate_after(step, phase)
        writer.write({"phase": phase, "step": step + 1, "again": True})
    records = read_metrics(tmp_path)
    assert [(r["phase"], r["step"]) for r in records] == [*kept, (phase, step + 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_with_nothing_to_drop_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,   "x": 1e-3}\n')
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_after(1)
    assert path.read_bytes() == b'{"step":1,   "x": 1e-3}\n'


@pytest.mark.parametrize(
    ("field", "value"),
    [("reward", "high"), ("reward", []), ("turns", "one"), ("turns", [3])]
    + [("turns", [{"role": "user"}]), ("turns", [{"role": "user", "text": "", "reward": "x"}])],
)
def test_a_response_with_a_field_of_a_wrong_type_is_named(
    tmp_path: Path, field: str, value: object
) -> None:
    good = {"step": 1, "reward": None, "turns": [{"role": "user", "text": "a", "reward": 1}]}
    lines = [json.dumps(row) for row in (good, {"step": 1}, good | {field: value})]
    path = tmp_path / SAMPLES_FILE
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        read_samples(tmp_path)
    assert str(caught.value).startswith(f"{path}: the `{field}` of record 3 ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"st\n{"step": 2}\n', ":1: not a JSON object: '{\"st'"),
        (
            '{"step": 1}\n{"step": 2, "phase": "rlhf"}\n',
            ": phase = 'rlhf': not a phase of training; allowed: pretrain, sft, reward_model, "
            "warm_start, rl",
        ),
        ('{"prompt": "a"}\n', ": a record has no whole number as its `step`"),
    ],
)
def test_a_damaged_file_is_not_truncated_and_can_still_be_written(
    tmp_path: Path, text: str, told: str
) -> None:
    """A file with a record of an unknown phase is not cut, because the phase's order is unknown.
    The same holds for a record without a step."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with JsonLinesWriter(path) as writer:
        with pytest.raises(DataError) as caught:
            writer.truncate_after(1)
        assert str(caught.value) == f"{path}{told}"
        writer.append({"step": 3})
    assert path.read_text() == text + '{"step": 3}\n'


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let no file grow beyond 100 bytes, as if the disk were full. (A fixture would also hold while
    pytest writes its progress, perhaps to a file.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    told = r"metrics\.jsonl: cannot be written: File too large; .*the same command continues"
    with small_files(), MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1})
        with pytest.raises(UserError, match=told):
            writer.write({"step": 2, "loss": [0.5] * 40})
    # Closing the file writes no more bytes. The next opening removes the incomplete line.
    assert (tmp_path / "metrics.jsonl").stat().st_size == 100
    MetricsWriter(tmp_path).close()
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_a_full_disk_when_going_on_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b"".join(b'{"step": %d, "loss": 0.5}\n' % step for step in range(1, 10))
    path.write_bytes(content)
    refused = pytest.raises(UserError, match="cannot be written")
    with small_files(), MetricsWriter(tmp_path) as writer, refused:
        writer.truncate_after(8)
    assert path.read_bytes() == content


def test_what_the_disk_has_not_taken_is_told_when_it_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/null")  # /dev/null accepts every byte, but cannot be synchronised
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1})
        with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written: Invalid"):
            writer.sync()


def test_samples_keep_their_text_as_it_was_generated(tmp_path: Path) -> None:
    """The only exception is a lone surrogate, which UTF-8 cannot represent."""
    assert read_samples(tmp_path) == []
    response = 'two\nlines "quoted" \u2028 é \x00'
    with JsonLinesWriter(tmp_path / SAMPLES_FILE) as writer:
        sample = Sample("p", "a\ud800b", response, True, row_id="p.jsonl:7")
        writer.append({"step": 3, **sample_row(sample, math.nan)})
    assert read_samples(tmp_path) == [
        {
            "step": 3,
            "split": "train",
            "row_id": "p.jsonl:7",
            "prompt": "p",
            "response": response,
            "answer": "a?b",
            "reward": None,
            "truncated": True,
        }
    ]


def test_a_sample_keeps_an_answer_that_is_one_value() -> None:
    answers = ["a", 82, None, {"inputs": ["1"] * 9}]
    rows = [sample_row(Sample("p", answer, "r", False), 0.0) for answer in answers]
    assert [row["answer"] for row in rows] == ["a", 82, None, None]


def test_a_series_is_by_step_of_one_phase_and_the_later_record_counts() -> None:
    records = [
        {"phase": "sft", "step": 1, "loss": 9.0},
        {"step": 2, "loss": 1.0},
        {"step": 1, "loss": 2.0, "name": "text"},
        {"step": 2, "loss": 3.0},
        {"step": 3, "loss": None},
        {"step": 4},
    ]
    assert series(records, "loss") == ([1, 2, 3], pytest.approx([2.0, 3.0, math.nan], nan_ok=True))
    assert series(records, "loss", "sft") == ([1], [9.0])
    assert series(records, "name") == ([], [])
