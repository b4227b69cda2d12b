"""Settings that config.json can spell in two ways. Each spelling is read as transformers reads it,
or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from gspo_megatron.errors import ConfigError
from gspo_megatron.families import FAMILIES, describe
from gspo_megatron.families.family import REQUIRED
from gspo_megatron.families.model_shape import shape_of
from tests.unit.hf.published import CONFIGS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LATENT = ("deepseek_v3", "glm4_moe_lite")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DENSE = [name for name, config in CONFIGS.items() if config.keys().isdisjoint(EXPERTS)]

# The configs without the keys that the variants below add.
BARE: dict[str, dict[str, Any]] = {
    name: {
        key: value
        for key, value in CONFIGS[name].items()
        if key not in (*EXPERTS, "rope_theta", "rope_scaling", "num_key_value_heads")
    }
    | {"model_type": name}
    for name in FAMILIES
}


def variants(name: str) -> list[dict[str, Any]]:
    heads = CONFIGS[name]["num_attention_heads"]
    usual = {key: 8 for key in EXPERTS if key in CONFIGS[name]} | {"num_key_value_heads": heads}
    ropes: list[dict[str, Any]] = [
        {},
        {"rope_theta": 700.0},
        {"rope_theta": 700.0, "rope_scaling": {"rope_theta": 700.0}},
        {"rope_scaling": DEFAULT},
        {"rope_parameters": DEFAULT},
        {"rope_parameters": DEFAULT, "rope_theta": 500.0},
        {"rope_parameters": DEFAULT, "rope_theta": 700.0},
        {"rope_parameters": DEFAULT, "rope_scaling": DEFAULT | {"rope_theta": 600.0}},
        {"rope_parameters": DEFAULT, "rope_scaling": {}},
        {"rope_parameters": DEFAULT, "rope_scaling": YARN},
        {"rope_parameters": YARN, "rope_scaling": DEFAULT},
        {"rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_theta": 500.0},
        {"rope_scaling": YARN, "original_max_position_embeddings": 16},
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 32,
        },
        {"rope_scaling": {"type": "yarn", **YARN, "rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"partial_rotary_factor": 0.5, **DEFAULT}},
        {"rope_parameters": DEFAULT, "partial_rotary_factor": 0.5},
        {"rope_parameters": DEFAULT, "partial_rotary_factor": 1.0},
        {
            "layer_types": ["full_attention"] * CONFIGS[name]["num_hidden_layers"],
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        },
    ]
    found = [usual | rope for rope in ropes]
    for key in EXPERTS if name not in DENSE else ():
        alone = {k: v for k, v in usual.items() if k not in EXPERTS} | {key: 8}
        found += [alone, usual | {key: 8}, usual | {key: 16}]
    found += [
        usual | {"num_key_value_heads": None},
        {key: value for key, value in usual.items() if key != "num_key_value_heads"},
        usual | {"head_dim": 24},
        usual | {"head_dim": None},
    ]
    return found


def of_transformers(hf: dict[str, Any]) -> dict[str, Any]:
    """The settings as transformers reads them. If transformers refuses them, its error is
    raised."""
    config = CONFIG_MAPPING[hf["model_type"]](**json.loads(json.dumps(hf)))
    config.standardize_rope_params()  # as a model does that computes the angles
    rope = config.rope_parameters
    [rope] = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    heads = config.num_attention_heads
    latent = hf["model_type"] in LATENT
    found = {
        "theta": rope["rope_theta"],
        "scaling": rope["rope_type"],
        "rotated": rope.get("partial_rotary_factor") or 1,
        "context": rope.get("original_max_position_embeddings"),
        "heads": config.num_key_value_heads or heads,
        "width": None
        if latent
        else getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rotary width": config.head_dim if latent else None,
    }
    if hf["model_type"] not in DENSE:
        [key] = [key for key in EXPERTS if key in CONFIGS[hf["model_type"]]]
        found["experts"] = getattr(config, key)
    return found


def of_ours(hf: dict[str, Any]) -> dict[str, Any]:
    shape = shape_of(describe(hf))
    latent = hf["model_type"] in LATENT
    prefix = "yarn_" if "yarn_beta_fast" in shape.megatron else ""
    scaling = "yarn" if prefix else "rope"
    found = {
        "theta": shape.rotary_base,
        "scaling": shape.megatron.get("rope_type", scaling).replace("rope", "default"),
        "rotated": shape.rotary_percent,
        "context": shape.megatron.get(f"{prefix}original_max_position_embeddings"),
        "heads": shape.num_query_groups,
        "width": None if latent else shape.kv_channels,
        "rotary width": shape.megatron["qk_pos_emb_head_dim"] if latent else None,
    }
    if hf["model_type"] not in DENSE:
        found["experts"] = shape.num_moe_experts
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in CONFIG_MAPPING])
def test_they_are_read_as_transformers_reads_them_or_refused(name: str) -> None:
    taken = 0
    for variant in variants(name):
        hf = BARE[name] | variant
        try:
            ours = of_ours(hf)
        except ConfigError:
            continue
        if None in (hf.get("head_dim", 0), hf.get("num_key_value_heads", 0)):
            continue  # transformers refuses null, or fails when it builds the model
        theirs = of_transformers(hf)
        assert ours == theirs, variant
        taken += 1
    assert taken >= 10


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": DEFAULT, "rope_scaling": YARN}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_parameters": YARN, "rope_scaling": None}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": DEFAULT, "rope_theta": 700.0}, "rope_theta = 700.0"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default"}}, "rope_scaling.type = 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention"),
        ({"num_experts": 8, "num_local_experts": 16}, "num_local_experts = 16"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
    ],
)
def test_settings_with_two_values_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        describe(BARE["qwen3_moe"] | {"num_experts": 8, "num_key_value_heads": 2} | changes)
    assert any(named in line for line in error.value.problems)


@pytest.mark.parametrize(("name", "prefix"), [("deepseek_v3", ""), ("gpt_oss", "yarn_")])
def test_yarn_without_its_bounds_has_those_of_the_paper(name: str, prefix: str) -> None:
    """In section 3.2 of arXiv 2309.00071, alpha is 1 and beta is 32. transformers takes them, too,
    if config.json has neither."""
    megatron = shape_of(describe(CONFIGS[name] | {"rope_scaling": YARN})).megatron
    keys = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    assert [megatron[prefix + key] for key in keys] == [4.0, 16, 32.0, 1.0]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in CONFIG_MAPPING])
def test_keys_that_are_missing_have_the_values_of_transformers(name: str) -> None:
    """The file that transformers writes for the family's usual model has all keys. Without those
    that may be missing, it describes the same model."""
    theirs = CONFIG_MAPPING[name]()
    full = json.loads(json.dumps(theirs.to_dict()))
    needed = [entry.hf for entry in FAMILIES[name].fields if entry.default is REQUIRED]
    bare = {key: getattr(theirs, key) for key in ("model_type", "vocab_size", *needed)}
    assert len(bare) < len(full) / 2
    ours, expected = shape_of(describe(bare)), shape_of(describe(full))
    assert dict(ours.megatron) == dict(expected.megatron)
    assert ours == expected


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_of_a_model_that_reads_images_the_outer_config_ties_the_embedding(
    outer: bool, inner: bool
) -> None:
    hf = {
        "model_type": "qwen3_5",
        "text_config": CONFIGS["qwen3_5_text"] | {"tie_word_embeddings": inner},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 44},
        "tie_word_embeddings": outer,
    }
    config = CONFIG_MAPPING["qwen3_5"](**json.loads(json.dumps(hf)))
    theirs = AutoModelForImageTextToText.from_config(config)
    tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert describe(hf).tie_embeddings == tied == outer
