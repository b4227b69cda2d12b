"""The checks of indexed datasets. The datasets are written and read by Megatron-Core's builder and
reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gspo_megatron.data.indexed import check_dataset, data_files, read_index
from tests.unit.data.corpora import refusal
from tests.unit.data.datasets import write_indexed


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """The prefix of a dataset with documents of 1 to 40 tokens below 500."""
    source = np.random.default_rng(1)
    lengths = source.integers(1, 40, size=30)
    write_indexed((source.integers(500, size=n) for n in lengths), tmp_path / "out", 500)
    return tmp_path / "out"


def faults(prefix: Path, vocab_size: int | None = None) -> str:
    return "\n".join(refusal(check_dataset, prefix, vocab_size))


def test_a_good_dataset_has_no_faults(dataset: Path) -> None:
    assert check_dataset(dataset, model_vocab_size=500) is None
    index, theirs = read_index(data_files(dataset)[1]), IndexedDataset(str(dataset))
    assert np.array_equal(index.lengths, theirs.sequence_lengths)
    assert np.array_equal(index.pointers, theirs.index.sequence_pointers)
    assert np.array_equal(index.document_ends, theirs.document_indices)
    assert index.dtype == theirs.index.dtype


def test_tokens_beyond_the_vocabulary_are_refused(dataset: Path) -> None:
    largest = int(np.fromfile(f"{dataset}.bin", np.uint16).max())
    assert check_dataset(dataset, largest + 1) is None
    assert faults(dataset, largest) == (
        f"{dataset}.bin: has the token {largest}, but the model's vocabulary has {largest} ids; "
        "name the tokenizer that made it in data.tokenizer"
    )


def test_the_description_of_an_earlier_release_is_read(dataset: Path) -> None:
    path = data_files(dataset)[2]
    content = {"vocab_size": 600, "eod_id": 3, "tokenizer": {"name": "t", "sha256": "0"}}
    path.write_text(json.dumps({**content, "documents": 30, "text_field": "text"}))
    manifest = check_dataset(dataset, 600)
    assert manifest is not None
    assert (manifest.eod_id, manifest.tokenizer) == (3, content["tokenizer"])
    assert faults(dataset, 599) == (
        f"{dataset}.bin: made with a tokenizer of 600 ids, but the model's vocabulary has 599; "
        "allowed: model.vocab_size = 600 or more"
    )
    wrong = (
        {"tokenizer": {"name": "t"}},
        {"tokenizer": "t"},
        {"vocab_size": "600"},
        {"eod_id": []},
    )
    for each in ({}, *({**content, **keys} for keys in wrong)):
        path.write_text(json.dumps(each))
        assert faults(dataset).startswith(f"{path}: not the description of a dataset")


def test_an_index_of_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    write_indexed([np.arange(9)], tmp_path / "other", 500)
    dataset.with_name("other.idx").replace(f"{dataset}.idx")
    message = faults(dataset)
    assert f"{dataset}.idx describes" in message and "they do not belong together" in message


def test_a_damaged_index_is_refused(dataset: Path) -> None:
    path = Path(f"{dataset}.idx")
    whole = path.read_bytes()
    for length in (0, 9, 33, 34, 100, -1):
        path.write_bytes(whole[:length])
        message = faults(dataset)
        assert message.startswith(f"{path}: ") and "\n" not in message
    shifted = bytearray(whole)
    path.write_bytes(whole)
    shifted[34 + 4 * len(read_index(path).lengths) + 8] ^= 2  # changes the second pointer
    path.write_bytes(shifted)
    assert "sequences do not follow each other: damaged" in faults(dataset)
    path.write_bytes(whole)
    Path(f"{dataset}.bin").unlink()
    assert faults(dataset) == f"{dataset}.bin: cannot be read: No such file or directory"
    path.unlink()
    assert faults(dataset).startswith(f"{dataset}.idx: no such file")
