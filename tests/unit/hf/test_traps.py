"""Easy mistakes in the description of a family, one at a time. The logits of the right model equal
those of transformers; each mistake changes them by far more than any rounding."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
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
WRONG = 1e-3  # the least error of a mistake, for logits of size 3 to 5


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


def _without(*parts: str) -> Callable[[Policy], None]:
    """Mistake: parameters are left out, by the ends of their names."""

    def change(policy: Policy) -> None:
        for name, parameter in policy.models[0].named_parameters():
            if name.endswith(parts):
                parameter.fill_(-1e9 if "softmax_offset" in parts else 0.0)

    return change


def _rounded(policy: Policy) -> None:
    rotary = policy.models[0].rotary_pos_emb.stock
    rotary.correction_range_round_to_int = True
    rotary.forward.cache_clear()


def _no_concentration(policy: Policy) -> None:
    policy.config.yarn_mscale, policy.config.yarn_mscale_all_dim = 1.0, 1.0
    # Changing the config is not enough, because Megatron-Core 0.19 reads the two values of mscale
    # when it builds a layer.
    for layer in policy.models[0].decoder.layers:
        layer.self_attention._yarn_concentration_factor = 1.0


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


def _halves_apart(columns: Tensor) -> Tensor:
    """Mistake: all gate columns are expected before all up columns. In the file, they alternate."""
    return columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _halves_swapped(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


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
    right: float = 5e-5  # the largest error of the right model
    wrong: float = WRONG

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


# The matrices of gpt-oss's experts are square, as in the published models, so no shape reveals a
# wrong order.
_SQUARE = {"hidden_size": 32, "intermediate_size": 32}
_gpt_oss = functools.partial(Trap, "gpt_oss", _SQUARE, right=2e-5)

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
    "a window of one more token": _gpt_oss(fields={"window_size": [6, 0]}, wrong=1e-2),
    "odd layers are full": _gpt_oss(fields={"window_attn_skip_freq": [0, 1, 0, 1]}, wrong=1e-2),
    "no offset of the up half": _gpt_oss(fields={"glu_linear_offset": 0.0}, wrong=1e-2),
    "no limit": _gpt_oss(fields={"activation_func_clamp_value": None}, wrong=1e-2),
    "another activation": _gpt_oss(fields={"activation_func": "silu"}, wrong=1e-2),
    "a softmax over all experts": _gpt_oss(fields={"moe_router_pre_softmax": True}, wrong=1e-2),
    "no sinks": _gpt_oss(change=_without("softmax_offset")),
    "no bias of a softmax router": _gpt_oss(change=_without("router.bias")),
    "no bias of the output projection": _gpt_oss(change=_without("linear_proj.bias")),
    "no second bias of experts": _gpt_oss(change=_without("experts.bias2")),
    "rounded bounds of YaRN": _gpt_oss(change=_rounded),
    "no factor of YaRN": _gpt_oss(change=_no_concentration),
    "gate columns before up columns": _gpt_oss(
        misread={"gate_up_proj": _halves_apart, "gate_up_proj_bias": _halves_apart}, wrong=1e-2
    ),
    "up columns before gate columns": _gpt_oss(
        misread={"gate_up_proj": _halves_swapped, "gate_up_proj_bias": _halves_swapped}, wrong=1e-2
    ),
    "matrices of experts not transposed": _gpt_oss(
        misread={"down_proj": lambda rows: rows.mT}, wrong=1e-2
    ),
}


Expected = Callable[..., tuple[Path, Tensor]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Expected]:
    """A function that returns the folder of a right model, and the logits that transformers
    computes with it."""
    found: dict[str, tuple[Path, Tensor]] = {}
    with transformers_process() as process:

        def compute(family: str, **changes: Any) -> tuple[Path, Tensor]:
            key = f"{family} {changes}"
            if key not in found:
                folder = tmp_path_factory.mktemp("right") / "model"
                write_model(folder, family, seed=2, **changes)
                answer = process.submit(ask, folder, IDS, [], count=0).result()
                assert not answer.complaints
                found[key] = folder, answer.logits
            return found[key]

        yield compute


def error(policy: Policy, logits: Tensor) -> float:
    return float((logits_of(policy, IDS) - logits).abs().max())


@functools.cache
def error_of_right(folder: Path, logits: Tensor) -> float:
    return error(policy_of(config_of(folder)), logits)


@pytest.mark.parametrize("name", TRAPS)
def test_a_mistake_shows(
    expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trap = TRAPS[name]
    changes = {"max_position_embeddings": 512} | trap.changes
    folder, logits = expected(trap.family, **changes)
    assert error_of_right(folder, logits) < trap.right
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
    assert error(wrong, logits) > trap.wrong


def test_groups_of_which_not_two_experts_count(
    expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published models sum the best two experts of each group, but Megatron-Core would sum
    three here. Such a model is refused, with the reason."""
    folder, logits = expected("deepseek_v3", n_routed_experts=16, num_experts_per_tok=6)
    with pytest.raises(ConfigError, match="num_experts_per_tok = 6"):
        config_of(folder).resolved_model()
    monkeypatch.setattr(sigmoid_router.Groups, "problems", lambda *_: [])
    assert error(policy_of(config_of(folder)), logits) > WRONG
