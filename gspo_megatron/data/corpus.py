"""Files of text to one indexed dataset, in worker processes, resumable.

Workers write the tokens of each chunk of the input to a file in PREFIX.partial. Then one process
joins these files in order, leaves out duplicates and publishes the result. A later run uses the
files of an interrupted one. The result does not depend on interruptions or the number of workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gspo_megatron.data.documents import (
    CHUNK_BYTES,
    TEXT_DOCUMENTS,
    Chunk,
    plan_chunks,
    read_chunk,
)
from gspo_megatron.data.indexed import Manifest, data_files, read_index, validate_tokens
from gspo_megatron.data.rows import Problems
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.files import fingerprint, make_folder, write_atomically

OnChunk = Callable[[int, int], None]  # called with the number of finished chunks, and of all

DIGEST_BYTES = 16
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class CorpusJob:
    """The input files, and how they become a dataset."""

    inputs: Sequence[str]
    tokenizer: str
    prefix: str  # of the files to write
    text_field: str = "text"
    text_documents: str = "line"  # documents.TEXT_DOCUMENTS
    end_of_document: str | None = None  # a symbol; None: the tokenizer's end-of-sequence token
    deduplicate: bool = False
    chunk_bytes: int = CHUNK_BYTES


def prepare(
    job: CorpusJob,
    workers: int,
    overwrite: bool = False,
    on_chunk: OnChunk = lambda done, total: None,
) -> Manifest:
    """Writes PREFIX.bin, .idx and .json, and validates them; returns the content of the last.

    Raises DataError for bad input (file and line), a tokenizer that lacks the end-of-document
    symbol, a folder that cannot be written, or files that exist already (unless `overwrite`).
    """
    assert workers > 0 and job.chunk_bytes > 0 and job.text_documents in TEXT_DOCUMENTS
    existing = [str(path) for path in data_files(job.prefix) if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{existing[0]}: exists already; --overwrite replaces it")
    tokenizer = load_tokenizer(job.tokenizer)
    eod_id = tokenizer.eos_id
    if job.end_of_document is not None:
        symbol_id = tokenizer.symbol_id(job.end_of_document)
        if symbol_id is None:
            raise DataError(
                f"{job.tokenizer}: has no symbol {job.end_of_document!r} (--end-of-document); "
                "name one of its symbols, or train it with --control-symbols"
            )
        eod_id = symbol_id
    chunks = plan_chunks(job.inputs, job.chunk_bytes, job.text_documents)
    states = {path: _file_state(path) for path in job.inputs}
    with _work_folder(job.prefix) as folder:
        # Each chunk's file is named by a hash of everything that its tokens depend on. So an
        # existing file is always right: after the user has corrected one input, the chunks of the
        # others are not done again.
        settings = [job.text_field, job.text_documents, eod_id, job.deduplicate]
        common = [fingerprint(job.tokenizer), *settings]
        parts = []
        for chunk in chunks:
            key = json.dumps([common, states[chunk.path], chunk.kind, chunk.start, chunk.end])
            digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
            parts.append(folder / f"{digest}.npz")
        _tokenize(chunks, parts, Worker(job, eod_id, tokenizer), workers, on_chunk)
        for path, before in states.items():
            if _file_state(path) != before:
                raise DataError(f"{path}: changed while it was read; run again")
        try:
            return _publish(job, parts, eod_id, folder, tokenizer.vocab_size)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{job.prefix}.bin: cannot be written: {reason}") from error


@contextmanager
def _work_folder(prefix: str) -> Generator[Path]:
    """PREFIX.partial, locked by this process; removed at the end if nothing failed."""
    folder = Path(f"{prefix}.partial")
    try:
        make_folder(folder)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{folder}: another process is preparing the same data") from error
        yield folder
        shutil.rmtree(folder)


def _file_state(path: str) -> tuple[str, int, int]:
    """The real path of a file, its size and the time of its last change."""
    stat = os.stat(path)
    return os.path.realpath(path), stat.st_size, stat.st_mtime_ns


def _tokenize(
    chunks: Sequence[Chunk],
    parts: Sequence[Path],
    worker: Worker,
    workers: int,
    on_chunk: OnChunk,
) -> None:
    """Writes the parts that are missing. Raises the error of the first chunk that has one."""
    missing = [(chunk, part) for chunk, part in zip(chunks, parts) if not part.exists()]
    done = len(parts) - len(missing)
    on_chunk(done, len(parts))
    pool = None
    if workers == 1 or not missing:
        written = map(worker.write, missing)
    else:
        # New processes: a fork would copy the locks of this one's threads.
        pool = ProcessPoolExecutor(
            min(workers, len(missing)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(worker.job, worker.eod_id),
        )
        written = pool.map(_run_worker, missing)
    try:
        for number, _ in enumerate(written, start=done + 1):
            on_chunk(number, len(parts))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Worker:
    """Tokenizes one chunk after the other."""

    job: CorpusJob
    eod_id: int  # put after each document
    tokenizer: Tokenizer

    def write(self, part: tuple[Chunk, Path]) -> None:
        """Tokenizes a chunk into a file, an archive of

        tokens: [sum(lengths)] int32; lengths: [documents] int64, EOD included; digests:
        [documents, DIGEST_BYTES] uint8, or no rows; empty: documents without text, left out.

        Raises DataError that names the bad lines of the chunk.
        """
        (chunk, path), job, problems = part, self.job, Problems()
        documents = read_chunk(chunk, job.text_field, problems, job.text_documents)
        blocks: list[np.ndarray] = [np.empty(0, np.int32)]
        lengths: list[int] = []
        digests: list[bytes] = []
        empty = 0
        while batch := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
            texts = [text for _, text in batch if text.strip()]
            empty += len(batch) - len(texts)
            for ids in self.tokenizer.encode_all(texts):
                blocks.append(np.array([*ids, self.eod_id], np.int32))
                lengths.append(len(ids) + 1)
            if job.deduplicate:
                digests += [
                    hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
                    for text in texts
                ]
        problems.raise_if_any()
        content = io.BytesIO()
        np.savez(
            content,
            tokens=np.concatenate(blocks),
            lengths=np.array(lengths, np.int64),
            digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES),
            empty=np.array(empty),
        )
        write_atomically(path, content.getvalue())


_workers: list[Worker] = []  # of this process, if it is one of the pool


def _start_worker(job: CorpusJob, eod_id: int) -> None:
    # The processes are the parallelism; threads would compete for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches every process of a terminal; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _workers.append(Worker(job, eod_id, load_tokenizer(job.tokenizer)))


def _run_worker(part: tuple[Chunk, Path]) -> None:
    _workers[0].write(part)


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed; it would wait for its next task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_part(path: Path) -> dict[str, np.ndarray]:
    """The arrays that `Worker.write` wrote. Raises DataError if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:  # a zip file with checksums
            return {name: file[name] for name in ("tokens", "lengths", "digests", "empty")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged: {error}; remove it and run again") from error


class _JoinedDocuments:
    """The documents of all chunks in order, without duplicates; counts them as they are read."""

    def __init__(self, parts: Sequence[Path], deduplicate: bool) -> None:
        self._parts = parts
        self._seen: set[bytes] | None = set() if deduplicate else None
        self.documents = self.tokens = self.empty = self.duplicates = 0
        self.largest = -1

    def __iter__(self) -> Iterator[np.ndarray]:
        for path in self._parts:
            part = _read_part(path)
            self.empty += int(part["empty"])
            documents = np.split(part["tokens"], np.cumsum(part["lengths"]))[:-1]
            for number, tokens in enumerate(documents):
                if self._seen is not None:
                    digest = part["digests"][number].tobytes()
                    if digest in self._seen:
                        self.duplicates += 1
                        continue
                    self._seen.add(digest)
                self.documents += 1
                self.tokens += len(tokens)
                self.largest = max(self.largest, int(tokens.max()))
                yield tokens


def _publish(
    job: CorpusJob, parts: Sequence[Path], eod_id: int, folder: Path, vocab_size: int
) -> Manifest:
    # Not at the top: the workers import this module, and need no Megatron-Core.
    from gspo_megatron.data.corpus_files import write_indexed

    joined = _JoinedDocuments(parts, job.deduplicate)
    made = data_files(folder / "joined")
    write_indexed(joined, made[0], made[1], vocab_size)
    if not joined.documents:
        raise DataError(f"{', '.join(job.inputs)}: no document with any text")
    manifest = Manifest(
        documents=joined.documents,
        tokens=joined.tokens,
        dtype=read_index(made[1]).dtype.name,
        largest_token=joined.largest,
        vocab_size=vocab_size,
        eod_id=eod_id,
        tokenizer={"name": Path(job.tokenizer).name, "sha256": fingerprint(job.tokenizer)},
        inputs=[
            {"name": path.name, "bytes": path.stat().st_size} for path in map(Path, job.inputs)
        ],
        text_field=job.text_field,
        empty_documents=joined.empty,
        duplicates=joined.duplicates,
        bytes={path.suffix[1:]: path.stat().st_size for path in made[:2]},
        sha256={path.suffix[1:]: fingerprint(path) for path in made[:2]},
    )
    write_atomically(made[2], (json.dumps(asdict(manifest), indent=2) + "\n").encode())
    validate_tokens(folder / "joined", vocab_size, eod_id)
    # The old index is removed first and the new one published last: an index never stands beside
    # the tokens of another dataset.
    wanted = data_files(job.prefix)
    wanted[1].unlink(missing_ok=True)
    for number in (0, 2, 1):
        os.replace(made[number], wanted[number])
    return manifest
