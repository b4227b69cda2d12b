"""The documents of large files, cut into chunks that are read independently of each other.

A chunk is a range of bytes of a JSON Lines or text file, with the lines that begin in it, or a row
group of a Parquet file. The chunks depend only on the files and the chunk size: the result is the
same for any number of processes that read them in any order.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_megatron.data.rows import (
    Problems,
    decode_line,
    file_kind,
    find_text,
    open_parquet,
    parse_json_lines,
    read_parquet,
)
from gspo_megatron.errors import DataError

CHUNK_BYTES = 4 << 20
TEXT_DOCUMENTS = ("line", "file")  # a text file is a document a line, or one document
FIELD_SETTING = "--text-field"

Document = tuple[str, str]  # "path:line" or "path:row", and its text


@dataclass(frozen=True)
class Chunk:
    """A part of an input file."""

    path: str
    kind: str  # jsonl, text or parquet
    start: int  # in bytes; for Parquet, the row group
    end: int
    rows_before: int = 0  # for Parquet


def plan_chunks(
    paths: Sequence[str | Path], chunk_bytes: int = CHUNK_BYTES, text_documents: str = "line"
) -> list[Chunk]:
    """All chunks of the files, in order.

    Raises DataError that names the files that are missing, unreadable or empty.
    """
    problems = Problems(shown=20)
    chunks: list[Chunk] = []
    for path in map(Path, paths):
        try:
            kind = file_kind(path)
            size = path.stat().st_size
            if not size:
                problems.add(f"{path}", "an empty file")
            elif kind == "parquet":
                with open_parquet(path) as file:
                    groups = range(file.metadata.num_row_groups)
                    sizes = [file.metadata.row_group(n).num_rows for n in groups]
                if not sum(sizes):
                    problems.add(f"{path}", "has no rows")
                for n in groups:
                    before = sum(sizes[:n])
                    chunks.append(Chunk(str(path), kind, n, n + 1, rows_before=before))
            else:
                whole = kind == "text" and text_documents == "file"
                step = size if whole else chunk_bytes
                for start in range(0, size, step):
                    chunks.append(Chunk(str(path), kind, start, min(start + step, size)))
        except DataError as error:
            where, _, what = str(error).partition(": ")
            problems.add(where, what)
    problems.raise_if_any()
    return chunks


def read_chunk(
    chunk: Chunk, text_field: str, problems: Problems, text_documents: str = "line"
) -> Iterator[Document]:
    """The documents of a chunk in order, also those without any text.

    Faults go to `problems`, with the line numbers of the file.
    """
    attempt = Problems()
    yield from _read_chunk(chunk, text_field, attempt, text_documents, 0)
    if attempt:
        # Lines before the chunk are counted only if there is a fault to name.
        before = 0
        if chunk.kind != "parquet":
            before = sum(1 for _ in _numbered_lines(replace(chunk, start=0, end=chunk.start), 0))
        for _ in _read_chunk(chunk, text_field, problems, text_documents, before):
            pass


def read_documents(paths: Sequence[str | Path], text_field: str) -> Iterator[Document]:
    """The documents of all files one by one; each line of a text file is one.

    Raises DataError at the first chunk with faults, which names them by file and line.
    """
    for chunk in plan_chunks(paths):
        problems = Problems()
        yield from read_chunk(chunk, text_field, problems)
        problems.raise_if_any()


def sentences(documents: Iterable[Document], longest: int = 1000) -> Iterator[str]:
    """Documents as lines for a tokenizer's trainer, without line ends and not too long.

    A line of more than `longest` characters is cut before a space if it has one: no piece of the
    vocabulary reaches over that place.
    """
    for _, text in documents:
        for line in text.split("\n"):
            start = 0
            while len(line) - start > longest:
                space = line.rfind(" ", start + 1, start + longest)
                end = space if space > 0 else start + longest
                yield line[start:end]
                start = end
            if start < len(line):
                yield line[start:]


def _read_chunk(
    chunk: Chunk, text_field: str, problems: Problems, text_documents: str, lines_before: int
) -> Iterator[Document]:
    path = Path(chunk.path)
    if chunk.kind == "text" and text_documents == "file":
        text = decode_line(f"{path}", path.read_bytes(), problems)
        if text is not None:
            yield f"{path}", text.removeprefix("\ufeff")
        return
    lines = _numbered_lines(chunk, lines_before)
    if chunk.kind == "text":
        for where, line in lines:
            text = decode_line(where, line.rstrip(b"\r\n"), problems)
            if text is not None:
                yield where, text
        return
    if chunk.kind == "parquet":
        rows = read_parquet(
            path,
            [(FIELD_SETTING, text_field)],
            problems,
            row_groups=range(chunk.start, chunk.end),
            first_row=chunk.rows_before + 1,
            only_columns=True,
        )
    else:
        rows = parse_json_lines(lines, problems)
    for where, row in rows:
        text, fault = find_text(row, text_field, FIELD_SETTING)
        if fault is None:
            yield where, text
        else:
            problems.add(where, fault)


def _numbered_lines(chunk: Chunk, lines_before: int) -> Iterator[tuple[str, bytes]]:
    """The lines that begin in the chunk."""
    with Path(chunk.path).open("rb") as file:
        if chunk.start:
            file.seek(chunk.start - 1)  # the line before the chunk may end with its last byte
            file.readline()
        position, number = file.tell(), lines_before
        while position < chunk.end and (line := file.readline()):
            number += 1
            text = line if position else line.removeprefix(codecs.BOM_UTF8)
            yield f"{chunk.path}:{number}", text
            position += len(line)
