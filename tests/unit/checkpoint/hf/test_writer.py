"""Hugging Face folders under construction: any order, several writers, whole or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.checkpoint.hf.files import HfFolder, HfWriter, TensorSpec
from gspo_megatron.checkpoint.hf.files_header import name_of
from gspo_megatron.errors import DataError
from tests.unit.checkpoint.hf.test_files import CONFIG, INDEX, assert_same_bits, noise

PARTIAL = ".new.partial"


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name_of(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def some_tensors() -> dict[str, Tensor]:
    shapes = [(9, 5), (7,), (4, 3, 2), (0, 3), (), (31, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    return {
        f"layer.{number}": noise(dtypes[number % 4], *shape, seed=number)
        for number, shape in enumerate(shapes)
    }


@pytest.mark.parametrize(("limit", "files"), [(10_000, 1), (100, 5), (200, 3)])
def test_written_folders_are_read_by_safetensors(tmp_path: Path, limit: int, files: int) -> None:
    tensors = some_tensors()
    (tmp_path / "vocab.json").write_text("{}")
    with HfWriter(tmp_path / "new", specs_of(tensors), max_shard_bytes=limit) as writer:
        for name in sorted(tensors, reverse=True):
            writer.write(name, tensors[name])
        writer.seal()
        assert not (tmp_path / "new").exists()
        writer.publish({"config.json": CONFIG}, [tmp_path / "vocab.json"])
    found = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(found) == files
    read = {name: tensor for file in found for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(read[name], tensor)
        assert_same_bits(HfFolder(tmp_path / "new").read(name), tensor)
    if files > 1:
        for file in found:
            sizes = [tensor.nbytes for tensor in load_file(file).values()]
            assert len(sizes) == 1 or sum(sizes) <= limit
        index = json.loads((tmp_path / "new" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    with safe_open(found[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "new/config.json").read_text()) == CONFIG
    assert (tmp_path / "new/vocab.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "vocab.json"]


def test_blocks_of_rows(tmp_path: Path) -> None:
    tensor = noise(torch.bfloat16, 23, 6)
    with HfWriter(tmp_path / "new", specs_of({"w": tensor})) as writer:
        for first in (10, 0, 20, 5, 15):
            writer.write("w", tensor[first : first + 5], first)
        writer.seal()
        writer.publish({})
    assert_same_bits(load_file(tmp_path / "new/model.safetensors")["w"], tensor)


def test_what_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    tensors = some_tensors()
    with pytest.raises(ZeroDivisionError), HfWriter(tmp_path / "new", specs_of(tensors)) as writer:
        writer.write("layer.0", tensors["layer.0"])
        assert [path.name for path in tmp_path.iterdir()] == [PARTIAL]
        with pytest.raises(DataError):  # the files are no safetensors files yet
            (tmp_path / PARTIAL / "config.json").write_text("{}")
            HfFolder(tmp_path / PARTIAL)
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "model-00001-of-00009.safetensors").write_text("half")
    (tmp_path / "new").mkdir()  # empty
    tensor = noise(torch.float32, 3)
    with HfWriter(tmp_path / "new", specs_of({"w": tensor})) as writer:
        writer.write("w", tensor)
        writer.seal()
        writer.publish({"config.json": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert HfFolder(tmp_path / "new").tensors.keys() == {"w"}


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    specs = specs_of({"w": noise(torch.float32, 3)})
    with HfWriter(tmp_path / "new", specs):
        with (
            pytest.raises(DataError, match="another process is writing to it"),
            HfWriter(tmp_path / "new", specs),
        ):
            pass
        assert (tmp_path / PARTIAL).exists()


def test_two_processes_share_the_files_of_a_folder(tmp_path: Path) -> None:
    tensors = some_tensors()
    specs = specs_of(tensors)
    with (
        HfWriter(tmp_path / "new", specs, max_shard_bytes=250) as owner,
        HfWriter(tmp_path / "new", specs, max_shard_bytes=250, owner=False) as other,
    ):
        for writer, files in ((owner, owner.files[:2]), (other, other.files[2:])):
            names = [name for file in files for name in file.offsets]
            for name in names:
                writer.write(name, tensors[name])
            writer.seal(names)
        owner.publish({"config.json": {}})
    folder = HfFolder(tmp_path / "new")
    for name, tensor in tensors.items():
        assert_same_bits(folder.read(name), tensor)


def test_a_destination_in_use(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, text in (("new", "has files in it already"), ("file", "exists and is not a folder")):
        with pytest.raises(DataError, match=text), HfWriter(tmp_path / name, {}):
            pass
    assert (tmp_path / "new/notes").read_text() == "mine"
    with pytest.raises(DataError, match="is not a folder"), HfWriter(tmp_path / "file/new", {}):
        pass


def test_no_room(tmp_path: Path) -> None:
    huge = {"w": TensorSpec("F32", (1 << 50,))}
    with (
        pytest.raises(DataError, match=r"4,503,599,627,370,496 bytes to write, [\d,]+ are free"),
        HfWriter(tmp_path / "new", huge),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_change_on_the_disk_are_noticed(tmp_path: Path) -> None:
    tensor = noise(torch.float32, 300)
    with (
        pytest.raises(OSError, match=r"model.safetensors: w is not what was written"),
        HfWriter(tmp_path / "new", specs_of({"w": tensor})) as writer,
    ):
        writer.write("w", tensor)
        with (tmp_path / PARTIAL / "model.safetensors").open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 4]))
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_was_never_written(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="never written, or only in part: w"),
        HfWriter(tmp_path / "new", specs_of({"w": noise(torch.float32, 3)})) as writer,
    ):
        writer.seal()
