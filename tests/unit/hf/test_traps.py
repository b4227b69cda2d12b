"""Easy mistakes in the description of a family, one at a time. The logits of the right model differ
from those of transformers by at most RIGHT; each mistake changes them by far more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.errors import ConfigError
from gspo_megatron.families import family, sigmoid_router
from gspo_megatron.families.rope import Rope
from gspo_megatron.models import latent_attention, router
from gspo_megatron.models.build import Policy
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import (
    CONFIGS,
    VOCABULARY,
    model_config,
    random_tensors,
    write_folder,
    write_model,
)
from tests.unit.hf.test_hf_models import YARN
from tests.unit.hf.transformers_side import ask, transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")
# the text is longer than the windows and than a chunk of a delta net
IDS = random.Random(7).choices(range(VOCABULARY), k=80)
RIGHT, WRONG = 5e-5, 1e-3  # for logits of size 3 to 5


def _plus_one(policy: Policy) -> None:
    """Mistake: 1 is added to the weight of the norm in delta nets. This is right for the weights of
    all other norms, which the files have as offsets to 1."""
    for name, parameter in policy.models[0].named_parameters():
        if name.endswith("out_norm.weight"):
            parameter += 1.0


def _router_bias_left_out(policy: Policy) -> None:
    for name, buffer in policy.models[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer.zero_()


DELTA, LATENT = CONFIGS["qwen3_next"], CONFIGS["deepseek_v3"]
# A function that changes the rows of a file, so that a right reader gets what a wrong reader would
# get from the original.
Misread = Callable[[Tensor], Tensor]


def _gates_after_all_queries(rows: Tensor) -> Tensor:
    """Mistake: all gates are expected after all queries. In the file, the gate of each head follows
    its query."""
    halves = rows.view(2, DELTA["num_attention_heads"], -1, rows.shape[1])
    return halves.transpose(0, 1).reshape(rows.shape)


def _heads_of_keys_not_apart(rows: Tensor) -> Tensor:
    """Mistake: the order of Qwen3.5 is expected, which has all queries, then all keys, and so on.
    Qwen3-Next's files keep together the parts of one key head."""
    keys = DELTA["linear_num_key_heads"]
    queries = keys * DELTA["linear_key_head_dim"]
    values = DELTA["linear_num_value_heads"] * DELTA["linear_value_head_dim"]
    parts = rows.split([queries, queries, values, values])
    return torch.cat([part.view(keys, -1, rows.shape[1]) for part in parts], 1).flatten(0, 1)


def _keys_in_halves(rows: Tensor) -> Tensor:
    """Mistake: channel i is rotated together with channel i + n / 2. In files of latent attention,
    neighbouring channels are rotated together."""
    latent, rotated = rows.split([LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]])
    return torch.cat((latent, rotated.view(2, -1, rows.shape[1]).transpose(0, 1).flatten(0, 1)))


@dataclass(frozen=True)
class Trap:
    family: str
    changes: dict[str, Any] = field(default_factory=dict)  # changes of the model's config.json
    fields: dict[str, Any] = field(default_factory=dict)  # wrong fields of TransformerConfig
    rope: dict[str, Any] = field(default_factory=dict)  # wrong fields, as keys of rope_scaling
    positions: dict[str, Any] = field(default_factory=dict)  # wrong fields of Rope
    constants: tuple[tuple[Any, str, float], ...] = ()  # wrong constants of modules
    # the function that misreads a tensor, by the end of the tensor's name
    misread: dict[str, Misread] = field(default_factory=dict)
    change: Callable[[Policy], None] = lambda policy: None

    def write_wrong(self, path: Path, changes: dict[str, Any]) -> Path:
        """Write the folder of the right model (seed 2), but with the tensors that a wrong reader
        would get."""
        config = model_config(self.family, **changes)
        tensors = random_tensors(config, seed=2)
        for name, rows in tensors.items():
            for end, misread in self.misread.items():
                if name.endswith(end):
                    tensors[name] = misread(rows).contiguous()
        return write_folder(path, config, tensors)


