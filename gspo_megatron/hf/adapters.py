"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The matrices are named after the modules of the Hugging Face model. Each expert has matrices of its
own. All adapters have the same rank and alpha, because vLLM reads only one rank and one alpha.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping, Sequence
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
    adapter_map,
    joint_matrices,
    matrices_of,
)
from gspo_megatron.families.family import Family
from gspo_megatron.families.model_shape import ModelShape
from gspo_megatron.families.weight_map import WeightMap, weight_map
from gspo_megatron.hf.files import DTYPES, HfFolder, read_header, read_json
from gspo_megatron.hf.joint_adapters import (
    LEAVES,
    Part,
    is_joint,
    join_pairs,
    joint_shapes,
    joint_stem,
    not_plain,
    split_joint,
    wrong_parameters,
)
from gspo_megatron.hf.writer import HfWriter
from gspo_megatron.hub import parse_name

# Fields of adapter_config.json, with the values for which an adapter computes B (A x) * alpha / r.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(
        ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save"), (False, None)
    ),
    **dict.fromkeys(
        (
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
    """The folder of an adapter. Opening it reads the header of the adapter's file, but no tensor.
    Pickles are never read. Raises DataError with all problems of the folder, one line each."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        problems: list[str] = []
        file = self.path / PEFT_CONFIG
        self.config: dict[str, Any] = read_json(file, problems) or {}
        for name, plain_values in _PLAIN.items() if self.config else ():
            value = self.config.get(name, plain_values[0])
            if value not in plain_values:
                problems.append(f"{file}: {not_plain(name, value)}")
        if self.config and not (type(self.rank) is int and self.rank > 0):
            problems.append(f"{file}: r is {format_value(self.rank)}; allowed: a rank from 1 on")
        tensors = self.path / PEFT_TENSORS
        if not tensors.is_file():
            pickles = [name.name for name in self.path.glob("adapter_model.*")]
            advice = f"; {', '.join(pickles)} may run code and is not read" if pickles else ""
            problems.append(f"{tensors}: no such file{advice}")
        self.tensors = (read_header(tensors, problems) or {}) if tensors.is_file() else {}
        self._joint = {name for name in self.tensors if is_joint(name)}
        self._parts: dict[str, Part] = {}
        problems += [f"{file}: {line}" for line in wrong_parameters(self.config, bool(self._joint))]
        self._mapped: dict[Path, mmap.mmap] = {}
        self._read_bytes = 0
        if problems:
            raise DataError("\n".join(problems))

    @property
    def rank(self) -> Any:
        return self.config.get("r")

    @property
    def base(self) -> str:
        """The model that the adapters were made for, as their config names it. A name of the Hub
        has its revision, if the config has one."""
        name = str(self.config.get("base_model_name_or_path") or "a model without a name")
        hub, revision = parse_name(name, "model"), self.config.get("revision")
        return f"{name}@{revision}" if hub and not hub.revision and revision else name

    def settings(self) -> LoraSection:
        """Return the section `model.lora` that fits these adapters. Its `targets` are the names of
        their modules. Raises DataError."""
        alpha: Any = self.config.get("lora_alpha")
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            wrong = f"lora_alpha is {format_value(alpha)}; allowed: a number above 0"
            raise DataError(f"{self.path / PEFT_CONFIG}: {wrong}")
        plain = self.tensors.keys() - self._joint
        leaves = {name.split(".lora_")[0].rpartition(".")[2] for name in plain}
        for name in self.config.get("target_parameters") or ():
            leaves |= set(LEAVES.get(name.rpartition(".")[2], ()))
        return LoraSection(
            rank=self.rank,
            alpha=float(alpha),
            use_rslora=self.config.get("use_rslora") is True,
            targets=sorted(leaves) or ["all"],
        )

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        """A part of a tensor, see `HfFolder.read`."""
        if name not in self._parts:
            return super().read(name, slices)
        part = self._parts[name]
        return self._whole(part.name)[part.slices][tuple(slices)]

    def _whole(self, name: str) -> Tensor:
        return super().read(name, [slice(0, size) for size in self.tensors[name].shape])

    def open_joint(self, adapted: Mapping[str, Adapted], maps: tuple[WeightMap, WeightMap]) -> None:
        """Split each pair that holds the adapters of all experts of a layer. After this call,
        `tensors` and `read` have A and B of each expert's matrix. maps: see `peft_maps`. Raises
        DataError."""
        weights, modules = maps
        joint = joint_matrices(adapted, weights, modules) if self._joint else {}
        problems = []
        for name, matrices in joint.items():
            stem, shape = joint_stem(name, joint), modules.shapes[name]
            names = [f"{stem}.lora_{letter}.weight" for letter in "AB"]
            if not set(names) <= self._joint:
                continue  # `check` reports the missing tensors
            count = len(matrices) // shape[0]  # matrices of one expert
            sizes = tuple(self.tensors[each].shape for each in names)
            ranks = [
                rank
                for rank in (self.rank, self.rank * count)
                if sizes == joint_shapes(matrices[0][0], rank, shape)
            ]
            parts: dict[str, Part] = {}
            if ranks:
                parts = dict(split_joint(matrices, stem, (ranks[0], self.rank), shape))
            if not parts:
                wrong = f"rank {self.rank} and the model's shape {list(shape)}"
                problems.append(f"{stem}.lora_*: the shapes {sizes} do not fit {wrong}")
            elif ranks[0] > self.rank and self._mixes(names[1], parts.values()):
                wrong = f"has rank {ranks[0]} for gate and up projection together"
                problems.append(f"{names[1]}: {wrong}; allowed: rank {self.rank} for each")
            self._parts |= parts
            self.tensors |= {
                each: self.tensors[part.name]._replace(shape=part.shape)
                for each, part in parts.items()
            }
        if problems:
            raise DataError("\n".join(f"{self.path}: {line}" for line in some_of(problems)))

    def _mixes(self, name: str, parts: Collection[Part]) -> bool:
        """Whether the B of all experts has values other than 0 outside the B matrices of the
        `parts`."""
        whole = self._whole(name)
        inside = sum(int(whole[p.slices].count_nonzero()) for p in parts if p.name == name)
        return inside != int(whole.count_nonzero())

    def check(self, adapters: WeightMap) -> None:
        """Raise DataError unless the folder has the tensors of `adapters`, by name, shape and
        dtype."""
        missing, wrong = [], []
        for name, shape in adapters.shapes.items():
            entry = self.tensors.get(name)
            if entry is None:
                missing.append(f"{name} is missing")
            elif entry.shape != shape:
                wrong.append(f"{name} has the shape {list(entry.shape)}, not {list(shape)}")
            elif entry.dtype not in DTYPES:
                wrong.append(f"{name} has the dtype {entry.dtype}; allowed: {', '.join(DTYPES)}")
        split = {part.name for part in self._parts.values()}  # see `open_joint`
        foreign = [
            f"{name} belongs to no adapter of the model"
            for name in self.tensors
            if name not in adapters.shapes and name not in split
        ]
        if lines := [*some_of(missing), *some_of(wrong), *some_of(foreign)]:
            last = f"adapters made for {self.base} do not fit the model and model.lora.targets"
            raise DataError("\n".join(f"{self.path}: {line}" for line in [*lines, last]))


def fitting_adapters(
    path: str | Path,
    section: LoraSection,
    adapted: Mapping[str, Adapted],
    maps: tuple[WeightMap, WeightMap],
) -> PeftFolder:
    """Open the PEFT folder at `path`. maps: see `peft_maps`. Raises DataError if its adapters do
    not fit `section` and the model."""
    folder = PeftFolder(path)
    if wrong := section.differences(folder.settings()):
        raise DataError("\n".join(f"{path}: {line}" for line in wrong))
    folder.open_joint(adapted, maps)
    folder.check(adapter_map(adapted, section.rank))
    return folder


def peft_maps(family: Family, shape: ModelShape, vocab_size: int) -> tuple[WeightMap, WeightMap]:
    """Return two maps of a model. The first map has a tensor for each matrix of each expert. The
    second map has the tensors of transformers' modules, which PEFT adapts. In some families, such a
    tensor holds all experts of a layer."""
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
    """Return the adapter_config.json and the tensors of a PEFT folder. tensors: A and B of each
    matrix, with a pair for each expert; maps: see `peft_maps`; base: the folder or name of the base
    model."""
    weights, modules = maps
    joint = joint_matrices(adapted, weights, modules)
    in_joint = {matrix.name for matrices in joint.values() for _, matrix in matrices}
    document = _peft_config(section, adapted, in_joint, weights, base)
    layout = {name: each for name, each in tensors.items() if peft_stem(name) not in in_joint}
    if not joint:
        return document, layout
    document["target_parameters"] = sorted({".".join(n.split(".")[-3:]) for n in joint})
    patterns: dict[str, tuple[int, float]] = {}
    pairs = pairs_of(tensors)
    for name, matrices in joint.items():
        leaf, stem = name.rpartition(".")[2], joint_stem(name, joint)
        a, b = join_pairs(matrices, pairs, modules.shapes[name])
        layout |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        if (count := len(matrices) // len({box.source[0] for box, _ in matrices})) > 1:
            # alpha grows with the rank, so that the scale of the adapter stays the same
            factor = math.sqrt(count) if section.use_rslora else count
            alpha = (section.rank if section.alpha is None else section.alpha) * factor
            patterns[rf".*\.{leaf}"] = (section.rank * count, _int_if_whole(alpha))
    if patterns:
        document["rank_pattern"] = {key: rank for key, (rank, _) in patterns.items()}
        document["alpha_pattern"] = {key: alpha for key, (_, alpha) in patterns.items()}
    return document, layout


def _peft_config(
    section: LoraSection,
    adapted: Mapping[str, Adapted],
    in_joint: Collection[str],
    weights: WeightMap,
    base: str | None,
) -> dict[str, Any]:
    """Return the adapter_config.json. in_joint: the names of matrices that are part of a tensor of
    all experts."""
    matrices = [m for each in adapted.values() for m in each.matrices if m.name not in in_joint]
    leaves = sorted({matrix.leaf for matrix in matrices})
    modules = {matrix.module for matrix in matrices}
    # In PEFT, a name without a path, such as q_proj, stands for all modules whose names end in it.
    in_model = (m for recipe in weights.recipes.values() for m in matrices_of(recipe))
    targets = {m.module for m in in_model if m.leaf in leaves and m.name not in in_joint}
    hub = parse_name(base or "", "model")  # PEFT wants the revision in a key of its own
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if hub is None else hub.repo,
        "revision": None if hub is None else hub.revision,
        "r": section.rank,
        "lora_alpha": section.rank if section.alpha is None else _int_if_whole(section.alpha),
        "use_rslora": section.use_rslora,
        "target_modules": leaves if targets == modules else sorted(modules),
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
    """Write a new PEFT folder. It appears under its name when it is complete. document: the content
    of adapter_config.json. Raises DataError."""
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


def _int_if_whole(value: float) -> float:
    return int(value) if value == int(value) else value


def peft_stem(name: str) -> str:
    """Return the name of the adapted matrix, from the name of its A or B in PEFT's layout."""
    return f"{name.removeprefix(PEFT_PREFIX).split('.lora_')[0]}.weight"


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the pairs (A, B) of `tensors` in PEFT's layout, by the name of the adapted matrix."""
    pairs: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):  # lora_A comes before lora_B
        pairs.setdefault(peft_stem(name), []).append(tensors[name])
    return pairs
