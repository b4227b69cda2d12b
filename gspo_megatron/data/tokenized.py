"""Chunks of documents to files of tokens: the work of one worker process."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import signal
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gspo_megatron.data.documents import Chunk, Document, read_chunk
from gspo_megatron.data.problems import Problems
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically

DIGEST_BYTES = 16
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Settings:
    """How text becomes tokens."""

    tokenizer: str
    text_field: str
    text_documents: str  # documents.TEXT_DOCUMENTS
    eod_id: int | None  # put after each document
    digests: bool  # of the documents' texts, for finding copies


@dataclass(frozen=True)
class Tokens:
    """The documents of a chunk, flat."""

    tokens: np.ndarray  # [sum(lengths)] int32
    lengths: np.ndarray  # [documents] int64, EOD included
    digests: np.ndarray  # [documents, DIGEST_BYTES] uint8; [0, DIGEST_BYTES] where not wanted
    empty: int  # documents left out because they have no text

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document."""
        ends = np.cumsum(self.lengths)
        for start, end in zip(ends - self.lengths, ends):
            yield self.tokens[start:end]


class ChunkWorker:
    """Does chunks one after the other with a tokenizer of its own; in a process pool or alone."""

    _current: ChunkWorker | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer)

    @classmethod
    def start(cls, settings: Settings) -> None:
        """The initializer of a process pool."""
        # The processes are the parallelism; threads of each would fight for the same cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Ctrl-C goes to every process of a terminal; the first one ends the others in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls._current = cls(settings)

    @classmethod
    def run(cls, chunk: Chunk, path: Path) -> None:
        """A task of a process pool."""
        assert cls._current is not None
        cls._current.write(chunk, path)

    def write(self, chunk: Chunk, path: Path) -> None:
        """Tokenizes a chunk into the file `path`. Raises DataError as `tokenize` does."""
        write_atomically(path, pack(self.tokenize(chunk)))

    def tokenize(self, chunk: Chunk) -> Tokens:
        """Raises DataError that names the bad lines of the chunk."""
        settings = self.settings
        problems = Problems()
        documents = read_chunk(chunk, settings.text_field, problems, settings.text_documents)
        blocks: list[np.ndarray] = [np.empty(0, np.int32)]
        lengths: list[int] = []
        digests: list[bytes] = []
        empty = 0
        end = [] if settings.eod_id is None else [settings.eod_id]
        for batch in _batches(documents):
            texts = [text for _, text in batch if text.strip()]
            empty += len(batch) - len(texts)
            for ids in self.tokenizer.encode_all(texts):
                blocks.append(np.array(ids + end, np.int32))
                lengths.append(len(ids) + len(end))
            if settings.digests:
                digests += [
                    hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
                    for text in texts
                ]
        problems.raise_if_any()
        return Tokens(
            np.concatenate(blocks),
            np.array(lengths, np.int64),
            np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES),
            empty,
        )


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def pack(tokens: Tokens) -> bytes:
    """As one file, whose own checksums guard the arrays."""
    content = io.BytesIO()
    np.savez(
        content,
        tokens=tokens.tokens,
        lengths=tokens.lengths,
        digests=tokens.digests,
        empty=np.array(tokens.empty),
    )
    return content.getvalue()


def unpack(path: Path) -> Tokens:
    """Reads what `pack` made. Raises DataError where the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return Tokens(file["tokens"], file["lengths"], file["digests"], int(file["empty"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged: {error}; remove it and run again") from error


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _DOCUMENTS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