TRAPS = {
    "norms around 1 taken for norms around 0": Trap(
        "qwen3_next", fields={"layernorm_zero_centered_gamma": False}
    ),
    "the delta net's norm with 1 added": Trap("qwen3_next", change=_plus_one),
    "the delta net's norm with 1 added, Qwen3.5": Trap("qwen3_5_text", change=_plus_one),
    "YaRN without its part of the attention scale": Trap(
        "deepseek_v3",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        rope={"mscale_all_dim": 0.0},
    ),
    "missing keys of YaRN taken for 1": Trap(
        "deepseek_v3", {"rope_scaling": YARN}, rope={"mscale_all_dim": 1.0}
    ),
    "Megatron-Core's YaRN in a model without": Trap("deepseek_v3", rope={"rope_type": "yarn"}),
    "rotary positions on pairs of neighbours": Trap(
        "glm4_moe", fields={"rotary_interleaved": True}
    ),
    "rotary positions on all of a head": Trap("glm4_moe", positions={"percent": 1.0}),
    "no extension of Llama's context": Trap("llama", positions={"llama3_factor": None}),
    "latent keys rotated as two halves": Trap(
        "deepseek_v3", misread={"kv_a_proj_with_mqa.weight": _keys_in_halves}
    ),
    "norms of latents with the epsilon of the others": Trap(
        "deepseek_v3",
        constants=((latent_attention, "LATENT_EPSILON", LATENT["rms_norm_eps"]),),
    ),
    "weights of ERNIE's experts that do not sum up to 1": Trap(
        "ernie4_5_moe", constants=((router, "SMALLEST_SUM", 1.0),)
    ),
    "gates of attention after all queries": Trap(
        "qwen3_next", misread={"q_proj.weight": _gates_after_all_queries}
    ),
    "heads of a delta net not kept apart": Trap(
        "qwen3_next", misread={"in_proj_qkvz.weight": _heads_of_keys_not_apart}
    ),
    "rotary positions on two halves": Trap("ernie4_5_moe", fields={"rotary_interleaved": False}),
    "no factor of the experts": Trap("hy_v3", fields={"moe_router_topk_scaling_factor": None}),
    "no bias of the router": Trap("minimax_m2", change=_router_bias_left_out),
    "the router's bias left out of a softmax": Trap("ernie4_5_moe", change=_router_bias_left_out),
    "experts of all groups": Trap(
        "deepseek_v3", fields={"moe_router_num_groups": None, "moe_router_group_topk": None}
    ),
}


@pytest.fixture(scope="module")
def transformers_side() -> Iterator[ProcessPoolExecutor]:
    with transformers_process() as process:
        yield process


@pytest.mark.parametrize("name", TRAPS)
def test_a_mistake_shows(
    transformers_side: ProcessPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    trap = TRAPS[name]
    changes = {"max_position_embeddings": 512} | trap.changes
    folder = write_model(tmp_path / "model", trap.family, seed=2, **changes)
    expected = logits_by_transformers(transformers_side, folder)
    assert error(policy_of(config_of(folder)), expected) < RIGHT
    native = family.read_rope

    def read_rope(*args: Any) -> tuple[Rope, list[str]]:
        rope, problems = native(*args)
        return replace(rope, megatron={**rope.megatron, **trap.rope}, **trap.positions), problems

    monkeypatch.setattr(family, "read_rope", read_rope)
    for module, constant, value in trap.constants:
        monkeypatch.setattr(module, constant, value)
    again = trap.write_wrong(tmp_path / "again", changes)
    wrong = policy_of(config_of(again, **trap.fields))
    with torch.no_grad():
        trap.change(wrong)
    assert error(wrong, expected) > WRONG


def logits_by_transformers(process: ProcessPoolExecutor, folder: Path) -> Tensor:
    answer = process.submit(ask, folder, IDS, [], count=0).result()
    assert not answer.complaints
    return answer.logits


def error(policy: Policy, expected: Tensor) -> float:
    return float((logits_of(policy, IDS) - expected).abs().max())


def test_groups_of_which_not_two_experts_count(
    transformers_side: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published models sum the best two experts of each group, but Megatron-Core would sum
    three here. Such a model is refused, with the reason."""
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 6}
    folder = write_model(tmp_path / "model", "deepseek_v3", seed=2, **sizes)
    with pytest.raises(ConfigError, match="num_experts_per_tok = 6"):
        config_of(folder).resolved_model()
    monkeypatch.setattr(sigmoid_router.Groups, "problems", lambda *_: [])
    policy = policy_of(config_of(folder))
    assert error(policy, logits_by_transformers(transformers_side, folder)) > WRONG
