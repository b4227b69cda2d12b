"""Files of rows that cannot be read as a file, and rows that give no prompt."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pytest

from gspo_megatron.data.formats import FieldMap
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import refusal, write_parquet, write_rows

ROW = b'{"prompt": "a", "answer": "b"}\n'


def test_a_pipe_is_refused_because_rows_are_read_several_times(tmp_path: Path) -> None:
    """Without a writer, opening the pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: a pipe, which can be read only once; give a file"):
        load_prompts(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.jsonl", "p.parquet"])
@pytest.mark.parametrize(
    "content",
    [gzip.compress(ROW), bz2.compress(ROW), lzma.compress(ROW), b"\x28\xb5\x2f\xfd\x04\x00"],
    ids=["gzip", "bzip2", "xz", "zstd"],
)
def test_a_compressed_file_is_told_as_such(tmp_path: Path, content: bytes, name: str) -> None:
    """The first bytes tell it, whatever the file's name is."""
    path = tmp_path / name
    path.write_bytes(content)
    wrong = "a compressed file, which is not read; unpack it"
    assert refusal(load_prompts, path) == [f"{path}: {wrong}"]


@pytest.mark.parametrize("start", [b"[", b"\xef\xbb\xbf[\n  ", b"\n\n[\n"])
def test_an_array_of_rows_is_told_as_such(tmp_path: Path, start: bytes) -> None:
    """Programs that write JSON, not JSON Lines, write all rows as one array."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(start + ROW.rstrip() + b",\n" + ROW + b"]\n")
    wanted = "a JSON array; JSON Lines are wanted, one object a line. jq -c '.[]' "
    assert refusal(load_prompts, path) == [f"{path}: {wanted}{path} writes them"]


@pytest.mark.parametrize("name", ["p.csv", "p.XLSX"])
def test_a_table_of_a_spreadsheet_is_told_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"prompt,answer\n1 + 1,2\n")
    (line,) = refusal(load_prompts, tmp_path / name)
    assert line.startswith(f"{tmp_path / name}: a table; JSON Lines are wanted, ")


@pytest.mark.parametrize("others", [("a.jsonl",), ()])
@pytest.mark.parametrize("packed", ["b.jsonl.gz", "b.jsonl.zst"])
def test_a_compressed_file_in_a_folder_is_not_left_out_without_a_word(
    tmp_path: Path, packed: str, others: tuple[str, ...]
) -> None:
    for name in others:
        (tmp_path / name).write_bytes(ROW)
    (tmp_path / packed).write_bytes(gzip.compress(ROW))
    (line,) = refusal(load_prompts, tmp_path)
    assert line == f"{tmp_path / packed}: a compressed file, which is not read; unpack it"
    (tmp_path / packed).unlink()
    (tmp_path / "a.jsonl").write_bytes(ROW)
    assert [prompt.text for prompt in load_prompts(tmp_path)] == ["a"]


@pytest.mark.parametrize("chat_template", [False, True])
def test_what_a_template_cannot_take_is_named(tmp_path: Path, chat_template: bool) -> None:
    """Number columns of pandas hold NaN where a value is absent."""
    fields = FieldMap(template="{a}{b}", answer=None)
    rows = [{"a": "", "b": 3}, {"a": "x", "b": float("nan")}, {"a": " ", "b": ""}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    assert refusal(load_prompts, path, fields, chat_template) == [
        f"{path}:2: field 'b' is nan; a JSON value is wanted",
        f"{path}:3: data.template gives an empty prompt; a prompt needs some text",
    ]


def test_a_list_in_a_template_becomes_lines(tmp_path: Path) -> None:
    """MBPP names its functions only in `test_list`."""
    fields = FieldMap(template="{text}\n{test_list}", answer=None)
    rows = [{"text": "Add.", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}]
    (prompt,) = load_prompts(write_rows(tmp_path / "p.jsonl", rows), fields)
    assert prompt.text == "Add.\nassert f(1) == 2\nassert f(2) == 3"
    assert prompt.fields == rows[0]
    path = write_rows(tmp_path / "p.jsonl", [{"text": ["a", None], "test_list": {}}])
    assert refusal(load_prompts, path, fields) == [
        f"{path}:1: field 'text' holds a value that is null; a string, a number or a list of these "
        "is wanted"
    ]


def test_a_reward_sees_the_same_row_from_parquet(tmp_path: Path) -> None:
    """IFEval has the options of each instruction in `kwargs`. In Parquet all of them have all keys,
    with nulls."""
    kwargs = [[{"words": 7, "relation": "less than"}, {}], [{"language": "de"}]]
    columns = {"prompt": ["a", "b"], "kwargs": kwargs, "note": ["c", None]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    paths = write_rows(tmp_path / "p.jsonl", rows), write_parquet(tmp_path / "p.parquet", columns)
    plain, found = (load_prompts(path, FieldMap(answer=None)) for path in paths)
    assert [prompt.fields for prompt in found] == [prompt.fields for prompt in plain]
    assert found[0].fields["kwargs"] == kwargs[0]
