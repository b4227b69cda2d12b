"""The tests of the map notice each single mistake in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from gspo_megatron.checkpoint.hf import load
from gspo_megatron.checkpoint.hf.export import export_hf
from gspo_megatron.checkpoint.hf.load import weight_shards
from tests.unit.checkpoint.hf.mistakes import MISTAKES, mistaken
from tests.unit.checkpoint.hf.policies import config_of, logits_of, policy_of
from tests.unit.checkpoint.hf.published import assert_same_bits, read_folder, write_model
from tests.unit.checkpoint.hf.test_hf_models import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_rank")

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "source", "qwen3_moe", seed=5)


@pytest.fixture(scope="module")
def right_logits(source: Path, one_rank: None) -> Tensor:
    return logits_of(policy_of(config_of(source)), IDS)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("side", ["importing", "exporting"])
def test_a_mistake_on_one_side_changes_bits(
    tmp_path: Path, source: Path, name: str, side: str
) -> None:
    with mistaken(name, importing=side == "importing", exporting=side == "exporting"):
        policy = policy_of(config_of(source))
        original = json.loads((source / "config.json").read_text())
        export_hf(policy, tmp_path / "again", hf_config=original)
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_both_sides_changes_the_function(
    tmp_path: Path, source: Path, right_logits: Tensor, name: str
) -> None:
    with mistaken(name, importing=True, exporting=True):
        policy = policy_of(config_of(source))
        original = json.loads((source / "config.json").read_text())
        export_hf(policy, tmp_path / "again", hf_config=original)
    assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))  # it cancels out
    assert (logits_of(policy, IDS) - right_logits).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", ["norm", "expert", "embedding"])
def test_a_tensor_left_out_is_noticed(
    tmp_path: Path, source: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: dict[str, Callable[[str], bool]] = {
        "norm": lambda name: name.endswith("2.self_attention.k_layernorm.weight"),
        "expert": lambda name: name.endswith("3.mlp.experts.weight2[5]"),
        "embedding": lambda name: name == "embedding.word_embeddings.weight",
    }
    monkeypatch.setattr(
        load,
        "weight_shards",
        lambda *args: [s for s in weight_shards(*args) if not left_out[kind](s.name)],
    )
    policy = policy_of(config_of(source))
    export_hf(policy, tmp_path / "again")
    with pytest.raises(AssertionError):
        assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))
