"""The contents that a folder must have for a model, and the parts of the folder that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import resolve_parallel
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.files import HfFolder, checked_folder
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy, build_policy
from tests.unit.hf.policies import config_of, policy_of
from tests.unit.hf.published import (
    VOCABULARY,
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    write_folder,
    write_model,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def _random_policy(folder: Path, dtype: str = "float32", **megatron: Any) -> Policy:
    config = config_of(folder, dtype, **megatron)
    return build_policy(config, resolve_parallel(config, 1), VOCABULARY)


def _weights(policy: Policy) -> list[Tensor]:
    return [p.detach().clone() for model in policy.models for p in model.parameters()]


def test_all_that_is_wrong_is_said_and_nothing_changed(tmp_path: Path) -> None:
    config = model_config("qwen3_moe")
    tensors = random_tensors(config, seed=1)
    policy = _random_policy(write_folder(tmp_path / "good", config, tensors))
    before = _weights(policy)
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(6, 44)  # this layer is dense
    tensors["model.norm.bias"] = torch.zeros(44)
    name = "model.layers.3.self_attn.o_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    tensors["lm_head.weight"] = torch.zeros(VOCABULARY, 44, dtype=torch.int32)
    bad = write_folder(tmp_path / "bad", config, tensors)
    with pytest.raises(DataError) as error:
        load_hf(bad, policy)
    assert sorted(str(error.value).splitlines()) == sorted(
        [
            f"{bad}: model.layers.2.self_attn.q_norm.weight is missing",
            f"{bad}: model.layers.0.mlp.experts.3.up_proj.weight is missing",
            f"{bad}: {name} has the shape [60, 44]; config.json says [44, 60]",
            f"{bad}: lm_head.weight has the dtype I32; allowed: BF16, F16, F32, F64",
            f"{bad}: model.layers.1.mlp.gate.weight is no part of the model that config.json "
            "describes",
            f"{bad}: model.norm.bias is no part of the model that config.json describes",
        ]
    )
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(policy), strict=True))


def test_of_very_many_missing_tensors_some_are_named_and_all_counted(tmp_path: Path) -> None:
    """The list of missing tensors is cut, so that other problems are still shown."""
    policy = _random_policy(write_model(tmp_path / "one", "qwen3_moe", seed=1))
    config = model_config("qwen3_moe")
    name = "model.layers.0.input_layernorm.weight"
    few = {name: torch.zeros(3), **{f"more.{n}": torch.zeros(1) for n in range(30)}}
    bad = write_folder(tmp_path / "few", config, few)
    with pytest.raises(DataError) as error:
        load_hf(bad, policy)
    lines = str(error.value).splitlines()
    assert len(lines) == 10 + 1 + 1 + 10 + 1
    assert sum(line.endswith(" is missing") for line in lines) == 10
    missing = len(random_tensors(config, seed=1)) - 1
    assert f"{bad}: ... and {missing - 10} more" in lines
    assert f"{bad}: {name} has the shape [3]; config.json says [44]" in lines
    assert lines[-1] == f"{bad}: ... and 20 more"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (  # the same shapes of tensors as the policy, but other numbers of heads
            {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
             "tie_word_embeddings": True},
            ["tie_embeddings is true, and false in the model",
             "megatron.num_attention_heads is 3, and 6 in the model",
             "megatron.num_query_groups is 1, and 2 in the model",
             "megatron.kv_channels is 20, and 10 in the model"],
        ),
        ({"vocab_size": 41}, ["vocab_size is 41, and 37 in the model"]),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_what_differs(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    policy = _random_policy(write_model(tmp_path / "one", "qwen3_moe", seed=1))
    other = write_model(tmp_path / "other", "qwen3_moe", seed=1, **changes)
    with pytest.raises(DataError) as error:
        load_hf(other, policy)
    file = other / "config.json"
    assert str(error.value).splitlines() == [f"{file}: {line}" for line in expected]


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "qwen3", seed=1)
    policy = _random_policy(folder)
    config = model_config("qwen3", architectures=["Zamba2ForCausalLM"], model_type="zamba2")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="Zamba2ForCausalLM.*not supported; supported: Qwen3"):
        load_hf(folder, policy)


def test_code_of_a_published_folder_is_ignored_where_asked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "deepseek_v3", seed=1)
    published = model_config("deepseek_v3", auto_map={"AutoConfig": "own.Config"})
    (folder / "config.json").write_text(json.dumps(published))
    policy = _random_policy(folder)
    with pytest.raises(DataError, match=r"model\.ignore_custom_code = true \(for convert: --ig"):
        load_hf(folder, policy)
    load_hf(folder, policy, ignore_custom_code=True)
    export_hf(policy, tmp_path / "again", hf_config=published)
    assert_same_bits(read_folder(tmp_path / "again"), read_folder(folder))
    load_hf(tmp_path / "again", policy)  # the export names no custom code


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_embedding_may_be_there_twice(tmp_path: Path, same: bool) -> None:
    config = model_config("qwen3", tie_word_embeddings=True)
    tensors = random_tensors(config, seed=2)
    copy = tensors["model.embed_tokens.weight"].clone()
    if not same:
        copy[36, 43] += 1
    folder = write_folder(tmp_path / "tied", config, tensors | {"lm_head.weight": copy})
    if same:
        policy = policy_of(config_of(folder))
        export_hf(policy, tmp_path / "again")
        assert "lm_head.weight" not in read_folder(tmp_path / "again")
        return
    with pytest.raises(DataError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        policy_of(config_of(folder))


def test_constants_of_old_folders_are_not_read(tmp_path: Path) -> None:
    config = model_config("mixtral")
    tensors = random_tensors(config, seed=2)
    tensors["model.layers.2.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    policy_of(config_of(write_folder(tmp_path / "old", config, tensors)))


def test_values_become_the_models_dtype_and_padding_zero(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "qwen3_moe", seed=3, files=1)
    policy = _random_policy(folder, "bfloat16")
    for parameter in policy.models[0].parameters():
        parameter.detach().fill_(float("nan"))
    load_hf(folder, policy)
    named = dict(policy.models[0].named_parameters())
    embedding = named["embedding.word_embeddings.weight"]
    published = read_folder(folder)["model.embed_tokens.weight"]
    assert torch.equal(embedding[:VOCABULARY], published.bfloat16())
    assert embedding.shape[0] == 48 and not embedding[VOCABULARY:].any()
    assert not any(parameter.isnan().any() for parameter in named.values())


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "one", "qwen2_moe", seed=3)
    policy = _random_policy(folder)
    elements: dict[str, int] = {}
    native = HfFolder.read

    def counted(self: HfFolder, name: str, slices: Any = None) -> Tensor:
        tensor = native(self, name, slices)
        elements[name] = elements.get(name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(HfFolder, "read", counted)
    load_hf(folder, policy)
    assert elements == {name: tensor.numel() for name, tensor in read_folder(folder).items()}


def test_names_of_transformer_engine_and_of_checkpoints(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "qwen3_moe", seed=3)
    shape = config_of(folder).resolved_model()
    _, weights = checked_folder(folder, shape, VOCABULARY)
    experts = "decoder.layers.0.mlp.experts."
    stacked = weights[f"{experts}weight1"]
    assert stacked.shape == (6, 2, 28, 44)
    assert weights[f"{experts}weight2"].shape == (6, 44, 28)
    fused = weights[f"{experts}experts.linear_fc1.weight"]
    assert fused.shape == (6, 56, 44)
    assert weights[f"{experts}experts.linear_fc1.weight[4]"].shape == (56, 44)
    assert weights[f"{experts}experts.linear_fc2.weight[4]"].shape == (44, 28)
    up = "model.layers.0.mlp.experts.4.up_proj.weight"
    assert {box.name: box.target for box in fused.boxes}[up] == (4, 28, 0)
    assert {box.name: box.target for box in stacked.boxes}[up] == (4, 1, 0, 0)
    for fused_name, name in (
        ("0.self_attention.linear_qkv.layer_norm_weight", "0.input_layernorm.weight"),
        ("1.mlp.linear_fc1.layer_norm_weight", "1.pre_mlp_layernorm.weight"),
    ):
        assert weights[f"decoder.layers.{fused_name}"] is weights[f"decoder.layers.{name}"]
    with pytest.raises(KeyError):
        weights["decoder.layers.4.input_layernorm.weight"]


def test_a_model_that_no_family_has_cannot_be_exported(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "qwen3_moe", seed=3)
    with pytest.raises(ConfigError) as error:
        export_hf(_random_policy(folder, add_qkv_bias=True), tmp_path / "export")
    assert "qwen3_moe: add_qkv_bias" in str(error.value).splitlines()
    assert not (tmp_path / "export").exists()
