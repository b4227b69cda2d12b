"""prepare() against a plain loop, Megatron-Core's own reader and its own builder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from gspo_megatron.data import corpus
from gspo_megatron.data.corpus import CorpusJob, OnChunk, prepare
from gspo_megatron.data.indexed import (
    Manifest,
    check_dataset,
    data_files,
    read_index,
    validate_tokens,
)
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import make_texts, make_tokenizer, refusal, write_jsonl

Prepare = Callable[..., Manifest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs and a tokenizer."""
    path = tmp_path_factory.mktemp("corpus")
    texts = make_texts(90, seed=1)
    write_jsonl(path / "a.jsonl", [*texts[:50], "", texts[3], "  \n"])
    (path / "b.txt").write_text("".join(text.replace("\n", " ") + "\n" for text in texts[50:]))
    make_tokenizer(path / "tokenizer")
    return path


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Prepare:
    """make(NAME) prepares both inputs, or `inputs`, as tmp_path / NAME."""

    def run(
        name: str,
        *inputs: Path,
        workers: int = 1,
        overwrite: bool = False,
        on_chunk: OnChunk = lambda done, total: None,
        **settings: object,
    ) -> Manifest:
        job = CorpusJob(
            [str(path) for path in inputs or (folder / "a.jsonl", folder / "b.txt")],
            tokenizer=str(folder / "tokenizer" / "tokenizer.model"),
            prefix=str(tmp_path / name),
            **({"chunk_bytes": 700} | settings),  # type: ignore[arg-type]
        )
        return prepare(job, workers, overwrite, on_chunk)

    return run


