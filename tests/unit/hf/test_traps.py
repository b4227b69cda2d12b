"""What is easily done wrong with a family, one thing at a time: each shows in the logits, far above
the tolerance that the right model keeps against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.families import family
from gspo_megatron.families.rope import Rope
from gspo_megatron.models.build import Policy
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import VOCABULARY, write_model
from tests.unit.hf.test_hf_models import YARN
from tests.unit.hf.transformers_side import ask, transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")
IDS = random.Random(7).choices(range(VOCABULARY), k=80)  # beyond windows and a chunk
RIGHT, WRONG = 5e-5, 1e-3  # of logits of size 3 to 5


def _plus_one(policy: Policy) -> None:
    """The norm of delta nets is published as it is; Megatron-Core adds 1 to all norms."""
    for name, parameter in policy.models[0].named_parameters():
        if name.endswith("out_norm.weight"):
            parameter += 1.0


def _router_bias_left_out(policy: Policy) -> None:
    for name, buffer in policy.models[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer.zero_()


@dataclass(frozen=True)
class Trap:
    family: str
    changes: dict[str, Any] = field(default_factory=dict)  # of its config.json
    fields: dict[str, Any] = field(default_factory=dict)  # of TransformerConfig, wrong ones
    rope: dict[str, Any] = field(default_factory=dict)  # the same, as rope_scaling gives them
    change: Callable[[Policy], None] = lambda policy: None


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
    folder, again = (
        write_model(tmp_path / part, trap.family, seed=2, **changes) for part in ("model", "again")
    )
    answer = transformers_side.submit(ask, folder, IDS, [], count=0).result()
    assert not answer.complaints

    def error(policy: Policy) -> float:
        return float((logits_of(policy, IDS) - answer.logits).abs().max())

    assert error(policy_of(config_of(folder))) < RIGHT
    native = family.read_rope

    def read_rope(*args: Any) -> tuple[Rope, list[str]]:
        rope, problems = native(*args)
        return replace(rope, megatron={**rope.megatron, **trap.rope}), problems

    monkeypatch.setattr(family, "read_rope", read_rope)
    wrong = policy_of(config_of(again, **trap.fields))
    with torch.no_grad():
        trap.change(wrong)
    assert error(wrong) > WRONG
