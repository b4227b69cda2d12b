"""Reads a Hugging Face model folder (config and tensors), and checks whether it fits a model."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gspo_megatron.errors import ConfigError, DataError, format_value, some_of
from gspo_megatron.families import describe, family_of, is_score_model, language_model
from gspo_megatron.families.model_shape import (
    ModelPreset,
    ModelShape,
    checkpoint_model_file,
    no_folder,
    shape_conflicts,
)
from gspo_megatron.families.weight_map import SCORE_HEAD, Box, WeightMap, split, weight_map
from gspo_megatron.files import (
    SIDE_FILES,
    SINGLE_FILE,
    WEIGHT_INDEX,
    copied_as,
    fault_of_name,
    os_errors,
    parse_json,
)

# Dtypes of weights, by their names in safetensors files.
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
FP8 = "F8_E4M3"  # each block has a scale; an import converts the values to bf16
SCALES = "_scale_inv"  # the tensor of scales has the name of the FP8 tensor with this ending
BYTES = "U8"
# In MXFP4, a tensor of experts is stored as two tensors of bytes: blocks and scales, whose names
# have these endings. A block has 32 values of four bits, and its scale is a power of two.
MXFP4 = "MXFP4"
FP4_PARTS = ("_blocks", "_scales")
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same values with a minus sign
FP4_BLOCK = 32

_PACKED = {FP8: torch.float8_e4m3fn, BYTES: torch.uint8}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAPPED_BYTES = 32 << 20  # after this many bytes were read, pages of mapped files are released


class FileTensor(NamedTuple):
    """A tensor in a safetensors file; `dtype` is a name of the file format."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # of the first byte, in the file


