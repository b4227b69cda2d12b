"""Writing Hugging Face folders: blocks in any order, several writers, and a folder that appears
complete or not at all."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.errors import DataError
from gspo_megatron.hf.files import HfFolder
from gspo_megatron.hf.writer import HfWriter
from tests.unit.hf.published import assert_same_bits, read_folder
from tests.unit.hf.test_files import CONFIG, INDEX, noise

PARTIAL = ".new.partial"


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
    with HfWriter(tmp_path / "new", tensors, max_shard_bytes=limit) as writer:
        for name in sorted(tensors, reverse=True):
            writer.write(name, tensors[name])
        writer.finish()
        assert not (tmp_path / "new").exists()
        writer.publish({"config.json": CONFIG}, [tmp_path / "vocab.json"])
    found = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(found) == files
    assert_same_bits(read_folder(tmp_path / "new"), tensors)
    folder = HfFolder(tmp_path / "new")
    assert_same_bits({name: folder.read(name, ()) for name in tensors}, tensors)
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


@pytest.mark.parametrize("shape", [(23, 6), (30,), (5, 6, 4), (4, 1, 6)], ids=str)
def test_blocks_in_any_order(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The blocks form a grid over all axes, so most blocks have only parts of rows."""
    tensors = {"w": noise(torch.bfloat16, *shape), "next": noise(torch.float32, 3)}
    edges = [[0, extent // 2, extent] for extent in shape]
    ranges = [[slice(a, b) for a, b in zip(each, each[1:])] for each in edges]
    blocks = list(itertools.product(*ranges))
    random.Random(1).shuffle(blocks)
    with HfWriter(tmp_path / "new", tensors) as writer:
        for block in blocks:
            writer.write("w", tensors["w"][block], block)
        writer.write("next", tensors["next"])
        writer.finish()
        writer.publish()
    assert_same_bits(read_folder(tmp_path / "new"), tensors)


def test_what_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    tensors = some_tensors()
    with pytest.raises(ZeroDivisionError), HfWriter(tmp_path / "new", tensors) as writer:
        writer.write("layer.0", tensors["layer.0"])
        assert [path.name for path in tmp_path.iterdir()] == [PARTIAL]
        with pytest.raises(DataError):  # the files are not valid safetensors files yet
            (tmp_path / PARTIAL / "config.json").write_text("{}")
            HfFolder(tmp_path / PARTIAL)
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "model-00001-of-00009.safetensors").write_text("half")
    (tmp_path / "new").mkdir()
    tensor = noise(torch.float32, 3)
    with HfWriter(tmp_path / "new", {"w": tensor}) as writer:
        writer.write("w", tensor)
        writer.finish()
        writer.publish({"config.json": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert HfFolder(tmp_path / "new").tensors.keys() == {"w"}


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    specs = {"w": noise(torch.float32, 3)}
    with HfWriter(tmp_path / "new", specs):
        with (
            pytest.raises(DataError, match="another process is writing to it"),
            HfWriter(tmp_path / "new", specs),
        ):
            pass
        assert (tmp_path / PARTIAL).exists()


def test_a_writer_whose_new_folder_another_writer_has_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a folder and its lock, another process takes it for the folder of a
    killed process."""
    mkdir, held = Path.mkdir, []

    def make_and_lose(self: Path, *mode: int, **options: bool) -> None:
        mkdir(self, *mode, **options)
        if self.name == PARTIAL:
            held.append(os.open(self, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with (
        pytest.raises(DataError, match="another process is writing to it"),
        HfWriter(tmp_path / "new", {"w": noise(torch.float32, 3)}),
    ):
        pass
    assert (tmp_path / PARTIAL).exists()
    os.close(*held)


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_folder_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: waited.append(os.fstat(number).st_ino))
    (tmp_path / "vocab.json").write_text("{}")
    tensors = some_tensors()
    with HfWriter(tmp_path / "new", tensors, durable=durable) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
        writer.publish({"config.json": CONFIG}, [tmp_path / "vocab.json"])
    assert_same_bits(read_folder(tmp_path / "new"), tensors)
    written = [*(tmp_path / "new").iterdir(), tmp_path / "new", tmp_path]
    wanted = {path.stat().st_ino for path in written} if durable else set()
    assert set(waited) == wanted


def test_a_large_file_goes_to_the_disk_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written data must not fill the page cache; see `files.settle`."""
    settled: list[int] = []
    monkeypatch.setattr("gspo_megatron.hf.writer.SETTLED", 1000)
    monkeypatch.setattr(os, "posix_fadvise", lambda number, *_: settled.append(number))
    tensor = torch.arange(4 * 500).view(4, 500).to(torch.bfloat16)  # 1,000 bytes a row
    with HfWriter(tmp_path / "new", {"w": tensor}) as writer:
        for row in range(4):
            writer.write("w", tensor[row : row + 1], [slice(row, row + 1), slice(0, 500)])
        assert len(settled) == 4
        writer.finish()
        writer.publish({"config.json": CONFIG})
    assert_same_bits(read_folder(tmp_path / "new"), {"w": tensor})


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


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/new").mkdir()
    (tmp_path / "link").symlink_to("disk/new")
    tensors = some_tensors()
    with HfWriter(tmp_path / "link", tensors) as writer:
        assert (tmp_path / "disk" / PARTIAL).is_dir()  # on the disk that holds the model
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
        writer.publish()
    assert (tmp_path / "link").is_symlink()
    assert_same_bits(load_file(tmp_path / "disk/new/model.safetensors"), tensors)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["new"]


def test_a_mounted_folder_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished folder cannot be renamed to a mount point."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(DataError, match="volume: is a mount point; give a new folder in it"):
        HfWriter(tmp_path / "volume", {}).__enter__()
    with HfWriter(tmp_path / "volume/new", {}) as writer:
        writer.finish()
        writer.publish()


def test_no_room(tmp_path: Path) -> None:
    huge = {"w": torch.empty(1 << 50, device="meta")}
    with (
        pytest.raises(DataError, match=r"4,503,599,627,370,496 bytes to write, [\d,]+ are free"),
        HfWriter(tmp_path / "new", huge),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_was_never_written(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="never written, or only in part: w"),
        HfWriter(tmp_path / "new", {"w": noise(torch.float32, 3)}) as writer,
    ):
        writer.finish()


def test_a_folder_is_overwritten_by_the_next_version(tmp_path: Path) -> None:
    """The next version reuses the files of the older version under a new name. Nobody can read the
    next version before it is complete."""
    for version, seed in enumerate((1, 2)):
        tensors = {f"w{n}": noise(torch.float32, 5, 3, seed=seed + n) for n in range(4)}
        older, path = tmp_path / f"version_{version - 1}", tmp_path / f"version_{version}"
        inodes = {file.name: file.stat().st_ino for file in older.glob("*")}
        with HfWriter(path, tensors, max_shard_bytes=120, durable=False, reuse=older) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            for file in writer.partial.glob("*.safetensors"):
                with pytest.raises(SafetensorError):
                    safe_open(file, "pt")
            writer.finish()
            writer.publish({"config.json": {**CONFIG, "version": version}})
        assert_same_bits(read_folder(path), tensors)
        assert json.loads((path / "config.json").read_text())["version"] == version
        if version:
            assert {file.name: file.stat().st_ino for file in path.glob("*")} == inodes
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
