"""A Hugging Face model folder: what is in it, and any part of any tensor of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.checkpoint.hf.files_header import (
    DTYPES,
    TensorEntry,
    TensorSpec,
    bounds,
    read_header,
    read_part,
    tensor_bytes,
    torch_dtype,
)
from gspo_megatron.checkpoint.hf.files_open import OpenFiles
from gspo_megatron.checkpoint.hf.writer import SINGLE_FILE, WEIGHT_INDEX, HfWriter
from gspo_megatron.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DTYPES", "SIDE_FILES", "HfFolder", "HfWriter", "TensorEntry", "TensorSpec"]

# What travels with the weights: settings and tokenizer. Never code.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HfFolder:
    """Config and tensors of a folder. Opening it reads the headers of the files, no tensor.

    `config` is config.json; `generation_config` likewise, or None; `tensors` maps each name to its
    dtype, shape and place; `side_files` are the folder's settings and tokenizer files. A config
    that names Python code of its own (`auto_map`) describes a model that nobody else knows: it is
    refused unless `ignore_custom_code`, and the code is not run then either.

    Raises DataError with all that is wrong with the folder, one line each.
    """

    def __init__(self, path: str | Path, *, ignore_custom_code: bool = False) -> None:
        self.path = Path(path)
        self._files = OpenFiles()
        if not self.path.is_dir():
            raise DataError(f"{self.path}: no such folder")
        problems: list[str] = []
        self.config: dict[str, Any] = _read_json(self.path / "config.json", problems) or {}
        generation = self.path / "generation_config.json"
        self.generation_config: dict[str, Any] | None = (
            _read_json(generation, problems) if generation.exists() else None
        )
        if "auto_map" in self.config and not ignore_custom_code:
            problems.append(
                f"{self.path / 'config.json'}: auto_map: the model is defined by code in its"
                " folder, which is never run; --ignore-custom-code takes the folder for what its"
                " model_type says"
            )
        self.tensors: dict[str, TensorEntry] = self._read_tensors(problems)
        if problems:
            raise DataError("\n".join(problems))

    @property
    def side_files(self) -> list[Path]:
        return [file for name in SIDE_FILES if (file := self.path / name).is_file()]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.bytes for entry in self.tensors.values())

    def read(self, name: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The tensor, or the part of it that `slices` cut out (leading dimensions first; missing
        ones are whole). Reads no more of the file than that, but for gaps below 64 KiB.

        Raises KeyError for a name that the folder lacks; EOFError where the file has shrunk.
        """
        import torch

        entry = self.tensors[name]
        sizes = [size for _, size in bounds(entry.shape, slices)]
        out = torch.empty(sizes, dtype=torch_dtype(entry.dtype))
        self.read_into(name, slices, tensor_bytes(out))
        return out

    def read_into(self, name: str, slices: Sequence[slice] | None, out: memoryview) -> None:
        """The same, its bytes."""
        entry = self.tensors[name]
        with self._files.descriptor(entry.file) as descriptor:
            read_part(descriptor, entry.offset, entry, bounds(entry.shape, slices), out)

    def close(self) -> None:
        self._files.close()

    def _read_tensors(self, problems: list[str]) -> dict[str, TensorEntry]:
        single, index = self.path / SINGLE_FILE, self.path / WEIGHT_INDEX
        if single.exists():  # as transformers does: before an index
            return read_header(single, problems)
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


def _read_indexed(index: Path, problems: list[str]) -> dict[str, TensorEntry]:
    content = _read_json(index, problems)
    if content is None:
        return {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        problems.append(f"{index}: no weight_map from tensor names to file names")
        return {}
    tensors: dict[str, TensorEntry] = {}
    readable = True
    for file_name in sorted(set(weight_map.values())):
        named = {name for name, file in weight_map.items() if file == file_name}
        if Path(file_name).name != file_name:
            problems.append(f"{index}: {file_name!r} is not the name of a file beside it")
            readable = False
            continue
        file = index.parent / file_name
        if not file.exists():
            problems.append(f"{index}: {file_name}, with {len(named)} tensors, does not exist")
            readable = False
            continue
        before = len(problems)
        entries = read_header(file, problems)
        if len(problems) > before:
            readable = False
        else:
            problems += [f"{file}: {name} is missing" for name in sorted(named - entries.keys())]
            problems += [
                f"{file}: {name} is in the file, and not in {index.name} at this place"
                for name in sorted(entries.keys() - named)
            ]
        tensors.update({name: entry for name, entry in entries.items() if name in named})
    total = (content.get("metadata") or {}).get("total_size")
    size = sum(entry.bytes for entry in tensors.values())
    if readable and tensors.keys() == weight_map.keys() and total not in (None, size):
        problems.append(f"{index}: total_size is {total}, the tensors have {size} bytes")
    return tensors


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return None
    except ValueError as error:
        problems.append(f"{file}: not JSON: {error}")
        return None
    if not isinstance(content, dict):
        problems.append(f"{file}: not a JSON object")
        return None
    return content
