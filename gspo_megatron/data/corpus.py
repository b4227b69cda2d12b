"""Files of text to one indexed dataset, in worker processes, resumable.

Every chunk of the input becomes a file of tokens in PREFIX.partial; then one process joins them in
order, leaving out copies, and publishes the result. What an interrupted run has finished is used
again; the files are the same bytes whatever was interrupted and however many workers there were.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from gspo_megatron.data.documents import CHUNK_BYTES, TEXT_DOCUMENTS, Chunk, plan_chunks
from gspo_megatron.data.fingerprints import fingerprint
from gspo_megatron.data.indexed import Manifest, data_files, validate_tokens
from gspo_megatron.data.tokenized import ChunkWorker, Settings, unpack
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically

EndedChunk = Callable[[int, int], None]  # how many chunks are done, and of how many


@dataclass(frozen=True)
class Job:
    """What to prepare."""

    inputs: Sequence[str]
    tokenizer: str
    prefix: str  # of the files to write
    text_field: str = "text"
    text_documents: str = "line"
    end_of_document: str | None = None  # a symbol; the tokenizer's end of sequence where None
    deduplicate: bool = False
    chunk_bytes: int = CHUNK_BYTES


def prepare(
    job: Job,
    workers: int,
    overwrite: bool = False,
    on_chunk: EndedChunk = lambda done, total: None,
) -> Manifest:
    """Writes PREFIX.bin, .idx and .json, and validates them; returns what the last says.

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
                "name one that it has, or train it with --control-symbols"
            )
        eod_id = symbol_id
    settings = Settings(
        job.tokenizer, job.text_field, job.text_documents, eod_id, digests=job.deduplicate
    )
    chunks = plan_chunks(job.inputs, job.chunk_bytes, job.text_documents)
    state = _file_states(job.inputs)
    with _work_folder(job.prefix) as folder:
        parts = _part_files(folder, chunks, settings, state)
        _tokenize(chunks, parts, settings, workers, on_chunk)
        for path, before in state.items():
            if _file_states([path])[path] != before:
                raise DataError(f"{path}: changed while it was read; run again")
        try:
            return _publish(job, parts, settings, folder, tokenizer.vocab_size)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{job.prefix}.bin: cannot be written: {reason}") from error


@contextmanager
def _work_folder(prefix: str) -> Iterator[Path]:
    """PREFIX.partial, for this process alone; removed when all went well."""
    folder = Path(f"{prefix}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
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


def _file_states(paths: Sequence[str]) -> dict[str, tuple[str, int, int]]:
    """By path: where it leads, size and time of the last change."""
    stats = {path: Path(path).stat() for path in paths}
    return {
        path: (str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns)
        for path, stat in stats.items()
    }


def _part_files(
    folder: Path,
    chunks: Sequence[Chunk],
    settings: Settings,
    states: Mapping[str, tuple[str, int, int]],
) -> list[Path]:
    """A file for each chunk, named by all that its tokens depend on.

    A file that is there is therefore the right one: after a fault in one input has been mended, the
    chunks of the others need not be done again.
    """
    common = [fingerprint(settings.tokenizer), {**asdict(settings), "tokenizer": None}]
    files = []
    for chunk in chunks:
        key = [common, states[chunk.path], chunk.kind, chunk.start, chunk.end]
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        files.append(folder / f"{digest}.npz")
    return files


def _tokenize(
    chunks: Sequence[Chunk],
    parts: Sequence[Path],
    settings: Settings,
    workers: int,
    on_chunk: EndedChunk,
) -> None:
    missing = [n for n, part in enumerate(parts) if not part.exists()]
    done = len(chunks) - len(missing)
    on_chunk(done, len(chunks))
    if not missing:
        return
    if workers == 1:
        worker = ChunkWorker(settings)
        for number in missing:
            worker.write(chunks[number], parts[number])
            done += 1
            on_chunk(done, len(chunks))
        return
    # Fresh processes: a fork would take over whatever threads and locks this one has.
    pool = ProcessPoolExecutor(
        min(workers, len(missing)),
        mp_context=get_context("spawn"),
        initializer=ChunkWorker.start,
        initargs=(settings,),
    )
    waiting = iter(missing)
    running: dict[Future[None], int] = {}
    failures: dict[int, DataError] = {}
    try:
        while True:
            # After a failure nothing new begins. What runs may still find an earlier fault.
            while not failures and len(running) < 2 * workers:
                number = next(waiting, None)
                if number is None:
                    break
                future = pool.submit(ChunkWorker.run, chunks[number], parts[number])
                running[future] = number
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    future.result()
                except DataError as error:
                    failures[number] = error
                else:
                    done += 1
                    on_chunk(done, len(chunks))
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[min(failures)]


class _Joined:
    """The documents of all chunks in order, without copies; counts on the way."""

    def __init__(self, parts: Sequence[Path], deduplicate: bool) -> None:
        self._parts = parts
        self._seen: set[bytes] | None = set() if deduplicate else None
        self.documents = self.tokens = self.empty = self.duplicates = 0
        self.largest = -1

    def __iter__(self) -> Iterator[np.ndarray]:
        for path in self._parts:
            part = unpack(path)
            self.empty += part.empty
            for number, tokens in enumerate(part.documents()):
                if self._seen is not None:
                    digest = part.digests[number].tobytes()
                    if digest in self._seen:
                        self.duplicates += 1
                        continue
                    self._seen.add(digest)
                self.documents += 1
                self.tokens += len(tokens)
                self.largest = max(self.largest, int(tokens.max()))
                yield tokens


def _publish(
    job: Job, parts: Sequence[Path], settings: Settings, folder: Path, vocab_size: int
) -> Manifest:
    # Here and not above: the workers import this module's neighbours, and need no Megatron.
    from gspo_megatron.data.corpus_files import token_dtype, write_indexed

    joined = _Joined(parts, job.deduplicate)
    made = data_files(folder / "joined")
    write_indexed(joined, made[0], made[1], vocab_size)
    if not joined.documents:
        raise DataError(f"{', '.join(job.inputs)}: no document with any text")
    manifest = Manifest(
        documents=joined.documents,
        tokens=joined.tokens,
        dtype=np.dtype(token_dtype(vocab_size)).name,
        largest_token=joined.largest,
        vocab_size=vocab_size,
        eod_id=settings.eod_id,
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
    write_atomically(made[2], manifest.to_json())
    validate_tokens(folder / "joined", vocab_size, settings.eod_id)
    _replace(made, data_files(job.prefix))
    return manifest


def _replace(made: Sequence[Path], wanted: Sequence[Path]) -> None:
    # The index goes first and comes last: at no time does one stand beside another's tokens.
    wanted[1].unlink(missing_ok=True)
    for number in (0, 2, 1):
        os.replace(made[number], wanted[number])
