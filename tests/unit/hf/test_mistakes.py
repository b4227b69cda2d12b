"""The tests of the map notice each single mistake in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gspo_megatron.hf import load
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.load import weight_shards
from gspo_megatron.models.build import Policy
from gspo_megatron.models.shards import Shard
from tests.unit.hf.mistakes import MISTAKES, mistaken
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import assert_same_bits, read_folder, write_model
from tests.unit.hf.test_hf_models import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_rank")

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "source", "qwen3_moe", seed=5)


@pytest.fixture(scope="module")
def right_logits(source: Path, one_rank: None) -> Tensor:
    return logits_of(policy_of(config_of(source)), IDS)


def exported(source: Path, target: Path, name: str, **sides: bool) -> Policy:
    """The policy that was imported, and then exported to `target`."""
    with mistaken(name, **sides):
        policy = policy_of(config_of(source))
        export_hf(policy, target, hf_config=json.loads((source / "config.json").read_text()))
    return policy


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_side_changes_bits(tmp_path: Path, source: Path, name: str) -> None:
    exported(source, tmp_path / "again", name, importing=False, exporting=True)
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_both_sides_changes_the_function(
    tmp_path: Path, source: Path, right_logits: Tensor, name: str
) -> None:
    policy = exported(source, tmp_path / "again", name, importing=True, exporting=True)
    assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))  # it cancels out
    assert (logits_of(policy, IDS) - right_logits).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize(
    "left_out",
    [
        "2.self_attention.k_layernorm.weight",
        "3.mlp.experts.weight2[5]",
        "embedding.word_embeddings.weight",
    ],
)
def test_a_tensor_left_out_is_noticed(
    tmp_path: Path, source: Path, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_others(*arguments: Any) -> list[Shard]:
        return [s for s in weight_shards(*arguments) if not s.name.endswith(left_out)]

    monkeypatch.setattr(load, "weight_shards", all_others)
    policy = policy_of(config_of(source))
    export_hf(policy, tmp_path / "again")
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))
