"""gpt-oss compared with transformers, on texts longer than its window and longer than the context
from which YaRN extends. Further tests plant easy mistakes, and show that the comparison notices
each mistake."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.families import weight_map as maps
from gspo_megatron.families.weight_map import Box, TensorRecipe
from gspo_megatron.models.build import Policy
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import VOCABULARY, write_model
from tests.unit.hf.transformers_side import ask, transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")
# As in the published models, the matrices of experts are square, so no shape reveals a wrong order.
SQUARE = {"hidden_size": 32, "intermediate_size": 32}
LENGTH = 70  # longer than the window of 6 tokens and than the 8 tokens from which YaRN extends
IDS = random.Random(5).choices(range(VOCABULARY), k=LENGTH)


@dataclass
class Compared:
    folder: Path
    logits: Tensor  # [LENGTH, vocabulary] by transformers

    def error(self, policy: Policy) -> float:
        return float((logits_of(policy, IDS) - self.logits).abs().max())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = write_model(tmp_path_factory.mktemp("gpt_oss") / "model", "gpt_oss", seed=2, **SQUARE)
    with transformers_process() as process:
        answer = process.submit(ask, folder, IDS, [], count=0).result()
    assert not answer.complaints
    return Compared(folder, answer.logits)


def test_logits_beyond_both_windows(compared: Compared) -> None:
    assert compared.error(policy_of(config_of(compared.folder))) < 2e-5


WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "a window of one more token": {"window_size": [6, 0]},
    "odd layers are full": {"window_attn_skip_freq": [0, 1, 0, 1]},
    "no offset of the up half": {"glu_linear_offset": 0.0},
    "no limit": {"activation_func_clamp_value": None},
    "another activation": {"activation_func": "silu"},
    "a softmax over all experts": {"moe_router_pre_softmax": True},
}


@pytest.mark.parametrize("mistake", WRONG_FIELDS)
def test_a_wrong_field_shows(compared: Compared, mistake: str) -> None:
    policy = policy_of(config_of(compared.folder, **WRONG_FIELDS[mistake]))
    assert compared.error(policy) > 1e-2


def _without(*parts: str) -> Callable[[Policy], None]:
    def change(policy: Policy) -> None:
        for name, parameter in policy.models[0].named_parameters():
            if name.endswith(parts):
                parameter.fill_(-1e9 if "softmax_offset" in parts else 0.0)

    return change


def _rounded(policy: Policy) -> None:
    rotary = policy.models[0].rotary_pos_emb
    rotary.correction_range_round_to_int = True
    rotary.forward.cache_clear()


def _no_concentration(policy: Policy) -> None:
    policy.config.yarn_mscale, policy.config.yarn_mscale_all_dim = 1.0, 1.0
    # Changing the config is not enough, because Megatron-Core 0.19 reads the two values of mscale
    # when it builds a layer.
    for layer in policy.models[0].decoder.layers:
        layer.self_attention._yarn_concentration_factor = 1.0


CHANGES: dict[str, Callable[[Policy], None]] = {
    "no sinks": _without("softmax_offset"),
    "no bias of the router": _without("router.bias"),
    "no bias of the output projection": _without("linear_proj.bias"),
    "no second bias of experts": _without("experts.bias2"),
    "rounded bounds of YaRN": _rounded,
    "no factor of YaRN": _no_concentration,
}


@pytest.mark.parametrize("mistake", CHANGES)
def test_a_part_left_out_shows(compared: Compared, mistake: str) -> None:
    policy = policy_of(config_of(compared.folder))
    with torch.no_grad():
        CHANGES[mistake](policy)
    assert compared.error(policy) > 1e-3


def _halves_apart(box: Box) -> Box:
    """Put all gate rows before all up rows. In the file, they alternate."""
    if box.step == 1:
        return box
    *rest, half = box.source
    return replace(box, source=(*rest, half * SQUARE["intermediate_size"]), step=1)


def _halves_swapped(box: Box) -> Box:
    *rest, last = box.source
    return box if box.step == 1 else replace(box, source=(*rest, 1 - last))


def _not_transposed(box: Box) -> Box:
    return replace(box, axes=None) if "down_proj" in box.name else box


@pytest.mark.parametrize("mistake", [_halves_apart, _halves_swapped, _not_transposed])
def test_another_order_of_the_experts_elements_shows(
    compared: Compared, mistake: Callable[[Box], Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = maps._interleaved_experts

    def mistaken(*args: Any) -> dict[str, TensorRecipe]:
        return {
            name: TensorRecipe(recipe.shape, tuple(map(mistake, recipe.boxes)))
            for name, recipe in native(*args).items()
        }

    monkeypatch.setattr(maps, "_interleaved_experts", mistaken)
    assert compared.error(policy_of(config_of(compared.folder))) > 1e-2