class HfFolder:
    """The config and the tensors of a folder. A vision-language model is read as its language
    model. Opening the folder reads the headers of the files, but no tensor.

    A config.json that names Python code of its own (`auto_map`) is refused unless
    `ignore_custom_code` is true. The code is never run.

    Raises DataError with all problems of the folder, one line each.
    """

    def __init__(self, path: str | Path, *, ignore_custom_code: bool = False) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"{self.path}: {no_folder(self.path)}")
        if not (self.path / "config.json").exists() and checkpoint_model_file(str(path)):
            advice = "convert it with `gspo-megatron convert megatron-to-hf`"
            raise DataError(f"{path}: is a checkpoint of gspo-megatron; {advice}")
        problems: list[str] = []
        config = read_json(self.path / "config.json", problems) or {}
        self.config: dict[str, Any] = dict(language_model(config))
        if (generation := self.path / "generation_config.json").exists():
            read_json(generation, problems)
        if "auto_map" in self.config and not ignore_custom_code:
            problems.append(
                f"{self.path / 'config.json'}: auto_map: the model is defined by code in its"
                " folder, which is never run; to load it by its model_type alone, set"
                " model.ignore_custom_code = true (for convert: --ignore-custom-code)"
            )
        # In a vision-language model, the language model's tensors have a common prefix.
        self.tensors: dict[str, FileTensor] = {
            name.replace("model.language_model.", "model.", 1): tensor
            for name, tensor in self._read_tensors(problems).items()
        }
        self._add_mxfp4(problems)
        self._mapped: dict[Path, mmap.mmap] = {}
        self._read_bytes = 0
        if problems:
            raise DataError("\n".join(problems))

    def describe(self) -> ModelPreset:
        """The model that config.json describes. Raises DataError if no family has such models."""
        try:
            return describe(self.config)
        except ConfigError as error:
            file = self.path / "config.json"
            raise DataError("\n".join(f"{file}: {line}" for line in error.problems)) from None

    @property
    def side_files(self) -> list[Path]:
        files = (self.path / name for name in SIDE_FILES)
        return [copied_as(file) for file in files if file.is_file()]

    def dtype_of(self, name: str) -> torch.dtype:
        """The torch dtype to which an import converts a tensor; bf16 for FP8 and MXFP4. The
        tensor's dtype must be supported."""
        stored = self.tensors[name].dtype
        return torch.bfloat16 if stored in (FP8, MXFP4) else DTYPES[stored]

    @property
    def block_size(self) -> tuple[int, int]:
        """The rows and columns of a block of FP8 weights. Each block has one scale."""
        rows, columns = self.config["quantization_config"]["weight_block_size"]
        return rows, columns

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Return a part of a tensor whose dtype is supported. Parts of FP8 and MXFP4 tensors are
        returned as values in fp32. Parts of other tensors are views of the memory-mapped file: do
        not write to them. Threads may call this method at the same time.

        Raises KeyError for a name that the folder lacks.
        """
        if self.tensors[name].dtype == MXFP4:
            return self._read_mxfp4(name, slices)
        part = self._read_raw(name, slices)
        if self.tensors[name].dtype != FP8:
            return part
        # Only the scales of blocks that overlap the part are read. The last block of a row or
        # column of blocks may be smaller.
        axes = list(zip(slices, self.block_size, strict=True))
        blocks = [slice(s.start // size, -(-s.stop // size)) for s, size in axes]
        scales = self._read_raw(name + SCALES, blocks).float()
        for axis, (s, size) in enumerate(axes):
            scales = scales.repeat_interleave(size, dim=axis)
            scales = scales.narrow(axis, s.start % size, s.stop - s.start)
        return part.float() * scales

    def _add_mxfp4(self, problems: list[str]) -> None:
        """Add each MXFP4 tensor of experts under the name and shape that it has in bf16 files:
        [experts, in, out]. The file has the blocks of the tensor, [experts, out, in / 32, 16], and
        its scales, [experts, out, in / 32]."""
        quantized = self.config.get("quantization_config")
        if not isinstance(quantized, Mapping) or quantized.get("quant_method") != "mxfp4":
            return
        blocks, scales = FP4_PARTS
        for name in [name for name in self.tensors if name.endswith(blocks)]:
            base = name.removesuffix(blocks)
            entry, scale = self.tensors[name], self.tensors.get(base + scales)
            fits = len(entry.shape) == 4 and entry.shape[-1] == FP4_BLOCK // 2
            if scale is None:
                problems.append(f"{self.path}: {base}{scales}, the scales of {name}, is missing")
            elif not fits or entry.dtype != BYTES or scale[:2] != (BYTES, entry.shape[:3]):
                problems.append(
                    f"{self.path}: {name} is {entry.dtype} {list(entry.shape)}, and {base}{scales} "
                    f"{scale.dtype} {list(scale.shape)}; MXFP4 has bytes [experts, rows, blocks, "
                    "16] and [experts, rows, blocks]"
                )
            else:
                experts, rows, count, _ = entry.shape
                shape = (experts, count * FP4_BLOCK, rows)
                self.tensors[base] = FileTensor(MXFP4, shape, entry.file, entry.offset)

    def _read_mxfp4(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Return a part of an MXFP4 tensor, in fp32. Only the blocks that overlap this part are
        read."""
        experts, columns, rows = slices
        first = columns.start // FP4_BLOCK
        part = (experts, rows, slice(first, -(-columns.stop // FP4_BLOCK)))
        blocks, scales = (self._read_raw(name + ending, part) for ending in FP4_PARTS)
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
        # the low four bits of a byte are the first value
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        numbers = torch.ldexp(values[codes.int()], scales.int().unsqueeze(-1) - 127)
        start = columns.start - first * FP4_BLOCK
        return numbers.flatten(-2).narrow(-1, start, columns.stop - columns.start).mT

    def _read_raw(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Return a part of a tensor as it is stored in the file."""
        entry = self.tensors[name]
        dtype = _PACKED.get(entry.dtype) or DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)[tuple(slices)]
        mapped = self._mapped.get(entry.file)
        if mapped is None:
            with os_errors(entry.file, "cannot be read"), entry.file.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._mapped[entry.file] = mapped
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.offset)
        part = flat.view(entry.shape)[tuple(slices)]
        # Pages that were read count as this process's memory until they are released.
        self._read_bytes += part.nbytes
        if self._read_bytes > _MAPPED_BYTES:
            self._read_bytes = 0
            for each in list(self._mapped.values()):
                each.madvise(mmap.MADV_DONTNEED)
        return part

    def _read_tensors(self, problems: list[str]) -> dict[str, FileTensor]:
        single, index = self.path / SINGLE_FILE, self.path / WEIGHT_INDEX
        # If a single file and an index exist, the single file is used, as in transformers.
        if single.exists():
            return read_header(single, problems) or {}
        if index.exists():
            return _read_indexed(index, problems)
        pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
        if pickles:
            problems.append(
                f"{self.path}: weights only as pickles ({', '.join(pickles[:3])}), which can run"
                " code when read; save the model as safetensors first"
            )
        else:
            problems.append(f"{self.path}: neither {SINGLE_FILE} nor {WEIGHT_INDEX}")
        return {}


def read_header(file: Path, problems: list[str]) -> dict[str, FileTensor] | None:
    """Return all tensors of one file. If the file is damaged, add a line to `problems` and return
    None."""
    try:
        # safe_open checks the file. The framework is numpy, because with torch the mapping needs as
        # much free memory as the file is large.
        with safe_open(file, framework="np"), file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(start - 8))
    except (SafetensorError, ValueError) as error:
        cause = str(error).removeprefix("Error while deserializing header: ")
        problems.append(f"{file}: damaged ({cause}); copy or download it again")
        return None
    except OSError as error:
        problems.append(f"{file}: {error.strerror or error}")
        return None
    header.pop("__metadata__", None)
    return {
        name: FileTensor(t["dtype"], tuple(t["shape"]), file, start + t["data_offsets"][0])
        for name, t in header.items()
    }


def _read_indexed(index: Path, problems: list[str]) -> dict[str, FileTensor]:
    content = read_json(index, problems)
    if content is None:
        return {}
    files = content.get("weight_map")
    if not isinstance(files, Mapping) or not all(isinstance(f, str) for f in files.values()):
        problems.append(f"{index}: no weight_map from tensor names to file names")
        return {}
    tensors: dict[str, FileTensor] = {}
    wrong_files: list[str] = []
    differences: list[str] = []
    names_in: dict[str, set[str]] = {}
    for name, file_name in files.items():
        names_in.setdefault(file_name, set()).add(name)
    for file_name, names in sorted(names_in.items()):
        file = index.parent / file_name
        if Path(file_name).name != file_name:
            wrong_files.append(f"{index}: {file_name!r:.80} is not the name of a file beside it")
        elif (fault := fault_of_name(file_name)) is not None:
            wrong_files.append(f"{index}: {file_name!r:.80} {fault}")
        elif not file.exists():
            wrong_files.append(f"{index}: {file_name}, with {len(names)} tensors, does not exist")
        elif (in_file := read_header(file, wrong_files)) is not None:
            differences += [f"{file}: {name} is missing" for name in sorted(names - in_file.keys())]
            differences += [
                f"{file}: {name} is in the file, and not in {index.name} at this place"
                for name in sorted(in_file.keys() - names)
            ]
            tensors |= in_file
    problems += [*some_of(wrong_files), *some_of(differences)]
    return tensors


def read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file. If there is none, add a line to `problems` and return
    None."""
    try:
        content = parse_json(file.read_bytes())
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
    except ValueError as error:
        problems.append(f"{file}: not JSON: {error}")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"{file}: not a JSON object")
    return None


def checked_folder(
    path: str | Path, shape: ModelShape, vocab_size: int, *, ignore_custom_code: bool = False
) -> tuple[HfFolder, WeightMap]:
    """Return the folder (see `HfFolder`) and the map of its model. No tensor is read.

    Raises DataError with all problems: the differences between config.json and `shape` or
    `vocab_size`, and the problems that `checked_weights` finds.
    """
    folder = HfFolder(path, ignore_custom_code=ignore_custom_code)
    preset = folder.describe()
    conflicts = shape_conflicts(replace(shape, vocab_size=vocab_size), preset)
    problems = [
        f"{folder.path / 'config.json'}: {key} is {format_value(theirs)}, and "
        f"{format_value(ours)} in the model"
        for key, ours, theirs in conflicts
    ]
    if preset.scores and not shape.scores:
        problems.append(
            f"{folder.path}: holds a preference model, which gives scores and no tokens; allowed: "
            "a model that ends in ForCausalLM"
        )
    if problems:
        raise DataError("\n".join(problems))
    return folder, checked_weights(folder, shape, vocab_size)


def checked_weights(folder: HfFolder, shape: ModelShape, vocab_size: int) -> WeightMap:
    """Return the map of the folder's model. Raises DataError if tensors are missing or unknown, or
    have a wrong shape or dtype. The score head of a preference model may be missing, because
    training may begin with a language model."""
    family = family_of(folder.config)
    joint = family.names.get("experts_down", "").replace("{layer}", "0") in folder.tensors
    weights = weight_map(family, shape, vocab_size, joint_experts=joint)
    missing: list[str] = []
    problems: list[str] = []
    scales: set[str] = set()
    is_fresh = not is_score_model(folder.config)
    for name, size in weights.shapes.items():
        entry = folder.tensors.get(name)
        if entry is None and name == SCORE_HEAD and is_fresh:
            continue
        if entry is None:
            missing.append(f"{name} is missing")
        elif entry.shape != size:
            problems.append(
                f"{name} has the shape {list(entry.shape)}; config.json says {list(size)}"
            )
        elif entry.dtype == FP8 and folder.config.get("quantization_config"):
            problems += _scale_problems(folder, name)
            scales.add(name + SCALES)
        elif entry.dtype == MXFP4:
            scales |= {name + part for part in FP4_PARTS}
        elif entry.dtype not in DTYPES:
            problems.append(f"{name} has the dtype {entry.dtype}; allowed: {', '.join(DTYPES)}")
    # if the embedding is tied, files may have it a second time, as the head
    known = {*weights.shapes, *scales, family.names["head"]}
    unknown = [
        f"{name} is no part of the model that config.json describes"
        for name in folder.tensors
        if name not in known and not family.is_left_out(name, folder.config)
    ]
    if lines := [*some_of(missing), *some_of(problems), *some_of(unknown)]:
        raise DataError("\n".join(f"{folder.path}: {line}" for line in lines))
    return weights


def _scale_problems(folder: HfFolder, name: str) -> list[str]:
    """Return what is wrong with the scales of an FP8 tensor. Without its scales, the tensor would
    be read as noise."""
    shape, entry = folder.tensors[name].shape, folder.tensors.get(name + SCALES)
    if entry is None:
        return [f"{name} has the dtype {FP8}, and its scales {name}{SCALES} are missing"]
    scale_shape = tuple(-(-n // size) for n, size in zip(shape, folder.block_size))
    if len(shape) == 2 and entry.shape == scale_shape and entry.dtype in DTYPES:
        return []
    return [
        f"{name}{SCALES} is {entry.dtype} {list(entry.shape)}; of {list(shape)} in blocks of "
        f"{list(folder.block_size)} it must be F32 {list(scale_shape)}"
    ]


def check_tied_copy(folder: HfFolder, weights: WeightMap, box: Box | None = None) -> None:
    """Raise DataError if the folder has a tied embedding a second time, as the head, and the two
    tensors differ within `box` (default: anywhere)."""
    copy = family_of(folder.config).names["head"]
    if copy in weights.shapes or SCORE_HEAD in weights.shapes or copy not in folder.tensors:
        return
    box = weights.recipes["embedding.word_embeddings.weight"].boxes[0] if box is None else box
    same = folder.tensors[copy][:2] == folder.tensors[box.name][:2]
    for block in split(box) if same else ():
        bits = [folder.read(n, block.source_slices).view(torch.uint8) for n in (box.name, copy)]
        same = same and torch.equal(*bits)
    if not same:
        raise DataError(
            f"{folder.path}: config.json says tie_word_embeddings, and {copy} differs from "
            f"{box.name}"
        )
