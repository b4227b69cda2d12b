from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow
import pytest

from gspo_megatron.data.documents import plan_chunks, read_chunk, read_documents, sentences
from gspo_megatron.data.rows import Problems
from tests.unit.data.corpora import make_texts, refusal, write_jsonl, write_parquet


def read_all(path: Path, chunk_bytes: int, text_documents: str = "line") -> list[tuple[str, str]]:
    problems = Problems()
    documents = [
        document
        for chunk in plan_chunks([path], chunk_bytes, text_documents)
        for document in read_chunk(chunk, "text", problems, text_documents)
    ]
    problems.raise_if_any()
    return documents


def problems_of(path: Path, chunk_bytes: int) -> list[str]:
    lines = []
    for chunk in plan_chunks([path], chunk_bytes):
        problems = Problems()
        list(read_chunk(chunk, "text", problems))
        lines += refusal(problems.raise_if_any) if problems else []
    return lines


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_reads_each_line_once_and_in_order(tmp_path: Path, seed: int) -> None:
    texts = make_texts(60, seed)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    source = random.Random(seed)
    ends = [source.choice(("\n", "\r\n", "\n\n")) for _ in lines]
    ends[-1] = source.choice(("", "\n"))  # the last line may have no end
    mark = source.choice(("", "\ufeff"))
    path.write_bytes((mark + "".join(map("".join, zip(lines, ends)))).encode())
    for chunk_bytes in (1, 7, 100, 1000, source.randint(2, 500), 10**6):
        assert [text for _, text in read_all(path, chunk_bytes)] == texts


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\ndef\nghi\n")
    for chunk_bytes in range(1, 14):
        assert [text for _, text in read_all(path, chunk_bytes)] == ["abc", "def", "ghi"]
    path.write_bytes("\ufeffone\r\n\ntwo é".encode())
    assert read_all(path, 3, "file") == [(str(path), "one\r\n\ntwo é")]


def test_parquet_chunks_are_row_groups(tmp_path: Path) -> None:
    texts = make_texts(23, seed=2)
    columns = {"n": range(23), "text": texts}
    path = write_parquet(tmp_path / "a.parquet", columns, row_group_size=5)
    assert len(plan_chunks([path])) == 5
    assert read_all(path, 1) == [(f"{path}:{n}", text) for n, text in enumerate(texts, start=1)]


def test_faults_are_named_by_the_line_of_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(40, seed=1))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[12], lines[20] = b'{"text": "a" "n": 1}\n', b'{"txt": "a"}\n'
    lines[30], lines[33] = b'{"text": "\xff"}\n', b'{"text": 7}\n'
    path.write_bytes(b"".join(lines))
    expected = [
        f"{path}:13: not JSON: Expecting ',' delimiter at column 14",
        f"{path}:21: no field 'text'; the fields are: 'txt' (--text-field chooses one)",
        f"{path}:31: not valid UTF-8 at byte 11 of the line",
        f"{path}:34: field 'text' is a number; a string is wanted",
    ]
    for chunk_bytes in (50, 777, 10**6):
        assert problems_of(path, chunk_bytes) == expected


def test_unusable_files_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    write_parquet(tmp_path / "no.parquet", {"text": pyarrow.array([], "string")})
    names = ("none.jsonl", "empty.jsonl", "bad.parquet", "no.parquet")
    faults = ("no such file", "an empty file", "not a readable Parquet file: ", "has no rows")
    lines = refusal(plan_chunks, [tmp_path / name for name in names])
    for line, name, fault in zip(lines, names, faults, strict=True):
        assert line.startswith(f"{tmp_path}/{name}: {fault}")


def test_documents_of_several_files_stop_at_a_fault(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "three"}\n[]\n')
    documents = read_documents([good, bad], "text")
    assert [next(documents)[1] for _ in range(3)] == ["one", "two", "three"]
    assert refusal(next, documents) == [f"{bad}:2: an array; a JSON object is wanted"]


def test_sentences_are_short_and_lose_nothing_but_line_ends() -> None:
    texts = [*make_texts(20, seed=4), "x" * 2500, " ".join(["word"] * 3000), "", "\n\n"]
    lines = list(sentences([("", text) for text in texts], longest=100))
    assert all(0 < len(line) <= 100 and "\n" not in line for line in lines)
    assert "".join(lines) == "".join(texts).replace("\n", "")
