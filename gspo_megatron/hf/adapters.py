"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The matrices have the names of the Hugging Face model's modules; each expert's matrices have their
own. All have the same rank and alpha, because vLLM reads no other adapters.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import DataError, format_value, some_of
from gspo_megatron.families.adapter_map import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_TENSORS,
    Adapted,
    Matrix,
    joint_matrices,
    matrices_of,
)
from gspo_megatron.families.family import Family
from gspo_megatron.families.model_shape import ModelShape
from gspo_megatron.families.weight_map import Box, WeightMap, weight_map
from gspo_megatron.hf.files import DTYPES, HfFolder, read_header, read_json
from gspo_megatron.hf.writer import HfWriter

# Fields of adapter_config.json that change the arithmetic B (A x) * alpha / r, unless they have one
# of these values.
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
    """An adapter's folder. Opening it reads the header of its file, no tensor. Pickles are never
    read. Raises DataError with all that is wrong with the folder, one line each."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        problems: list[str] = []
        file = self.path / PEFT_CONFIG
        self.config: dict[str, Any] = read_json(file, problems) or {}
        for name, legal in _PLAIN.items() if self.config else ():
            value = self.config.get(name, legal[0])
            if name == "target_parameters" and _are_modules(value):
                continue
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
        """The section `model.lora` of such adapters. Its `targets` are the names of their modules.
        Raises DataError."""
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


def _are_modules(parameters: Any) -> bool:
    """Whether all target_parameters are whole weights of modules, such as a router's, which PEFT
    cannot name in target_modules."""
    return isinstance(parameters, list) and all(str(n).endswith(".weight") for n in parameters)


def fitting_adapters(path: str | Path, section: LoraSection, adapters: WeightMap) -> PeftFolder:
    """The PEFT folder at `path`. Raises DataError if its adapters do not fit `section` and the map
    `adapters`."""
    folder = PeftFolder(path)
    if wrong := section.differences(folder.settings()):
        raise DataError("\n".join(f"{path}: {line}" for line in wrong))
    folder.check(adapters)
    return folder


def peft_maps(family: Family, shape: ModelShape, vocab_size: int) -> tuple[WeightMap, WeightMap]:
    """Two maps of a model: one with a tensor for each expert, and one with the modules of
    transformers, which PEFT adapts. For some families these have all experts of a layer in one
    tensor."""
    joint = "experts_gate_up" in family.names
    weights = weight_map(family, shape, vocab_size)
    return weights, weight_map(family, shape, vocab_size, joint_experts=joint)


def peft_layout(
    section: LoraSection,
    adapted: Mapping[str, Adapted],
    maps: tuple[WeightMap, WeightMap],
    tensors: Mapping[str, Tensor],
    base: str | None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The adapter_config.json and the tensors of a PEFT folder. tensors: A and B of each matrix,
    with a pair for each expert; maps: see `peft_maps`; base: the folder or name of their model.
    Raises DataError if PEFT has no form for them."""
    weights, modules = maps
    joint = joint_matrices(adapted, weights, modules)
    inside = {matrix.name for found in joint.values() for _, matrix in found}
    document = _peft_config(section, adapted, inside, weights, base)
    kept = {name: each for name, each in tensors.items() if peft_stem(name) not in inside}
    if not joint:
        return document, kept
    document["target_parameters"] = sorted({".".join(n.split(".")[-3:]) for n in joint})
    patterns: dict[str, tuple[int, float]] = {}
    pairs = pairs_of(tensors)
    for name, found in joint.items():
        module, _, leaf = name.rpartition(".")
        # PEFT wraps the module once for each parameter, so one wrapper is inside the other
        inner = ".base_layer" if leaf == "gate_up_proj" and f"{module}.down_proj" in joint else ""
        a, b = _joined(found, pairs, modules.shapes[name])
        stem = f"{PEFT_PREFIX}{module}{inner}"
        kept |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        if (count := len(found) // len({box.source[0] for box, _ in found})) > 1:
            grown = math.sqrt(count) if section.use_rslora else count
            alpha = (section.rank if section.alpha is None else section.alpha) * grown
            patterns[rf".*\.{leaf}"] = (section.rank * count, _whole(alpha))
    if patterns:
        document["rank_pattern"] = {key: rank for key, (rank, _) in patterns.items()}
        document["alpha_pattern"] = {key: alpha for key, (_, alpha) in patterns.items()}
    return document, kept


def _joined(
    found: Sequence[tuple[Box, Matrix]], pairs: Mapping[str, Sequence[Tensor]], shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The adapters of all matrices in a tensor [experts, ...] as one pair: A [experts * rank, in],
    and B [out, rank * experts], in which the experts alternate. If gate and up projection are one
    matrix in the tensor, its rank is the sum of their ranks."""
    by_expert: dict[int, list[tuple[Box, Matrix]]] = {}
    for box, matrix in found:
        by_expert.setdefault(box.source[0], []).append((box, matrix))
    assert sorted(by_expert) == list(range(shape[0])), "experts without adapters"
    downs, ups = [], []
    for _, parts in sorted(by_expert.items()):
        downs.append(torch.cat([pairs[matrix.name][0] for _, matrix in parts]))
        rank = len(pairs[parts[0][1].name][0])
        axis = 1 if parts[0][0].axes is None else 2  # of its rows
        up = downs[0].new_zeros(shape[axis], rank * len(parts))
        for number, (box, matrix) in enumerate(parts):
            rows = box.source_slices[axis]
            up[rows, number * rank : (number + 1) * rank] = pairs[matrix.name][1]
        ups.append(up)
    return torch.cat(downs), torch.stack(ups).permute(1, 2, 0).flatten(1).contiguous()


def _peft_config(
    section: LoraSection,
    adapted: Mapping[str, Adapted],
    inside: Collection[str],
    weights: WeightMap,
    base: str | None,
) -> dict[str, Any]:
    """The adapter_config.json. inside: the names of matrices that are part of a tensor of all
    experts."""
    matrices = [m for each in adapted.values() for m in each.matrices if m.name not in inside]
    leaves = sorted({matrix.leaf for matrix in matrices})
    # In PEFT the last part of a name stands for all modules whose names end in it.
    alike = (m for recipe in weights.recipes.values() for m in matrices_of(recipe))
    modules = {matrix.module for matrix in matrices}
    by_leaf = {m.module for m in alike if m.leaf in leaves and m.name not in inside} == modules
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
    """The name of the matrix to whose adapter a tensor in PEFT's layout belongs."""
    return f"{name.removeprefix(PEFT_PREFIX).split('.lora_')[0]}.weight"


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The pairs (A, B) among `tensors` in PEFT's layout, by the name of their matrix."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):  # lora_A comes before lora_B
        found.setdefault(peft_stem(name), []).append(tensors[name])
    return found
