"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The matrices have the names of the Hugging Face model's modules, those of experts one by one. One
rank and one alpha hold for all: vLLM reads no other.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import DataError, format_value, some_of
from gspo_megatron.families.adapter_map import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_TENSORS,
    Adapted,
    matrices_of,
)
from gspo_megatron.families.weight_map import WeightMap
from gspo_megatron.hf.files import DTYPES, HfFolder, read_header, read_json
from gspo_megatron.hf.writer import HfWriter

# Fields of adapter_config.json with which other arithmetic is meant than B (A x) * alpha / r.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(
        ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save"), (False, None)
    ),
    **dict.fromkeys(
        (
            "rank_pattern",
            "alpha_pattern",
            "target_parameters",
            "megatron_config",
            "layer_replication",
            "trainable_token_indices",
            "alora_invocation_tokens",
            "arrow_config",
        ),
        (None, {}, []),
    ),
}


class PeftFolder(HfFolder):
    """An adapter's folder. Opening it reads the header of its file, no tensor; pickles are never
    read. Raises DataError with all that is wrong with the folder, one line each."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        problems: list[str] = []
        file = self.path / PEFT_CONFIG
        self.config: dict[str, Any] = read_json(file, problems) or {}
        for name, legal in _PLAIN.items() if self.config else ():
            value = self.config.get(name, legal[0])
            if value not in legal:
                wrong = f"{name} is {format_value(value)}: not plain LoRA with one rank"
                problems.append(f"{file}: {wrong}")
        if self.config and not (type(self.rank) is int and self.rank > 0):
            problems.append(f"{file}: r is {format_value(self.rank)}; allowed: a rank from 1 on")
        tensors = self.path / PEFT_TENSORS
        if not tensors.is_file():
            pickles = [name.name for name in self.path.glob("adapter_model.*")]
            advice = f"; {', '.join(pickles)} may run code and is not read" if pickles else ""
            problems.append(f"{tensors}: no such file{advice}")
        self.tensors = (read_header(tensors, problems) or {}) if tensors.is_file() else {}
        self._mapped: dict[Path, mmap.mmap] = {}
        self._read_bytes = 0
        if problems:
            raise DataError("\n".join(problems))

    @property
    def rank(self) -> Any:
        return self.config.get("r")

    @property
    def base(self) -> str:
        """The model that the adapters say they were made for."""
        return str(self.config.get("base_model_name_or_path") or "a model that it does not name")

    def settings(self) -> LoraSection:
        """What `model.lora` says of such adapters; `targets`: the names of their modules. Raises
        DataError."""
        alpha: Any = self.config.get("lora_alpha")
        if type(alpha) not in (int, float) or not alpha > 0:
            wrong = f"lora_alpha is {format_value(alpha)}; allowed: a number above 0"
            raise DataError(f"{self.path / PEFT_CONFIG}: {wrong}")
        leaves = {name.split(".lora_")[0].rpartition(".")[2] for name in self.tensors}
        return LoraSection(
            rank=self.rank,
            alpha=float(alpha),
            use_rslora=self.config.get("use_rslora") is True,
            targets=sorted(leaves) or ["all"],
        )

    def check(self, adapters: WeightMap) -> None:
        """Raise DataError unless its tensors are those of `adapters`, by name, shape and type."""
        missing, wrong = [], []
        for name, shape in adapters.shapes.items():
            entry = self.tensors.get(name)
            if entry is None:
                missing.append(f"{name} is missing")
            elif entry.shape != shape:
                wrong.append(f"{name} has the shape {list(entry.shape)}; the model {list(shape)}")
            elif entry.dtype not in DTYPES:
                wrong.append(f"{name} has the dtype {entry.dtype}; allowed: {', '.join(DTYPES)}")
        foreign = [
            f"{name} belongs to no adapter of the model"
            for name in self.tensors
            if name not in adapters.shapes
        ]
        if lines := [*some_of(missing), *some_of(wrong), *some_of(foreign)]:
            made_for = f"adapters made for {self.base} do not fit the model and model.lora.targets"
            raise DataError("\n".join(f"{self.path}: {line}" for line in [*lines, made_for]))


def fitting_adapters(path: str | Path, section: LoraSection, adapters: WeightMap) -> PeftFolder:
    """The PEFT folder. Raises DataError where its adapters are not those of `section` and of the
    map `adapters`."""
    folder = PeftFolder(path)
    if wrong := section.differences(folder.settings()):
        raise DataError("\n".join(f"{path}: {line}" for line in wrong))
    folder.check(adapters)
    return folder


def peft_config(
    section: LoraSection, adapted: Mapping[str, Adapted], weights: WeightMap, base: str | None
) -> dict[str, Any]:
    """adapter_config.json of adapters; `weights`: the map of their base, whose folder or name is
    `base`."""
    matrices = [matrix for each in adapted.values() for matrix in each.matrices]
    leaves = sorted({matrix.leaf for matrix in matrices})
    # PEFT takes a last part of a name for all modules that have it.
    alike = (m for recipe in weights.recipes.values() for m in matrices_of(recipe))
    modules = {matrix.module for matrix in matrices}
    by_leaf = {matrix.module for matrix in alike if matrix.leaf in leaves} == modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.rank if section.alpha is None else _whole(section.alpha),
        "use_rslora": section.use_rslora,
        "target_modules": leaves if by_leaf else sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def write_peft(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    *,
    durable: bool = True,
    private: bool = False,
) -> None:
    """Write a new PEFT folder, which appears when it is complete. document: adapter_config.json.
    Raises DataError."""
    specs = {name: each.to("meta") for name, each in tensors.items()}
    size = sum(each.nbytes for each in tensors.values()) + 1
    with HfWriter(
        path,
        specs,
        max_shard_bytes=size,
        single_file=PEFT_TENSORS,
        durable=durable,
        private=private,
    ) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
        writer.publish({PEFT_CONFIG: document})


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def peft_stem(name: str) -> str:
    """The name of the matrix whose adapter a tensor of PEFT's layout is part of."""
    return f"{name.removeprefix(PEFT_PREFIX).split('.lora_')[0]}.weight"


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """A and B of `tensors` in PEFT's layout, by the name of their matrix."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):  # lora_A comes before lora_B
        found.setdefault(peft_stem(name), []).append(tensors[name])
    return found
