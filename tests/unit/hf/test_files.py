"""Hugging Face folders: reading any part of any tensor, and messages for every kind of damage."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.errors import DataError
from gspo_megatron.hf import files as module
from gspo_megatron.hf.files import DTYPES, HfFolder
from tests.unit.hf.published import assert_same_bits

CONFIG = {"model_type": "qwen3_moe"}
INDEX = "model.safetensors.index.json"


def noise(dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    """Random bits, with NaN and -0.0 if the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return data.view(dtype) if shape else data.view(dtype).reshape(())


def write(folder: Path, files: dict[str, dict[str, Tensor]], **index: Any) -> Path:
    """Write a folder of several files with its index. `index` replaces keys of the index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(t.nbytes for each in files.values() for t in each.values())},
        "weight_map": {name: file for file, each in files.items() for name in each},
    }
    (folder / INDEX).write_text(json.dumps(content | index))
    return folder


def two_files(folder: Path, **index: Any) -> Path:
    first = {"a": noise(torch.float32, 3, 5), "b": noise(torch.bfloat16, 7)}
    return write(folder, {"one.safetensors": first, "two.safetensors": {"c": first["b"]}}, **index)


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        HfFolder(folder)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (11,), (13, 6), (4, 5, 7), (0, 4)], ids=str)
def test_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    """The slices cut one or several dimensions. The small limit makes the reader map its files
    again several times."""
    monkeypatch.setattr(module, "_MAPPED_BYTES", 100)
    tensor = noise(DTYPES[dtype], *shape)
    write(tmp_path / "hf", {"x.safetensors": {"w": tensor}})
    drawn = random.Random(len(shape))
    with safe_open(tmp_path / "hf/x.safetensors", "pt") as reference:
        whole = reference.get_tensor("w")
    folder = HfFolder(tmp_path / "hf")
    assert (folder.tensors["w"].dtype, folder.tensors["w"].shape) == (dtype, shape)
    for _ in range(20):
        slices = []
        for extent in shape[: drawn.randint(0, len(shape))]:
            start = drawn.randrange(extent + 1)
            slices.append(slice(start, drawn.randint(start, extent)))
            if drawn.random() < 0.3:
                slices[-1] = slice(None)
        assert_same_bits({"w": folder.read("w", slices)}, {"w": whole[tuple(slices)]})


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    """The tensor is in a sparse file and far larger than the memory of any machine."""
    rows, width = 1 << 21, 1 << 17  # 512 GB
    header = {"w": {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, 2 * rows * width]}}
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text("{}")
    place = 8 + len(text) + 2 * ((rows - 2) * width + 5)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(place)
        file.write(struct.pack("<3H", 1, 2, 3))
        try:
            file.truncate(8 + len(text) + 2 * rows * width)
        except OSError:
            pytest.skip("the file system has no files of that size")
    part = HfFolder(tmp_path).read("w", (slice(rows - 2, rows - 1), slice(4, 9)))
    assert part.view(torch.int16).tolist() == [[0, 1, 2, 3, 0]]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    tensors = {"a": noise(torch.float32, 3, 5)}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('never run')")
    folder = HfFolder(tmp_path)
    assert_same_bits({"a": folder.read("a", ())}, tensors)
    assert folder.config == CONFIG
    assert [file.name for file in folder.side_files] == ["config.json", "tokenizer.json"]


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def rename_tensor(file: Path) -> None:
    tensors = load_file(file)
    save_file({"d" if name == "c" else name: tensor for name, tensor in tensors.items()}, file)


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            shorten,
            "two.safetensors: damaged .incomplete metadata, file not fully covered.; copy or",
        ),
        (edit(lambda data: data + b"x"), "two.safetensors: damaged "),
        (lambda file: os.truncate(file, 30), "two.safetensors: damaged .invalid header length"),
        (lambda file: os.truncate(file, 0), "two.safetensors: damaged .header too small"),
        (edit(lambda _: bytes(100)), "two.safetensors: damaged "),
        (edit(lambda _: struct.pack("<Q", 4) + b"text"), "damaged .invalid JSON in header"),
        (Path.unlink, f"{INDEX}: two.safetensors, with 1 tensors, does not exist"),
        (edit(lambda data: data.replace(b'"BF16"', b'"E8M0"')), "two.safetensors: damaged "),
        (edit(lambda data: data.replace(b":[7]", b":[9]")), "damaged .invalid shape"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    damage(two_files(tmp_path / "hf") / "two.safetensors")
    (line,) = problems_of(tmp_path / "hf")
    assert re.search(expected, line), line


def test_files_and_index_that_differ(tmp_path: Path) -> None:
    rename_tensor(two_files(tmp_path / "hf") / "two.safetensors")
    missing, extra = problems_of(tmp_path / "hf")
    assert missing.endswith("two.safetensors: c is missing")
    assert f"two.safetensors: d is in the file, and not in {INDEX}" in extra


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"weight_map": {"a": "../one"}}', "'../one' is not the name of a file beside it"),
        ('{"weight_map": {"a": "/one"}}', "'/one' is not the name of a file beside it"),
        ('{"weight_map": {"a": 1}}', "no weight_map from tensor names to file names"),
        ('{"weight_map": []}', "no weight_map from tensor names to file names"),
        ("{}", "no weight_map from tensor names to file names"),
        ("[]", "not a JSON object"),
        (json.dumps({"weight_map": {"a": "a\0b"}}), r"'a\x00b' holds a NUL"),
        (
            json.dumps({"weight_map": {"a": "x" * 300}}),
            f"'{'x' * 79} is longer than 255 bytes",
        ),
    ],
)
def test_an_index_without_a_map_of_its_folder(tmp_path: Path, content: str, expected: str) -> None:
    folder = two_files(tmp_path / "hf")
    (folder / INDEX).write_text(content)
    assert problems_of(folder) == [f"{folder / INDEX}: {expected}"]


def test_an_index_of_very_many_files_is_read_in_one_pass(tmp_path: Path) -> None:
    files = {f"t{n}": f"f{n}.safetensors" for n in range(20_000)}
    folder = two_files(tmp_path / "m", weight_map=files)
    start = time.process_time()
    assert problems_of(folder)[-1] == "... and 19,990 more"
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_file_that_is_nested_deep_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = two_files(tmp_path / "m")
    (folder / name).write_text('{"a":' * 5000 + "1" + "}" * 5000)
    wrong = f"{folder / name}: not JSON: nested more than 100 levels deep"
    assert problems_of(folder) == [wrong]


def test_only_pickles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    (line,) = problems_of(tmp_path)
    assert "weights only as pickles (pytorch_model.bin)" in line


def test_no_folder_no_weights_no_config(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none") == [f"{tmp_path / 'none'}: no such folder"]
    config, weights = problems_of(tmp_path)
    assert config == f"{tmp_path / 'config.json'}: No such file or directory"
    assert weights == f"{tmp_path}: neither model.safetensors nor {INDEX}"


def test_all_problems_at_once(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    (folder / "config.json").write_text('{"model_type": ')
    (folder / "generation_config.json").write_text("[]")
    shorten(folder / "one.safetensors")
    (folder / "two.safetensors").unlink()
    lines = problems_of(folder)
    assert len(lines) == 4
    for part in ("config.json: not JSON", "generation_config.json: not a JSON object"):
        assert any(part in line for line in lines)


def test_code_of_the_folder_is_refused_unless_asked(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "own.Model"}}')
    (line,) = problems_of(folder)
    assert "auto_map" in line
    assert "never run" in line
    assert HfFolder(folder, ignore_custom_code=True).tensors.keys() == {"a", "b", "c"}
