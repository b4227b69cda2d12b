from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.errors import DataError


def write_lines(path: Path, *lines: str | bytes | dict) -> Path:
    encoded = []
    for line in lines:
        if isinstance(line, dict):
            line = json.dumps(line)
        encoded.append(line if isinstance(line, bytes) else line.encode("utf-8"))
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def problems_of(path: Path, **fields: str) -> list[str]:
    with pytest.raises(DataError) as caught:
        load_prompts(path, **fields)
    return str(caught.value).splitlines()


GOOD = {"prompt": "37+45=", "answer": "82"}


def test_json_lines_keep_order_source_and_other_fields(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": " a ", "answer": "", "task": "x", "level": 3},
        "",
        {"prompt": "größer?", "answer": "ja"},
    )
    first, second = load_prompts(path)
    assert (first.text, first.answer, first.source) == (" a ", "", f"{path}:1")
    assert first.fields == {"task": "x", "level": 3}
    assert first.token_ids == ()
    # The blank line is skipped but counted.
    assert (second.text, second.answer, second.source) == ("größer?", "ja", f"{path}:3")


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"question": "q", "solution": "s", "prompt": 1})
    (prompt,) = load_prompts(path, prompt_field="question", answer_field="solution")
    assert (prompt.text, prompt.answer, prompt.fields) == ("q", "s", {"prompt": 1})


def test_byte_order_mark_and_carriage_returns_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n")
    assert load_prompts(path)[0].text == "37+45="


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a" "answer": "b"}', "not JSON: Expecting ',' delimiter at column 16"),
        ("[1, 2]", "an array; a JSON object is wanted"),
        ('"text"', "a string; a JSON object is wanted"),
        ("null", "null; a JSON object is wanted"),
        (
            '{"prompt": "a", "answer": "b", "prompt": "c"}',
            "key 'prompt' is there twice; leave one of them",
        ),
        (
            '{"prompt": "a", "answer": "b", "more": [{"x": 1, "y": 1, "x": 1}]}',
            "key 'x' is there twice; leave one of them",
        ),
        (
            {"prompt": "a", "reply": "b"},
            "no field 'answer'; the fields are: 'prompt', 'reply' (data.answer_field chooses one)",
        ),
        ({"prompt": "a", "answer": 82}, "field 'answer' is a number; a string is wanted"),
        ({"prompt": "a", "answer": True}, "field 'answer' is a boolean; a string is wanted"),
        ({"prompt": None, "answer": "b"}, "field 'prompt' is null; a string is wanted"),
        ({"prompt": [{}], "answer": "b"}, "field 'prompt' is an array; a string is wanted"),
        ({"prompt": "", "answer": "b"}, "field 'prompt' is empty; a prompt needs some text"),
        ({"prompt": " \t", "answer": "b"}, "field 'prompt' is empty; a prompt needs some text"),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 13 of the line"),
        (
            {"prompt": "ab\ud800", "answer": "b"},
            "field 'prompt' holds half a surrogate pair at character 3",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(
    tmp_path: Path, line: str | bytes | dict, expected: str
) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", GOOD, line)
    assert problems_of(path) == [f"{path}:2: {expected}"]


@pytest.mark.parametrize("line", ["[" * 200_000, '{"prompt": ' + "9" * 5000 + "}"])
def test_json_beyond_the_parser_is_a_problem_of_its_line(tmp_path: Path, line: str) -> None:
    (problem,) = problems_of(write_lines(tmp_path / "p.jsonl", line))
    assert problem.startswith(f"{tmp_path}/p.jsonl:1: JSON that cannot be read: ")


def test_both_fields_of_a_line_are_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": 1, "answer": 2})
    assert len(problems_of(path)) == 2


def test_twenty_problems_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    lines = problems_of(write_lines(tmp_path / "p.jsonl", *["[]"] * 23))
    assert len(lines) == 21
    assert lines[19].startswith(f"{tmp_path}/p.jsonl:20:")
    assert lines[20] == "… and 3 more"


def test_exactly_twenty_problems_have_no_count(tmp_path: Path) -> None:
    assert len(problems_of(write_lines(tmp_path / "p.jsonl", *["[]"] * 20))) == 20


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    assert problems_of(path) == [f"{path}: holds no prompts; one JSON object a line is wanted"]


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert problems_of(path) == [f"{path}: no such prompt file"]
    assert problems_of(tmp_path)[0].startswith(f"{tmp_path}: cannot be read: ")


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["p.parquet", "no_suffix"])
def test_parquet_reads_like_json_lines(tmp_path: Path, name: str) -> None:
    path = write_parquet(
        tmp_path / name, {"prompt": ["a", "b"], "answer": ["1", "2"], "level": [7, 8]}
    )
    prompts = load_prompts(path)
    assert [(p.text, p.answer, p.source, p.fields) for p in prompts] == [
        ("a", "1", f"{path}:1", {"level": 7}),
        ("b", "2", f"{path}:2", {"level": 8}),
    ]


def test_parquet_without_the_columns_is_one_problem_each(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", {"q": ["a"] * 3, "r": ["1"] * 3})
    assert problems_of(path) == [
        f"{path}: no column 'prompt'; the columns are: 'q', 'r' (data.prompt_field chooses one)",
        f"{path}: no column 'answer'; the columns are: 'q', 'r' (data.answer_field chooses one)",
    ]


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", {"prompt": ["a", None, " "], "answer": ["1"] * 3})
    assert problems_of(path) == [
        f"{path}:2: field 'prompt' is null; a string is wanted",
        f"{path}:3: field 'prompt' is empty; a prompt needs some text",
    ]


def test_parquet_with_invalid_utf8_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"ok", b"\xff"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    path = write_parquet(tmp_path / "p.parquet", {"prompt": text, "answer": ["1", "2"]})
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:1: not valid UTF-8")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 and then something else PAR1"])
def test_damaged_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "p.parquet"
    path.write_bytes(content)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: not a readable Parquet file: ")
