"""Turns a dense model into a Mixture of Experts: each layer's MLP becomes its experts (upcycling).

    python tools/upcycle.py DENSE MOE --experts 4 --top-k 2
    python tools/upcycle.py DENSE MOE --experts 8 --top-k 4 --granularity 2 --noise 0.01

DENSE is a Hugging Face folder of a dense family, MOE the new folder of the family with the same
attention: llama becomes mixtral, qwen2 qwen2_moe, qwen3 qwen3_moe, qwen3_5 qwen3_5_moe.

Each expert is a copy of the MLP, and the weights of the chosen experts add up to 1. So without
noise, the new model computes the same as the dense model, whatever its router chooses. With
--granularity G, each copy is cut into G parts, and each part is an expert. The router rows of the G
parts of a copy are equal. So at first a token chooses all G parts of a copy or none; in training
the rows become different. Each part gets 1/G of the weight of its copy, so the output of a part is
scaled by G. In families with a shared expert, the shared expert is a copy of the MLP, too: its gate
begins at 1/2, and the output of the other experts is halved.

Tensors are read and written one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gspo_megatron.errors import DataError
from gspo_megatron.families import FAMILIES, Family, family_of
from gspo_megatron.families.model_shape import ModelShape, shape_of
from gspo_megatron.families.weight_map import SCORE_HEAD, weight_map
from gspo_megatron.hf.files import HfFolder, check_tied_copy, checked_weights
from gspo_megatron.hf.side_files import generation_files, tokenizer_files
from gspo_megatron.hf.writer import HfWriter
from gspo_megatron.process.failures import run_script

MOE_OF = {
    "llama": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "qwen3_5_text": "qwen3_5_moe_text",
}
_COUNTERPARTS = {
    f"{kind}_{part}": part for kind in ("expert", "shared") for part in ("gate", "up", "down")
}


@dataclass(frozen=True)
class Plan:
    """The numbers that describe the new model."""

    experts: int
    top_k: int
    granularity: int = 1
    noise: float = 0.0
    router_std: float = 0.02
    seed: int = 1

    def problems(self, width: int) -> Iterator[str]:
        """Yield what is wrong with the numbers, for MLPs of this width."""
        if self.granularity < 1 or width % self.granularity:
            yield f"--granularity {self.granularity}: must divide the width of the MLP, {width}"
        if not 2 <= self.top_k <= self.experts:
            # if a token has a single expert, the expert's weight is 1, whatever the router says
            yield f"--top-k {self.top_k}: must be from 2 to --experts {self.experts}"
        for name, number in (("experts", self.experts), ("top-k", self.top_k)):
            if self.granularity > 1 and number % self.granularity:
                yield f"--{name} {number}: must be a multiple of --granularity {self.granularity}"
        if not 0 <= self.noise < math.inf:
            yield f"--noise {self.noise}: must be a number of at least 0"
        if not 0 < self.router_std < math.inf:
            yield f"--router-std {self.router_std}: must be a number above 0; equal rows stay equal"


@dataclass(frozen=True)
class Origin:
    """The origin of a tensor of the new model: its role, and the name of the dense tensor."""

    role: str
    source: str
    expert: int


def upcycle(source: Path, target: Path, plan: Plan) -> None:
    """Write the MoE. Raises DataError if the model, the numbers or a folder cannot be used."""
    folder = HfFolder(source)
    preset = folder.describe()
    shape = shape_of(preset)
    dense, vocabulary = family_of(folder.config), folder.config["vocab_size"]
    if dense.model_type not in MOE_OF:
        known = ", ".join(MOE_OF)
        raise DataError(f"{source}: {dense.model_type} is no dense family; allowed: {known}")
    if problems := list(plan.problems(shape.ffn_hidden_size)):
        raise DataError("\n".join(problems))
    check_tied_copy(folder, checked_weights(folder, shape, vocabulary))
    family = FAMILIES[MOE_OF[dense.model_type]]
    moe = shape_of(preset, _expert_fields(family, plan, shape.ffn_hidden_size))
    config = _config(folder, family, moe)
    shapes = weight_map(family, moe, vocabulary).shapes
    origins = dict(_origins(dense, family, moe))
    tensors = {
        name: torch.empty(size, dtype=folder.dtype_of(origins[name].source), device="meta")
        for name, size in shapes.items()
    }
    with HfWriter(target, tensors) as writer:
        for number, (name, planned) in enumerate(tensors.items()):
            generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
            tensor = _tensor(folder, origins[name], planned.shape, plan, generator)
            if "shared_router" in family.names and origins[name].role == "expert_down":
                tensor = tensor / 2  # the shared expert adds the other half
            writer.write(name, tensor.to(planned.dtype))
        writer.finish()
        files = tokenizer_files(source)
        writer.publish({"config.json": config, **generation_files(files)}, files)


def _expert_fields(family: Family, plan: Plan, width: int) -> dict[str, object]:
    """Return fields of TransformerConfig. width: the width of the dense MLP."""
    fields = {
        **family.always,
        "num_moe_experts": plan.experts,
        "moe_router_topk": plan.top_k,
        "moe_ffn_hidden_size": width // plan.granularity,
        "moe_router_pre_softmax": False,  # the weights of the chosen experts add up to 1
    }
    if "shared_router" in family.names:
        fields["moe_shared_expert_intermediate_size"] = width
    return fields


def _config(folder: HfFolder, family: Family, shape: ModelShape) -> dict[str, object]:
    """Return config.json: the family's keys for this shape, and the dense model's special tokens.

    Raises DataError if the family has no such models."""
    made = family.config(shape, folder.config["vocab_size"])
    if made is None:
        config = folder.path / "config.json"
        raise DataError(f"{config}: {family.model_type}, its MoE family, has no such models")
    kept = [k for k in folder.config if k.endswith("_token_id") or k in ("dtype", "torch_dtype")]
    return made | {key: folder.config[key] for key in kept}


def _origins(dense: Family, moe: Family, shape: ModelShape) -> Iterator[tuple[str, Origin]]:
    """Yield the origin of every name that the new model may have."""
    score = {"score": SCORE_HEAD}  # of a preference model
    for role, template in {**moe.names, **score}.items():
        # a dense model has no router, so a router gets the dtype of its layer's MLP
        names = {**dense.names, **score}
        source = names.get(_COUNTERPARTS.get(role, role), names["gate"])
        layers = range(shape.num_layers if "{layer}" in template else 1)
        experts = range((shape.num_moe_experts or 0) if "{expert}" in template else 1)
        for layer, expert in itertools.product(layers, experts):
            name = template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            yield name, Origin(role, source.replace("{layer}", str(layer)), expert)


def _tensor(
    folder: HfFolder,
    origin: Origin,
    shape: Sequence[int],
    plan: Plan,
    generator: torch.Generator,
) -> Tensor:
    parts = plan.granularity
    if origin.role == "router":
        rows = torch.randn(plan.experts // parts, shape[1], generator=generator)
        return plan.router_std * rows.repeat_interleave(parts, dim=0)
    if origin.role == "shared_router":
        return torch.zeros(shape)
    tensor = folder.read(origin.source, [slice(0, n) for n in folder.tensors[origin.source].shape])
    part = _COUNTERPARTS.get(origin.role)
    if part is None:
        return tensor
    is_expert = origin.role.startswith("expert_")
    if is_expert:
        axis, scale = (1, parts) if part == "down" else (0, 1)
        tensor = tensor.chunk(parts, dim=axis)[origin.expert % parts] * scale
    if is_expert and plan.noise:
        noise = torch.randn(tensor.shape, generator=generator)
        tensor = tensor.float() + plan.noise * tensor.float().std() * noise
    return tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=Path, help="Hugging Face folder of a dense model")
    parser.add_argument("moe", type=Path, help="the new folder")
    parser.add_argument("--experts", type=int, required=True, metavar="N")
    parser.add_argument("--top-k", type=int, required=True, metavar="K")
    parser.add_argument(
        "--granularity", type=int, default=1, metavar="G", help="parts of an MLP (1: whole copies)"
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="added to each expert, in standard deviations of its tensor (0)",
    )
    parser.add_argument(
        "--router-std", type=float, default=0.02, metavar="X", help="of the random routers (0.02)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of routers and noise (1)")
    given = vars(parser.parse_args())
    source, target = given.pop("dense"), given.pop("moe")
    upcycle(source, target, Plan(**given))
    print(f"{target}: {given['experts']} experts, {given['top_k']} for each token")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