def stop_at(number: int) -> OnChunk:
    def on_chunk(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return on_chunk


def texts_of(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    lines = (folder / "b.txt").read_text().split("\n")[:-1]
    return [text for text in [*(row["text"] for row in rows), *lines] if text.strip()]


def tokens_of(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.model")
    return [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]


def files_of(prefix: Path) -> dict[str, str]:
    """Checksums of all that a job left, by the file's ending."""
    paths = prefix.parent.glob(f"{prefix.name}.*")
    return {path.suffix: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_tokens_are_those_of_a_plain_loop_in_the_builders_own_files(
    folder: Path, make: Prepare, tmp_path: Path
) -> None:
    manifest = make("out", workers=2)
    expected = tokens_of(folder, texts_of(folder))
    dataset = IndexedDataset(str(tmp_path / "out"))
    assert [sequence.tolist() for sequence in dataset] == expected
    assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
    counts = (manifest.documents, manifest.empty_documents, manifest.duplicates)
    assert counts == (len(expected), 2, 0)
    assert manifest.tokens == sum(map(len, expected))
    assert manifest.largest_token == max(map(max, expected))
    assert manifest.dtype == dataset.index.dtype.__name__ == "uint16"
    ours = files_of(tmp_path / "out")
    assert sorted(ours) == [".bin", ".idx", ".json"]

    dtype = DType.optimal_dtype(manifest.vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for ids in expected:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "x.idx"))
    theirs = files_of(tmp_path / "x")
    assert {suffix: ours[suffix] for suffix in theirs} == theirs


def test_the_result_does_not_depend_on_workers_or_chunks(make: Prepare, tmp_path: Path) -> None:
    made = []
    for number, (workers, chunk_bytes) in enumerate(((1, 700), (2, 700), (3, 211), (2, 10**6))):
        make(str(number), workers=workers, chunk_bytes=chunk_bytes, deduplicate=True)
        made.append(files_of(tmp_path / str(number)))
    assert made == [made[0]] * 4
    assert sorted(made[0]) == [".bin", ".idx", ".json"]


def test_duplicates_are_left_out(folder: Path, make: Prepare, tmp_path: Path) -> None:
    # They are in other chunks and in another file than the first ones.
    again = write_jsonl(tmp_path / "again.jsonl", [*texts_of(folder)[:7], "all new"])
    manifest = make("out", folder / "a.jsonl", again, deduplicate=True, workers=2)
    first = list(dict.fromkeys([*texts_of(folder)[:51], "all new"]))
    assert [s.tolist() for s in IndexedDataset(str(tmp_path / "out"))] == tokens_of(folder, first)
    assert (manifest.documents, manifest.duplicates) == (len(first), 8)


def test_another_symbol_may_end_documents(folder: Path, make: Prepare, tmp_path: Path) -> None:
    manifest = make("out", end_of_document="<|doc|>")
    tokenizer = load_tokenizer(folder / "tokenizer")
    assert manifest.eod_id == tokenizer.symbol_id("<|doc|>") != tokenizer.eos_id
    assert {s[-1] for s in IndexedDataset(str(tmp_path / "out"))} == {manifest.eod_id}
    assert tokenizer.eos_id not in np.fromfile(tmp_path / "out.bin", np.uint16)


def test_an_interrupted_run_continues(make: Prepare, tmp_path: Path) -> None:
    make("whole")
    with pytest.raises(KeyboardInterrupt):
        make("out", on_chunk=stop_at(3))
    parts = tmp_path / "out.partial"
    finished = {path: path.stat().st_mtime_ns for path in parts.glob("*.npz")}
    assert len(finished) >= 3
    assert not (tmp_path / "out.idx").exists()

    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))
        for path, time in finished.items():  # nothing is done twice
            assert path.stat().st_mtime_ns == time

    make("out", workers=2, on_chunk=note)
    total = seen[0][1]
    assert seen == [(n, total) for n in range(len(finished), total + 1)]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("last", "error", "raised"),
    [
        (".json", KeyboardInterrupt(), (KeyboardInterrupt, "^$")),
        (".bin", OSError(28, "Full"), (DataError, "out.bin: cannot be written: Full")),
    ],
)
def test_an_interrupted_publication_continues(
    make: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    error: BaseException,
    raised: tuple[type[BaseException], str],
) -> None:
    make("whole")
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if str(target).endswith(f"out{last}"):
            raise error
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(corpus.os, "replace", fail)
        with pytest.raises(raised[0], match=raised[1]):
            make("out")
    assert not (tmp_path / "out.idx").exists()
    seen: list[int] = []
    make("out", overwrite=True, on_chunk=lambda done, total: seen.append(done))
    assert len(seen) == 1  # nothing was left to do
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_fault_is_named_and_the_rest_need_not_be_done_again(
    folder: Path, make: Prepare, tmp_path: Path
) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", make_texts(60, seed=8))
    lines = bad.read_text().splitlines(keepends=True)
    bad.write_text("".join([*lines[:50], "{'text': 1}\n", *lines[50:], "[1]\n"]))
    inputs = (folder / "a.jsonl", bad)
    with pytest.raises(DataError, match=f"^{bad}:51: not JSON: "):
        make("out", *inputs, workers=2)
    assert len(list((tmp_path / "out.partial").glob("*.npz"))) > 3
    bad.write_text("".join(lines))
    first: list[int] = []
    make("out", *inputs, on_chunk=lambda n, total: first.append(n))
    assert first[0] > 0  # the chunks of the first file
    make("whole", *inputs)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_what_cannot_be_prepared_is_refused(folder: Path, make: Prepare, tmp_path: Path) -> None:
    (line,) = refusal(make, "out", end_of_document="<|end|>")
    assert "has no symbol '<|end|>' (--end-of-document)" in line
    assert list(tmp_path.iterdir()) == []
    (line,) = refusal(make, "out", write_jsonl(tmp_path / "empty.jsonl", ["", " "]))
    assert "no document with any text" in line and not (tmp_path / "out.bin").exists()
    (line,) = refusal(make, "empty.jsonl/out")
    assert "cannot be written: Not a directory" in line
    make("out")
    (line,) = refusal(make, "out")  # by accident
    assert line.endswith("out.bin: exists already; --overwrite replaces it")
    assert make("out", folder / "b.txt", overwrite=True).documents == 40


def test_two_runs_do_not_disturb_each_other(make: Prepare, tmp_path: Path) -> None:
    refused: list[str] = []

    def second(done: int, total: int) -> None:
        if not refused:
            refused.extend(refusal(make, "out"))

    make("out", on_chunk=second)
    assert refused == [f"{tmp_path}/out.partial: another process is preparing the same data"]


def test_a_changing_input_is_noticed(make: Prepare, tmp_path: Path) -> None:
    growing = write_jsonl(tmp_path / "growing.jsonl", make_texts(20, seed=2))

    def grow(done: int, total: int) -> None:
        if done == 1:
            growing.write_text(growing.read_text() + '{"text": "more"}\n')

    lines = refusal(make, "out", growing, on_chunk=grow)
    assert lines == [f"{growing}: changed while it was read; run again"]
    assert not (tmp_path / "out.bin").exists()


