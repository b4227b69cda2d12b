"""config.json of published models: reading it into our fields, and writing it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import PRESETS, ModelShape, check_config, parse_config
from gspo_megatron.errors import ConfigError
from gspo_megatron.families import FAMILIES, describe, family_of, family_of_shape
from gspo_megatron.families.model_shape import shape_of, windows_in_layers
from tests.unit.families.test_published_sizes import PUBLISHED
from tests.unit.hf.published import CONFIGS, model_config

# The config of Qwen/Qwen3-30B-A3B, with further keys of its config.json.
QWEN3_30B_A3B: dict[str, Any] = PUBLISHED["Qwen3-30B-A3B"][0] | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",  # one of the many keys that say nothing about the shape
    "use_sliding_window": False,
}


def shape(hf: dict[str, Any]) -> ModelShape:
    return shape_of(describe(hf))


def problems(hf: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        describe(hf)
    return error.value.problems


def test_the_preset_is_the_published_model() -> None:
    assert shape(QWEN3_30B_A3B) == shape_of(PRESETS["qwen3-30b-a3b"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models_of_a_family(name: str) -> None:
    ours = replace(shape_of(PRESETS[name]), vocab_size=45)
    family = family_of_shape(ours)
    assert family.model_type == "qwen3_moe"
    written = family.config(ours, 45)
    assert written is not None
    assert shape(written) == ours


def test_mixtral() -> None:
    hf = {key: value for key, value in CONFIGS["mixtral"].items() if key != "head_dim"}
    found = shape(hf | {"hidden_size": 60})
    assert (found.kv_channels, found.num_query_groups) == (10, 2)
    assert (found.moe_ffn_hidden_size, found.num_moe_experts) == (52, 6)
    megatron = found.megatron
    assert megatron["moe_router_pre_softmax"] is False and megatron["qk_layernorm"] is False
    assert megatron["moe_aux_loss_coeff"] == 0.002 and found.rotary_base == 300.0
    old = {key: value for key, value in hf.items() if key not in ("rope_theta", "rms_norm_eps")}
    assert shape(old).megatron["layernorm_epsilon"] == 1e-5 and shape(old).rotary_base == 1e6


@pytest.mark.parametrize(
    ("changes", "frequency"),
    [
        ({}, None),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1, 0]),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], frequency: list[int] | None) -> None:
    hf = QWEN3_30B_A3B | {"num_hidden_layers": 5} | changes
    found = shape(hf)
    assert found.megatron.get("moe_layer_freq") == frequency
    written = family_of(hf).config(found, 151936)
    assert written is not None
    assert shape(written) == found


@pytest.mark.parametrize("none", [0, None])
def test_no_experts_at_all_are_a_dense_model(none: int | None) -> None:
    sizes = {"num_experts": none, "num_experts_per_tok": none, "moe_intermediate_size": none}
    found = shape(QWEN3_30B_A3B | {"num_hidden_layers": 2} | sizes)
    assert found.num_moe_experts is None


def test_no_layer_with_experts_is_a_dense_model() -> None:
    found = shape(QWEN3_30B_A3B | {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]})
    assert found.num_moe_experts is None
    assert not [name for name in found.megatron if name.startswith("moe_")]
    assert family_of_shape(found).model_type == "qwen3"


@pytest.mark.parametrize("family", ["hy_v3", "bailing_moe_v2"])
def test_no_experts_in_a_family_with_dense_layers_first(family: str) -> None:
    assert shape(model_config(family, num_experts=0)).num_moe_experts is None


def test_both_spellings_of_the_rotary_base() -> None:
    hf = dict(QWEN3_30B_A3B)
    del hf["rope_theta"], hf["rope_scaling"]
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert shape(hf).rotary_base == 5e5
    del hf["rope_parameters"]
    assert shape(hf).rotary_base == 1e4  # transformers' default


def test_what_transformers_takes_for_a_missing_key() -> None:
    hf = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("norm_topk_prob", "head_dim")}
    found = shape(hf)
    assert found.megatron["moe_router_pre_softmax"] is True
    assert found.kv_channels == 2048 // 32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type = 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size: required"),
        ({"vocab_size": -5}, "vocab_size: required"),
        ({"hidden_size": None}, "hidden_size = null: must be an integer from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be an integer from 1"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads = '4': must be an integer from 0"),
        ({"num_key_value_heads": 7}, "num_key_value_heads = 7: must divide num_attention_heads"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129: must be at most num_experts ="),
        ({"head_dim": 1.5}, "head_dim = 1.5: must be an integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': must be a number"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings = 'x': must be an integer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': must be true or false"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false': must be true or false"),
        ({"use_sliding_window": 0}, "use_sliding_window = 0: must be true or false"),
    ],
)
def test_options_that_cannot_be_done_are_named(changes: dict[str, Any], named: str) -> None:
    [line] = problems(QWEN3_30B_A3B | changes)
    assert named in line


def test_a_window_whose_size_is_left_to_transformers_is_refused() -> None:
    hf = {key: value for key, value in QWEN3_30B_A3B.items() if key != "sliding_window"}
    describe(hf)
    [line] = problems(hf | {"use_sliding_window": True})
    assert line.startswith("use_sliding_window = true: there is no sliding_window; allowed: false")
    describe(hf | {"use_sliding_window": True, "sliding_window": None})


ONE_EXPERT = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
SIGMOIDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3", "minimax_m2")
YARN: dict[str, Any] = CONFIGS["gpt_oss"]["rope_scaling"]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"num_local_experts": None}, "num_local_experts = null: must be an integer"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank = null: must be an integer from 1"),
        ("deepseek_v3", {"n_shared_experts": "x"}, "n_shared_experts = 'x': must be an integer"),
        ("deepseek_v3", {"first_k_dense_replace": "x"}, "first_k_dense_replace = 'x': must be an"),
        ("qwen3_next", {"linear_conv_kernel_dim": "x"}, "linear_conv_kernel_dim = 'x'"),
        ("qwen3_next", {"linear_num_value_heads": "x"}, "linear_num_value_heads = 'x': must be"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads = 0: must be an integer"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval = 0: must be an"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be an integer"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval = 0: must be an integer"),
        ("ernie4_5_moe", {"moe_num_shared_experts": -1}, "moe_num_shared_experts = -1: must be"),
        ("glm4_moe", {"attention_bias": "false"}, "attention_bias = 'false': must be true or"),
        (
            "gpt_oss",
            {"rope_scaling": {**YARN, "truncate": "no"}},
            "rope_scaling.truncate = 'no': must",
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = null: must be an integer from 1"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window = 0"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention"]},
            "layer_types = ['full_attention']: must be",
        ),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5: not supported; allowed: 1.702"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = false"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "allowed: quant_method = mxfp4",
        ),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method = fp8"),
        ("deepseek_v3", {"num_experts_per_tok": 8}, "num_experts_per_tok = 8"),
        (
            "deepseek_v3",
            {"n_group": 0},
            "n_group = 0: must divide n_routed_experts = 8 into groups",
        ),
        ("deepseek_v3", {"n_group": "4"}, "n_group = '4': must divide n_routed_experts = 8"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3: must divide n_routed_experts = 8"),
        ("deepseek_v3", {"n_group": 8}, "n_group = 8: must divide n_routed_experts = 8"),
        ("deepseek_v3", {"topk_group": 0}, "topk_group = 0: must be an integer from 1 to n_group"),
        ("deepseek_v3", {"topk_group": None}, "topk_group = null: must be an integer from 1"),
        (
            "deepseek_v3",
            {"topk_group": 5, "num_experts_per_tok": 10, "n_routed_experts": 16},
            "topk_group = 5: must be an integer from 1 to n_group",
        ),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn"}}, "factor = null"),
        ("deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'"),
        (
            "minimax_m2",
            {"partial_rotary_factor": 0.25},
            "rotary_dim = 6, but partial_rotary_factor = 0.25",
        ),
        (
            "minimax_m2",
            {"rotary_dim": 14},
            "rotary_dim = 14: must be an integer from 1 to head_dim (12)",
        ),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("bailing_moe_v2", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6"),
        ("bailing_moe_v2", {"n_group": 3}, "n_group = 3: must divide num_experts = 8 into groups"),
        ("bailing_moe_v2", {"use_bias": True}, "use_bias = true"),
        ("bailing_moe_v2", {"score_function": "softmax"}, "score_function = 'softmax'"),
        (
            "bailing_moe_v2",
            {"moe_shared_expert_intermediate_size": 56},
            "moe_shared_expert_intermediate_size = 56",
        ),
        # 6 of 12 channels are rotated
        ("bailing_moe_v2", {"rotary_dim": 3}, "rotary_dim = 3, but partial_rotary_factor = 0.5"),
        *((name, ONE_EXPERT, "num_experts_per_tok = 1: Megatron-Core") for name in SIGMOIDS),
        # vision-language models have a list here
        ("ernie4_5_moe", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index = [1, 1]"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("hy_v3", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_a_family_cannot_do_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    describe(model_config(family))
    [line] = problems(model_config(family, **changes))
    assert named in line


def test_all_of_them_at_once() -> None:
    hf = {k: v for k, v in QWEN3_30B_A3B.items() if k != "hidden_size"}
    assert len(problems(hf | {"attention_bias": True, "partial_rotary_factor": 0.5})) == 3
    assert len(problems(model_config("deepseek_v3", n_group=0, topk_group=0))) == 2


@pytest.mark.parametrize(
    ("hf", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3"}, "Gemma3ForCausalLM"),
        ({"architectures": ["Qwen3MoeForRewards"], "model_type": "qwen3_moe"}, "ForRewards"),
        # Ling 1, whose model_type is that of Ling 2
        (
            {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"},
            "BailingMoeForCausalLM",
        ),
        ({"model_type": "zamba2"}, "zamba2"),
        ({}, "null"),
        ({"architectures": [["x"]], "model_type": ["x"]}, "[['x']]"),
    ],
)
def test_unknown_architectures_are_named(hf: dict[str, Any], named: str) -> None:
    [line] = problems(hf)
    assert named in line and line.startswith("architectures = ")
    assert ": not supported; supported: Qwen3MoeForCausalLM, " in line


def test_a_family_of_another_kind_of_layers_is_refused_with_the_reason() -> None:
    hf = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    [line] = problems(hf)
    assert line.startswith("architectures = ['NemotronHForCausalLM']: not supported, its Mamba ")
    assert "; supported: Qwen3MoeForCausalLM, " in line


def test_deepseeks_options() -> None:
    hf = CONFIGS["deepseek_v3"] | {"first_k_dense_replace": 3}
    found = shape(hf)
    assert found.megatron["moe_layer_freq"] == [0, 0, 0, 1]
    assert found.moe_shared_expert_intermediate_size == 2 * 28


def test_minimax_names_the_rotated_channels() -> None:
    hf = CONFIGS["minimax_m2"]  # 6 of 12 channels are rotated
    found = shape(hf)
    assert found.rotary_percent == 0.5 and found.joint_qk_norm
    assert (found.moe_ffn_hidden_size, found.rotary_base) == (52, 300.0)
    for more in ({"partial_rotary_factor": 0.5}, {"rotary_dim": None}):
        percent = 1.0 if None in more.values() else 0.5  # transformers' default
        assert shape(hf | more).rotary_percent == percent
    written = family_of(hf).config(replace(found, rotary_percent=0.25), 37)
    assert written is not None  # vLLM reads rotary_dim, not partial_rotary_factor
    assert written["rotary_dim"] == 3 and "partial_rotary_factor" not in written


def test_lings_options() -> None:
    hf = CONFIGS["bailing_moe_v2"]
    found = shape(hf)
    assert found.moe_shared_expert_intermediate_size == 2 * 28
    assert shape(hf | {"moe_shared_expert_intermediate_size": 28}) == found
    assert shape(hf | {"model_type": "bailing_moe"}) == found  # as in published folders
    # The published code gives a token's only expert its score, as Megatron-Core does.
    assert shape(hf | ONE_EXPERT).moe_router_topk == 1


def test_ling_may_have_the_number_of_rotated_channels() -> None:
    hf = CONFIGS["bailing_moe_v2"] | {"head_dim": 128, "rotary_dim": 64}
    both = shape(hf)
    del hf["partial_rotary_factor"]
    found = shape(hf)
    assert found == both and found.rotary_percent == 0.5
    written = family_of(hf).config(found, 37)
    assert written is not None
    assert written["partial_rotary_factor"] == 0.5 and "rotary_dim" not in written
    del hf["rotary_dim"]
    assert shape(hf).rotary_percent == 1.0


def test_what_lings_code_takes_for_a_missing_key() -> None:
    keys = "architectures model_type vocab_size hidden_size num_hidden_layers intermediate_size"
    given = {key: CONFIGS["bailing_moe_v2"][key] for key in keys.split()}
    sizes = {"num_attention_heads": 8, "num_experts": 16, "moe_intermediate_size": 28}
    found = shape(given | sizes)
    assert (found.num_query_groups, found.kv_channels, found.moe_router_topk) == (4, 128, 8)
    megatron = found.megatron
    assert megatron["qk_layernorm"] is True and megatron["add_qkv_bias"] is False
    assert (megatron["moe_router_num_groups"], megatron["moe_router_group_topk"]) == (8, 4)
    assert megatron["moe_router_topk_scaling_factor"] == 1.0
    assert megatron["moe_layer_freq"] == [0, 1, 1, 1]
    assert found.moe_shared_expert_intermediate_size == 28
    assert (found.rotary_base, found.rotary_percent) == (600_000.0, 1.0)
    assert found.max_sequence_length == 32_768


@pytest.mark.parametrize(
    ("keys", "frequency"),
    [
        ((1, -1, 1), [0, 1, 1, 1, 1, 1]),
        ((0, 5, 1), None),
        ((1, 4, 2), [0, 1, 0, 1, 0, 0]),
        ((3, 3, 1), [0, 0, 0, 1, 0, 0]),
    ],
)
def test_ernies_layers_with_experts(keys: tuple[int, ...], frequency: list[int] | None) -> None:
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    hf = CONFIGS["ernie4_5_moe"] | {"num_hidden_layers": 6} | dict(zip(names, keys))
    found = shape(hf)
    assert found.megatron.get("moe_layer_freq") == frequency
    written = family_of(hf).config(found, 37)
    assert written is not None and shape(written) == found


def test_layers_that_ernie_cannot_express() -> None:
    hf = CONFIGS["ernie4_5_moe"]
    found = shape(hf)
    found.megatron["moe_layer_freq"] = [1, 0, 0, 1]
    assert family_of(hf).config(found, 37) is None


def test_kinds_of_layers_count_where_the_family_has_them() -> None:
    """As in transformers, only some families read the key mlp_layer_types. DeepSeek-V3 and GLM-4.5
    ignore it, and read only the number of dense first layers."""
    kinds = {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
    for name in ("deepseek_v3", "glm4_moe"):
        hf = {k: v for k, v in CONFIGS[name].items() if k != "first_k_dense_replace"}
        assert shape(hf | kinds) == shape(hf)
    for name in ("glm4_moe_lite", "hy_v3"):
        assert shape(CONFIGS[name] | kinds).megatron["moe_layer_freq"] == [1, 0, 1, 1]


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | changes))
    return path


def config(path: Path | None, **model: Any) -> Any:
    model = {"hf_path": None if path is None else str(path)} | model
    return parse_config({"data": {"tokenizer": "none"}, "model": model})


def test_hf_path_decides_the_shape_and_overrides_win(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", num_hidden_layers=3)
    assert config(path).resolved_model() == shape(QWEN3_30B_A3B | {"num_hidden_layers": 3})
    fields = {"moe_aux_loss_coeff": 0.5, "moe_router_topk": 4}
    changed = config(path, rotary_base=2e6, max_sequence_length=4096, megatron=fields)
    check_config(changed, 1)
    found = changed.resolved_model()
    assert (found.rotary_base, found.max_sequence_length) == (2e6, 4096)
    assert (found.megatron["moe_aux_loss_coeff"], found.moe_router_topk) == (0.5, 4)


def test_a_resolved_configuration_names_no_preset_beside_weights(tmp_path: Path) -> None:
    assert config(folder(tmp_path / "model")).model.preset is None
    assert config(None, checkpoint_path="run").model.preset is None
    assert config(None).model.preset == "tiny"


def test_a_folder_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    assert config(path).resolved_model().num_layers == 48
    (path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": 12}))
    assert config(path).resolved_model().num_layers == 12


def test_keys_that_contradict_the_folder_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", num_hidden_layers=4)
    wrong = config(
        path,
        preset="qwen3-30b-a3b",
        vocab_size=100,
        tie_embeddings=True,
        megatron={"num_layers": 8, "moe_ffn_hidden_size": 700, "qk_layernorm": False},
    )
    with pytest.raises(ConfigError) as error:
        check_config(wrong, 1)
    lines = error.value.problems
    sizes = [f"megatron.{name}" for name in ("num_layers", "moe_ffn_hidden_size", "qk_layernorm")]
    keys = [line.split(" = ")[0].removeprefix("model.") for line in lines]
    assert keys == ["preset", "vocab_size", "tie_embeddings", *sizes]
    assert "have 151936" in lines[1] and "have 4;" in lines[3]


def test_what_keeps_a_folder_from_being_read(tmp_path: Path) -> None:
    broken, listed = folder(tmp_path / "broken"), folder(tmp_path / "listed")
    (broken / "config.json").write_text("{")
    (listed / "config.json").write_text("[1]")
    deep, texts = folder(tmp_path / "deep"), folder(tmp_path / "texts", num_hidden_layers="4")
    (deep / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    huge = folder(tmp_path / "huge", num_hidden_layers=10**12)
    for path, named in (
        (tmp_path / "absent", "no such folder"),
        (deep, "cannot be read: nested more than 100 levels deep"),
        (texts, "num_hidden_layers = '4': must be an integer"),
        (folder(tmp_path / "heads", num_attention_heads=[4]), r"num_attention_heads = \[4\]"),
        (huge, "num_hidden_layers = 1000000000000: must be an integer from 1 to"),
        (folder(tmp_path / "layers", mlp_only_layers=3), "a value of a wrong type"),
        (folder(tmp_path / "llama", model_type="llama", architectures=["Llama"]), "Llama"),
        (broken, "cannot be read"),
        (listed, "not a JSON object"),
    ):
        with pytest.raises(ConfigError, match=named):
            config(path).resolved_model()


@pytest.mark.parametrize(
    "content", [{}, {"vocab_size": 5, "shape": 3}, {"vocab_size": 5, "shape": {"megatron": 3}}]
)
def test_a_damaged_description_of_a_checkpoint_is_named(tmp_path: Path, content: object) -> None:
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"^model.checkpoint_path: .*model.json: cannot be read"):
        config(None, checkpoint_path=str(tmp_path)).resolved_model()


def test_fields_that_change_the_function_are_not_dropped_in_silence() -> None:
    for name, value in {
        "moe_expert_capacity_factor": 1.0,
        "softmax_scale": 0.5,
        "layernorm_zero_centered_gamma": True,
        "moe_router_topk_scaling_factor": 2.0,
    }.items():
        with pytest.raises(ConfigError, match=name):
            family_of_shape(shape_of(PRESETS["tiny"], {name: value}))
    neutral = {"moe_token_dispatcher_type": "allgather", "init_method_std": 0.1, "fp8": "hybrid"}
    assert family_of_shape(shape_of(PRESETS["tiny"], neutral)).model_type == "qwen3_moe"


def test_the_families() -> None:
    assert " ".join(FAMILIES) == (
        "qwen3_moe qwen3 qwen2_moe qwen2 deepseek_v3 glm4_moe glm4_moe_lite hy_v3 "
        "bailing_moe_v2 minimax_m2 ernie4_5_moe llama mixtral olmoe gpt_oss qwen3_next "
        "qwen3_5_moe_text qwen3_5_text"
    )


def test_windows_sinks_and_yarn_of_gpt_oss() -> None:
    hf = CONFIGS["gpt_oss"]
    megatron = shape(hf).megatron
    # A query sees 6 keys: 5 before its own. Megatron-Core counts layers from 1.
    assert (megatron["window_size"], megatron["window_attn_skip_freq"]) == ([5, 0], 2)
    assert megatron["softmax_type"] == "learnable" and megatron["add_bias_linear"] is True
    assert megatron["activation_func_clamp_value"] == 0.7 and megatron["glu_linear_offset"] == 1.0
    assert megatron["yarn_correction_range_round_to_int"] is False
    assert megatron["moe_aux_loss_coeff"] == 0.0

    def windows(**changes: Any) -> list[int | None]:
        return windows_in_layers(shape(hf | changes).megatron, 4)

    sliding, full = "sliding_attention", "full_attention"
    assert windows() == windows(layer_types=None) == [6, None, 6, None]
    assert windows(layer_types=[full, sliding, sliding, sliding]) == [None, 6, 6, 6]
    assert windows(layer_types=[full] * 4, sliding_window=None) == [None] * 4
