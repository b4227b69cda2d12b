"""prepare() against a plain loop, Megatron-Core's own reader and its own builder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from gspo_megatron.data import corpus as prepare_module
from gspo_megatron.data.corpus import CorpusJob, prepare
from gspo_megatron.data.indexed import check_dataset, data_files, read_index, validate_tokens
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import make_texts, make_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs and a tokenizer."""
    path = tmp_path_factory.mktemp("corpus")
    texts = make_texts(90, seed=1)
    write_jsonl(path / "a.jsonl", [*texts[:50], "", texts[3], "  \n"])
    (path / "b.txt").write_text("".join(text.replace("\n", " ") + "\n" for text in texts[50:]))
    make_tokenizer(path / "tokenizer")
    return path


def job(folder: Path, prefix: Path, **changes: object) -> CorpusJob:
    settings: dict[str, object] = {
        "inputs": [str(folder / "a.jsonl"), str(folder / "b.txt")],
        "tokenizer": str(folder / "tokenizer" / "tokenizer.model"),
        "prefix": str(prefix),
        "chunk_bytes": 700,
        **changes,
    }
    return CorpusJob(**settings)  # type: ignore[arg-type]


def texts_of(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    lines = (folder / "b.txt").read_text().split("\n")[:-1]
    return [text for text in [*(row["text"] for row in rows), *lines] if text.strip()]


def files_of(prefix: Path) -> dict[str, str]:
    """Checksums of all that a job left, by the file's ending."""
    names = [path for path in prefix.parent.iterdir() if path.name.startswith(f"{prefix.name}.")]
    return {path.suffix: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def test_tokens_are_those_of_a_plain_loop(folder: Path, tmp_path: Path) -> None:
    manifest = prepare(job(folder, tmp_path / "out"), workers=2)
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.model")
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts_of(folder)]
    dataset = IndexedDataset(str(tmp_path / "out"))
    assert [sequence.tolist() for sequence in dataset] == expected
    assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
    counts = (manifest.documents, manifest.empty_documents, manifest.duplicates)
    assert counts == (len(expected), 2, 0)
    assert manifest.tokens == sum(map(len, expected))
    assert manifest.largest_token == max(map(max, expected))
    assert manifest.dtype == dataset.index.dtype.__name__ == "uint16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json"]


def test_files_are_the_builders_own(folder: Path, tmp_path: Path) -> None:
    prepare(job(folder, tmp_path / "out"), workers=1)
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.model")
    builder = IndexedDatasetBuilder(
        str(tmp_path / "x.bin"), dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for text in texts_of(folder):
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "x.idx"))
    for suffix in (".bin", ".idx"):
        assert files_of(tmp_path / "out")[suffix] == files_of(tmp_path / "x")[suffix]


def test_the_result_does_not_depend_on_workers_or_chunks(folder: Path, tmp_path: Path) -> None:
    variants = ((1, 700), (2, 700), (3, 211), (2, 10**6))
    made = []
    for number, (workers, chunk_bytes) in enumerate(variants):
        prefix = tmp_path / str(number)
        prepare(job(folder, prefix, chunk_bytes=chunk_bytes, deduplicate=True), workers)
        made.append(files_of(prefix))
    assert all(files == made[0] for files in made[1:])
    assert sorted(made[0]) == [".bin", ".idx", ".json"]


def test_copies_are_left_out(folder: Path, tmp_path: Path) -> None:
    # The copies are in other chunks and in another file than the first.
    again = write_jsonl(tmp_path / "again.jsonl", [*texts_of(folder)[:7], "all new"])
    inputs = [str(folder / "a.jsonl"), str(again)]
    manifest = prepare(job(folder, tmp_path / "out", inputs=inputs, deduplicate=True), workers=2)
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.model")
    first = list(dict.fromkeys([*texts_of(folder)[:51], "all new"]))
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in first]
    assert [s.tolist() for s in IndexedDataset(str(tmp_path / "out"))] == expected
    assert (manifest.documents, manifest.duplicates) == (len(first), 8)


def test_another_symbol_may_end_documents(folder: Path, tmp_path: Path) -> None:
    manifest = prepare(job(folder, tmp_path / "out", end_of_document="<|doc|>"), workers=1)
    tokenizer = load_tokenizer(folder / "tokenizer")
    assert manifest.eod_id == tokenizer.symbol_id("<|doc|>") != tokenizer.eos_id
    assert {s[-1] for s in IndexedDataset(str(tmp_path / "out"))} == {manifest.eod_id}
    assert tokenizer.eos_id not in np.fromfile(tmp_path / "out.bin", np.uint16)


