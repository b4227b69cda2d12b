"""torch's files made and read without torch, and checksums put together."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from gspo_megatron.checkpoint.hf.checksums import Extents, combine
from gspo_megatron.checkpoint.hf.files_header import TensorSpec, tensor_bytes, torch_dtype
from gspo_megatron.checkpoint.hf.offline_archive import around_tensor, empty_archive, find_bytes
from gspo_megatron.checkpoint.hf.offline_index import Block, dump_index, load_index
from gspo_megatron.checkpoint.hf.offline_pickle import Name, Record, dump, load
from gspo_megatron.errors import DataError


def test_checksums_of_ranges_in_any_order() -> None:
    drawn = random.Random(1)
    data = drawn.randbytes(100_000)
    cuts = [0, *sorted(drawn.sample(range(1, len(data)), 20)), len(data)]
    parts = list(zip(cuts, cuts[1:], strict=False))
    drawn.shuffle(parts)
    whole = Extents()
    for first, last in parts[:-1]:
        whole.add(first, last - first, zlib.crc32(data[first:last]))
    assert whole.crc32(len(data)) is None
    ((start, length),) = whole.gaps(len(data))
    assert (start, start + length) == parts[-1]
    whole.add(start, length, zlib.crc32(data[start : start + length]))
    assert whole.gaps(len(data)) == []
    assert whole.crc32(len(data)) == zlib.crc32(data)
    assert combine(zlib.crc32(b""), zlib.crc32(b"a"), 1) == zlib.crc32(b"a")


def test_overlapping_ranges_have_no_checksum() -> None:
    whole = Extents()
    whole.add(0, 6, zlib.crc32(b"abcdef"))
    whole.add(4, 4, zlib.crc32(b"efgh"))
    assert whole.crc32(8) is None


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 4)], ids=str)
def test_torch_reads_the_archives(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(torch_dtype(dtype))
    spec, data = TensorSpec(dtype, shape), bytes(tensor_bytes(tensor))
    before, after = around_tensor(spec, zlib.crc32(data))
    archive = before + data + after
    assert [len(part) for part in around_tensor(spec, 0)] == [len(before), len(after)]
    found = torch.load(io.BytesIO(archive), weights_only=True)
    assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    assert find_bytes(io.BytesIO(archive), spec) == len(before)  # type: ignore[arg-type]


@pytest.mark.parametrize("checksums", [True, False])
def test_bytes_are_found_in_the_archives_of_torch(checksums: bool) -> None:
    tensor = torch.randn(6, 4)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        archives = [io.BytesIO(), io.BytesIO(), io.BytesIO()]
        for written, archive in zip((tensor, tensor.T, tensor[1:]), archives, strict=True):
            torch.save(written, archive)
    finally:
        torch.serialization.set_crc32_options(before)
    place = find_bytes(archives[0], TensorSpec("F32", (6, 4)))  # type: ignore[arg-type]
    assert archives[0].getvalue()[place : place + 96] == bytes(tensor_bytes(tensor))
    for archive, shape in ((archives[0], (4, 6)), (archives[1], (4, 6)), (archives[2], (5, 4))):
        assert find_bytes(archive, TensorSpec("F32", shape)) == -1  # type: ignore[arg-type]
    assert find_bytes(archives[0], TensorSpec("F64", (6, 4))) == -1  # type: ignore[arg-type]


def test_the_empty_archive() -> None:
    assert torch.load(io.BytesIO(empty_archive()), weights_only=True) == {}


def test_the_index_is_torch_s(tmp_path: Path) -> None:
    tensors = {"a": TensorSpec("F32", (5, 3)), "b": TensorSpec("BF16", (2,))}
    huge = 1 << 40  # beyond 32 bits
    blocks = {
        "a": [Block((0, 0), (2, 3), "x", 0, 9), Block((2, 0), (3, 3), "x", huge, 9)],
        "b": [Block((0,), (2,), "x", 9, 7)],
    }
    (tmp_path / ".metadata").write_bytes(dump_index(tensors, blocks))
    with (tmp_path / "x").open("wb") as file:
        file.truncate(huge + 9)
    index = FileSystemReader(tmp_path).read_metadata()
    entry = index.state_dict_metadata["a"]
    assert (entry.size, entry.properties.dtype) == (torch.Size([5, 3]), torch.float32)
    assert [chunk.sizes for chunk in entry.chunks] == [torch.Size([2, 3]), torch.Size([3, 3])]
    places = {(p.fqn, p.offset): i.offset for p, i in index.storage_data.items()}
    assert places == {("a", (0, 0)): 0, ("a", (2, 0)): huge, ("b", (0,)): 9}
    assert load_index(tmp_path) == (tensors, blocks)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))  # as torch writes it
    assert load_index(tmp_path) == (tensors, blocks)


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_reading_a_pickle_runs_nothing(tmp_path: Path) -> None:
    found = load(pickle.dumps([_Runs(tmp_path / "intruded"), print]))
    assert isinstance(found[0], Record) and issubclass(found[1], Record)
    assert not (tmp_path / "intruded").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "intruded")))
    with pytest.raises(DataError, match="not an index of a checkpoint, but a Path.touch"):
        load_index(tmp_path)
    assert not (tmp_path / "intruded").exists()


def test_a_cut_of_the_index_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(9))
    tensors, blocks = {"a": TensorSpec("F32", (2,))}, {"a": [Block((0,), (2,), "x", 0, 9)]}
    whole = dump_index(tensors, blocks)
    for length in range(len(whole)):
        (tmp_path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(DataError, match="not an index of a checkpoint"):
            load_index(tmp_path)


def test_pickles_of_plain_values() -> None:
    value = {"a": [1, -5, 1 << 31, -(1 << 40), 255, True, None], "b": ("x", ("ü",), {})}
    assert pickle.loads(dump(value)) == value
    assert pickle.loads(dump(Name("collections", "OrderedDict")(()))) == {}
    with pytest.raises(TypeError):
        dump(1.5)


def test_conversion_needs_no_torch() -> None:
    """Its import takes longer than a gigabyte."""
    script = (
        "import sys, gspo_megatron.cli.convert, gspo_megatron.checkpoint.hf.offline\n"
        "assert not {'torch', 'numpy', 'megatron'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
