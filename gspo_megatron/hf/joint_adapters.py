"""PEFT's adapters of parameters that hold the matrices of all experts of a layer.

PEFT has one pair of matrices for such a parameter: A [experts * rank, in] and B [out, rank *
experts], in which neighbouring columns belong to different experts. In this project each matrix of
each expert has a pair of its own, and gate and up projection are two matrices. So an export gives
the joint parameter of gate and up projection a pair of twice the rank, and B is zero where it would
mix the two projections. An import also reads a second form: a pair of the plain rank, in which both
projections share A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_megatron.errors import format_value
from gspo_megatron.families.adapter_map import PEFT_PREFIX, Matrix
from gspo_megatron.families.weight_map import Box

# The matrices of an expert in each parameter.
LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_JOINT = re.compile(r"\.experts(\.base_layer)?\.lora_[AB]\.weight$")


class Part(NamedTuple):
    """Where a PEFT file holds A or B of one matrix of one expert."""

    name: str  # name of the tensor of all experts
    slices: tuple[slice, slice]
    shape: tuple[int, int]


def is_joint(name: str) -> bool:
    """Whether a tensor of a PEFT file belongs to all experts of a layer."""
    return _JOINT.search(name) is not None


def joint_stem(name: str, joint: Collection[str]) -> str:
    """Return the start of the names of a parameter's adapters. joint: all parameters with adapters.
    If both parameters of a module have adapters, PEFT nests two modules. Then the adapters of the
    inner module have `.base_layer` in their names."""
    module, _, leaf = name.rpartition(".")
    inner = ".base_layer" if leaf == "gate_up_proj" and f"{module}.down_proj" in joint else ""
    return f"{PEFT_PREFIX}{module}{inner}"


def join_pairs(
    matrices: Sequence[tuple[Box, Matrix]],
    pairs: Mapping[str, Sequence[Tensor]],
    shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Join the adapters of all matrices in a tensor [experts, ...] to one pair in PEFT's form."""
    by_expert: dict[int, list[tuple[Box, Matrix]]] = {}
    for box, matrix in matrices:
        by_expert.setdefault(box.source[0], []).append((box, matrix))
    assert sorted(by_expert) == list(range(shape[0])), "experts without adapters"
    downs, ups = [], []
    for _, parts in sorted(by_expert.items()):
        downs.append(torch.cat([pairs[matrix.name][0] for _, matrix in parts]))
        rank = len(pairs[parts[0][1].name][0])
        axis = _row_axis(parts[0][0])
        up = downs[0].new_zeros(shape[axis], rank * len(parts))
        for number, (box, matrix) in enumerate(parts):
            rows = box.source_slices[axis]
            up[rows, number * rank : (number + 1) * rank] = pairs[matrix.name][1]
        ups.append(up)
    return torch.cat(downs), torch.stack(ups).permute(1, 2, 0).flatten(1).contiguous()


def split_joint(
    matrices: Sequence[tuple[Box, Matrix]], stem: str, ranks: tuple[int, int], shape: Sequence[int]
) -> Iterator[tuple[str, Part]]:
    """Yield the names of A and B of each matrix, and their places in the pair of all experts.
    ranks: the rank of this pair, and the rank of the pair of one matrix; shape: the shape of the
    parameter [experts, ...]."""
    experts, axis = shape[0], _row_axis(matrices[0][0])
    joint_rank, rank = ranks
    numbers = dict.fromkeys(range(experts), 0)  # how many matrices of each expert came before
    for box, matrix in matrices:
        expert = box.source[0]
        # if both ranks are equal, the matrices of an expert share A
        first = numbers[expert] * rank if joint_rank > rank else 0
        numbers[expert] += 1
        start, stop = first * experts + expert, (first + rank - 1) * experts + expert + 1
        rows = slice(expert * joint_rank + first, expert * joint_rank + first + rank)
        a = Part(f"{stem}.lora_A.weight", (rows, slice(None)), (rank, matrix.columns))
        slices = (box.source_slices[axis], slice(start, stop, experts))
        b = Part(f"{stem}.lora_B.weight", slices, (matrix.rows, rank))
        module = f"{PEFT_PREFIX}{matrix.module}"
        yield from ((f"{module}.lora_A.weight", a), (f"{module}.lora_B.weight", b))


def joint_shapes(
    box: Box, rank: int, shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of A and B of a parameter with this `shape` [experts, ...]. box: the box of
    one of its matrices."""
    axis = _row_axis(box)
    return (shape[0] * rank, shape[3 - axis]), (shape[axis], rank * shape[0])


def _row_axis(box: Box) -> int:
    """Return the axis of a parameter [experts, ...] along which the rows of a matrix lie."""
    return 1 if box.axes is None else 2


def wrong_parameters(config: Mapping[str, Any], has_joint: bool) -> list[str]:
    """Check the keys of adapter_config.json about adapters of joint parameters. Returns a line for
    each key that means something else than plain LoRA. These adapters may have another rank than
    all other adapters, but the scale must be the same: alpha / rank, or with rsLoRA alpha /
    sqrt(rank). has_joint: whether the file has such adapters."""
    leaves = tuple(LEAVES) if has_joint else ()
    parameters = config.get("target_parameters") or []
    wrong = []
    # PEFT may also name the weight of a module, such as a router, as a parameter
    if not _all_end(parameters, (".weight", *leaves)):
        wrong.append(not_plain("target_parameters", parameters))
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    for key, pattern in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(pattern, dict) or not _all_end(list(pattern), leaves):
            wrong.append(not_plain(key, pattern))
    if wrong:
        return wrong
    power = 0.5 if config.get("use_rslora") is True else 1.0
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    for name in dict.fromkeys([*ranks, *alphas]):
        own_rank, own_alpha = ranks.get(name, rank), alphas.get(name, alpha)
        try:
            is_same = math.isclose(own_alpha / own_rank**power, alpha / rank**power)
        except (TypeError, ZeroDivisionError):
            is_same = False
        if not is_same:
            line = f"the pattern {name} has rank {own_rank} and alpha {own_alpha}"
            wrong.append(f"{line}: these adapters would be scaled differently from the others")
    return wrong


def not_plain(key: str, value: Any) -> str:
    """Return the line about a key whose value means something else than plain LoRA."""
    fact = f"{key} is {format_value(value)}"
    if key == "init_lora_weights":
        remedy = "save it with path_initial_model_for_weight_conversion, as plain LoRA"
        return f"{fact}: PEFT changes the base weights when it loads this adapter; {remedy}"
    return f"{fact}: not plain LoRA with one rank"


def _all_end(names: Any, ends: tuple[str, ...]) -> bool:
    return isinstance(names, list) and all(str(name).endswith(ends) for name in names)