def test_a_symbol_that_the_tokenizer_lacks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no symbol '<\|end\|>' \(--end-of-document\)"):
        prepare(job(folder, tmp_path / "out", end_of_document="<|end|>"), workers=1)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(job(folder, tmp_path / "whole"), workers=1)

    def stop_at(number: int) -> prepare_module.OnChunk:
        def on_chunk(done: int, total: int) -> None:
            if done == number:
                raise KeyboardInterrupt

        return on_chunk

    parts = tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        prepare(job(folder, tmp_path / "out"), workers=1, on_chunk=stop_at(3))
    finished = {path: path.stat().st_mtime_ns for path in parts.glob("*.npz")}
    assert len(finished) >= 3
    assert not (tmp_path / "out.idx").exists()

    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))
        for path, time in finished.items():  # nothing is done twice
            assert path.stat().st_mtime_ns == time

    prepare(job(folder, tmp_path / "out"), workers=2, on_chunk=note)
    total = seen[0][1]
    assert seen == [(n, total) for n in range(len(finished), total + 1)]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_an_interrupted_publication_continues(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(job(folder, tmp_path / "whole"), workers=1)
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if str(target).endswith("out.json"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module.os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(job(folder, tmp_path / "out"), workers=1)
    assert (tmp_path / "out.bin").exists() and not (tmp_path / "out.idx").exists()
    prepare(job(folder, tmp_path / "out"), workers=1, overwrite=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_fault_is_named_and_the_rest_need_not_be_done_again(folder: Path, tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", make_texts(60, seed=8))
    lines = bad.read_text().splitlines(keepends=True)
    bad.write_text("".join([*lines[:50], "{'text': 1}\n", *lines[50:], "[1]\n"]))
    inputs = [str(folder / "a.jsonl"), str(bad)]
    with pytest.raises(DataError) as caught:
        prepare(job(folder, tmp_path / "out", inputs=inputs), workers=2)
    assert str(caught.value).startswith(f"{bad}:51: not JSON: ")
    done = len(list((tmp_path / "out.partial").glob("*.npz")))
    assert done > 3
    bad.write_text("".join(lines))
    first: list[int] = []
    prepare(
        job(folder, tmp_path / "out", inputs=inputs),
        workers=1,
        on_chunk=lambda n, total: first.append(n),
    )
    assert first[0] > 0  # the chunks of the first file
    prepare(job(folder, tmp_path / "whole", inputs=inputs), workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_existing_files_are_not_overwritten_by_accident(folder: Path, tmp_path: Path) -> None:
    prepare(job(folder, tmp_path / "out"), workers=1)
    with pytest.raises(DataError, match="out.bin: exists already; --overwrite replaces it"):
        prepare(job(folder, tmp_path / "out"), workers=1)
    manifest = prepare(job(folder, tmp_path / "out", inputs=[str(folder / "b.txt")]), 1, True)
    assert manifest.documents == 40


def test_input_without_text_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl", ["", " "])
    with pytest.raises(DataError, match="no document with any text"):
        prepare(job(folder, tmp_path / "out", inputs=[str(empty)]), workers=1)
    assert not (tmp_path / "out.bin").exists()


def test_a_folder_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        prepare(job(folder, tmp_path / "file" / "out"), workers=1)


def test_two_runs_do_not_disturb_each_other(folder: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(DataError) as caught:
                prepare(job(folder, tmp_path / "out"), workers=1)
            refused.append(str(caught.value))

    prepare(job(folder, tmp_path / "out"), workers=1, on_chunk=second)
    assert refused == [f"{tmp_path}/out.partial: another process is preparing the same data"]


def test_a_changing_input_is_noticed(folder: Path, tmp_path: Path) -> None:
    growing = write_jsonl(tmp_path / "growing.jsonl", make_texts(20, seed=2))

    def grow(done: int, total: int) -> None:
        if done == 1:
            growing.write_text(growing.read_text() + '{"text": "more"}\n')

    with pytest.raises(DataError, match="growing.jsonl: changed while it was read"):
        prepare(job(folder, tmp_path / "out", inputs=[str(growing)]), workers=1, on_chunk=grow)
    assert not (tmp_path / "out.bin").exists()


# --- checks of finished datasets ------------------------------------------------------------------


@pytest.fixture
def dataset(folder: Path, tmp_path: Path) -> Path:
    prepare(job(folder, tmp_path / "out"), workers=1)
    return tmp_path / "out"


def faults(prefix: Path, *, whole: bool = False, vocab_size: int | None = None) -> str:
    with pytest.raises(DataError) as caught:
        if whole:
            validate_tokens(prefix, vocab_size or 500)
        else:
            check_dataset(prefix, vocab_size)
    return str(caught.value)


def test_a_good_dataset_has_no_faults(dataset: Path) -> None:
    manifest = check_dataset(dataset, model_vocab_size=512)
    assert manifest is not None and manifest.vocab_size == 500
    validate_tokens(dataset, manifest.vocab_size, manifest.eod_id)
    index, theirs = read_index(data_files(dataset)[1]), IndexedDataset(str(dataset))
    assert np.array_equal(index.lengths, theirs.sequence_lengths)
    assert np.array_equal(index.pointers, theirs.index.sequence_pointers)
    assert np.array_equal(index.document_ends, theirs.document_indices)
    assert index.dtype == theirs.index.dtype


def test_a_vocabulary_larger_than_the_models_is_refused(dataset: Path) -> None:
    expected = (
        f"{dataset}.bin: made with a tokenizer of 500 ids, but the model's vocabulary has 499; "
        "legal: model.vocab_size = 500 or more"
    )
    assert faults(dataset, vocab_size=499) == expected


@pytest.mark.parametrize("with_manifest", [True, False])
def test_an_index_of_another_dataset_is_refused(
    folder: Path, dataset: Path, with_manifest: bool
) -> None:
    other = dataset.with_name("other")
    prepare(job(folder, other, inputs=[str(folder / "b.txt")]), workers=1)
    Path(f"{other}.idx").replace(f"{dataset}.idx")
    if not with_manifest:
        Path(f"{dataset}.json").unlink()
    assert f"{dataset}.idx describes" in faults(dataset)
    assert "they do not belong together" in faults(dataset)


def test_an_index_of_the_same_size_is_found_by_its_checksum(dataset: Path) -> None:
    content = bytearray(Path(f"{dataset}.bin").read_bytes())
    content[10:12], content[12:14] = content[12:14], content[10:12]
    assert content != Path(f"{dataset}.bin").read_bytes()
    Path(f"{dataset}.bin").write_bytes(content)
    check_dataset(dataset)
    expected = f"{dataset}.bin: its checksum is not the one in the manifest"
    assert faults(dataset, whole=True) == expected


def test_tokens_outside_the_vocabulary_are_counted(dataset: Path) -> None:
    tokens = np.fromfile(f"{dataset}.bin", np.uint16)
    limit = int(np.sort(tokens)[-5])
    count = int((tokens >= limit).sum())
    message = faults(dataset, whole=True, vocab_size=limit)
    assert message == f"{dataset}.bin: {count} tokens are outside the vocabulary of {limit}"


def test_documents_must_end_in_their_symbol(dataset: Path) -> None:
    manifest = check_dataset(dataset)
    assert manifest is not None and manifest.eod_id is not None
    with pytest.raises(DataError, match=f"{manifest.documents} documents do not end in token 7"):
        validate_tokens(dataset, 500, eod_id=7)


@pytest.mark.parametrize("length", [0, 9, 33, 34, 100, -1])
def test_a_damaged_index_is_refused(dataset: Path, length: int) -> None:
    path = Path(f"{dataset}.idx")
    path.write_bytes(path.read_bytes()[:length])
    message = faults(dataset)
    assert message.startswith(f"{path}: ") and "\n" not in message


def test_shifted_pointers_are_refused(dataset: Path) -> None:
    path = Path(f"{dataset}.idx")
    content = bytearray(path.read_bytes())
    content[34 + 4 * len(read_index(path).lengths) + 8] ^= 2  # of the second pointer
    path.write_bytes(content)
    assert "sequences do not follow each other: damaged" in faults(dataset)


def test_missing_files_are_named(dataset: Path) -> None:
    Path(f"{dataset}.bin").unlink()
    assert faults(dataset) == f"{dataset}.bin: cannot be read: No such file or directory"
    Path(f"{dataset}.idx").unlink()
    assert faults(dataset).startswith(f"{dataset}.idx: no such file")


def test_a_full_disk_is_told_and_the_work_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    prepare(job(folder, tmp_path / "whole"), workers=1)
    with monkeypatch.context() as patch:
        # The last step: everything before goes through write_atomically, which has its own test.
        patch.setattr(prepare_module, "_replace", fail)
        with pytest.raises(DataError, match="out.bin: cannot be written: No space left on device"):
            prepare(job(folder, tmp_path / "out"), workers=1)
    first: list[int] = []
    prepare(job(folder, tmp_path / "out"), 1, on_chunk=lambda done, total: first.append(done))
    assert len(first) == 1  # nothing was left to do
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_the_first_fault_is_told_whichever_process_was_faster(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(f"no JSON {n:04d}\n" for n in range(300)))
    with pytest.raises(DataError) as caught:
        prepare(job(folder, tmp_path / "out", inputs=[str(bad)], chunk_bytes=200), workers=2)
    assert str(caught.value).startswith(f"{bad}:1: not JSON")


def test_work_on_what_has_changed_since_is_not_used(folder: Path, tmp_path: Path) -> None:
    texts = make_texts(40, seed=3)
    path = write_jsonl(tmp_path / "in.jsonl", texts)

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    changed = job(folder, tmp_path / "out", inputs=[str(path)])
    with pytest.raises(KeyboardInterrupt):
        prepare(changed, workers=1, on_chunk=stop)
    before = path.stat()
    write_jsonl(path, [text.replace("lo", "ol") for text in texts])
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns != before.st_mtime_ns
    prepare(changed, workers=1)
    prepare(job(folder, tmp_path / "whole", inputs=[str(path)]), workers=1)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