def test_work_on_an_input_that_has_changed_is_not_used(make: Prepare, tmp_path: Path) -> None:
    texts = make_texts(40, seed=3)
    path = write_jsonl(tmp_path / "in.jsonl", texts)
    with pytest.raises(KeyboardInterrupt):
        make("out", path, on_chunk=stop_at(3))
    before = path.stat()
    write_jsonl(path, [text.replace("lo", "ol") for text in texts])
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns != before.st_mtime_ns
    make("out", path)
    make("whole", path)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


# --- checks of finished datasets ------------------------------------------------------------------


@pytest.fixture
def dataset(make: Prepare, tmp_path: Path) -> Path:
    make("out")
    return tmp_path / "out"


def faults(prefix: Path, *, whole: bool = False, vocab_size: int | None = None) -> str:
    if whole:
        return "\n".join(refusal(validate_tokens, prefix, vocab_size or 500))
    return "\n".join(refusal(check_dataset, prefix, vocab_size))


def test_a_good_dataset_has_no_faults(dataset: Path) -> None:
    manifest = check_dataset(dataset, model_vocab_size=512)
    assert manifest is not None and manifest.vocab_size == 500
    validate_tokens(dataset, manifest.vocab_size, manifest.eod_id)
    index, theirs = read_index(data_files(dataset)[1]), IndexedDataset(str(dataset))
    assert np.array_equal(index.lengths, theirs.sequence_lengths)
    assert np.array_equal(index.pointers, theirs.index.sequence_pointers)
    assert np.array_equal(index.document_ends, theirs.document_indices)
    assert index.dtype == theirs.index.dtype
    assert faults(dataset, vocab_size=499) == (
        f"{dataset}.bin: made with a tokenizer of 500 ids, but the model's vocabulary has 499; "
        "legal: model.vocab_size = 500 or more"
    )


@pytest.mark.parametrize("with_manifest", [True, False])
def test_an_index_of_another_dataset_is_refused(
    folder: Path, make: Prepare, dataset: Path, with_manifest: bool
) -> None:
    make("other", folder / "b.txt")
    dataset.with_name("other.idx").replace(f"{dataset}.idx")
    if not with_manifest:
        Path(f"{dataset}.json").unlink()
    message = faults(dataset)
    assert f"{dataset}.idx describes" in message and "they do not belong together" in message


def test_tokens_are_checked(dataset: Path) -> None:
    manifest, tokens = check_dataset(dataset), np.fromfile(f"{dataset}.bin", np.uint16)
    assert manifest is not None and manifest.eod_id is not None
    (line,) = refusal(validate_tokens, dataset, 500, eod_id=7)
    assert line.endswith(f"{manifest.documents} documents do not end in token 7")
    limit = int(np.sort(tokens)[-5])
    expected = f"{dataset}.bin: {(tokens >= limit).sum()} tokens are outside the vocabulary of "
    assert faults(dataset, whole=True, vocab_size=limit) == f"{expected}{limit}"
    # two tokens that change places: the sizes and the range are right
    tokens[5], tokens[6] = tokens[6], tokens[5]
    assert tokens[5] != tokens[6]
    tokens.tofile(f"{dataset}.bin")
    check_dataset(dataset)
    expected = f"{dataset}.bin: its checksum is not the one in the manifest"
    assert faults(dataset, whole=True) == expected


def test_a_damaged_index_is_refused(dataset: Path) -> None:
    path = Path(f"{dataset}.idx")
    whole = path.read_bytes()
    for length in (0, 9, 33, 34, 100, -1):
        path.write_bytes(whole[:length])
        message = faults(dataset)
        assert message.startswith(f"{path}: ") and "\n" not in message
    shifted = bytearray(whole)
    path.write_bytes(whole)
    shifted[34 + 4 * len(read_index(path).lengths) + 8] ^= 2  # of the second pointer
    path.write_bytes(shifted)
    assert "sequences do not follow each other: damaged" in faults(dataset)
    # missing files
    path.write_bytes(whole)
    Path(f"{dataset}.bin").unlink()
    assert faults(dataset) == f"{dataset}.bin: cannot be read: No such file or directory"
    path.unlink()
    assert faults(dataset).startswith(f"{dataset}.idx: no such file")
