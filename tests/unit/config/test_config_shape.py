"""Presets and the model's sizes after merging."""

from __future__ import annotations

from gspo_megatron.config import PRESETS, Config, ModelShape, parse_config


def config_with(*overrides: str) -> Config:
    return parse_config({"data": {"tokenizer": "t"}}, overrides)


def shape_of(*overrides: str) -> ModelShape:
    return config_with(*overrides).resolved_model()


def test_tiny_leaves_the_vocabulary_to_the_tokenizer() -> None:
    shape = shape_of()
    assert shape.vocab_size is None
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (4, 64, 4)
    assert (shape.num_query_groups, shape.kv_channels) == (2, 16)
    assert (shape.num_moe_experts, shape.moe_router_topk, shape.moe_ffn_hidden_size) == (8, 2, 64)
    assert (shape.max_sequence_length, shape.rotary_base) == (128, 10_000.0)
    assert not shape.tie_embeddings
    assert shape.megatron["activation_func"] == "silu"
    assert shape.megatron["moe_aux_loss_coeff"] == 1e-3


def test_configuration_wins_over_the_preset() -> None:
    shape = shape_of(
        "model.preset=qwen3-30b-a3b",
        "model.vocab_size=1000",
        "model.max_sequence_length=2048",
        "model.rotary_base=5000",
        "model.tie_embeddings=true",
        "model.megatron.num_layers=2",
        "model.megatron.init_method_std=0.01",
    )
    assert (shape.vocab_size, shape.max_sequence_length) == (1000, 2048)
    assert (shape.rotary_base, shape.tie_embeddings, shape.num_layers) == (5000, True, 2)
    assert shape.megatron["num_layers"] == 2
    assert shape.megatron["init_method_std"] == 0.01
    assert shape.hidden_size == 2048


def test_sizes_left_open_get_the_defaults_of_megatron() -> None:
    shape = shape_of(
        "model.megatron={num_query_groups: null, kv_channels: null, ffn_hidden_size: null, "
        "moe_ffn_hidden_size: null, hidden_size: 96}"
    )
    assert (shape.num_query_groups, shape.kv_channels) == (4, 24)
    assert shape.ffn_hidden_size == shape.moe_ffn_hidden_size == 384
    assert shape.megatron["kv_channels"] == 24


def test_null_experts_make_the_dense_model() -> None:
    shape = shape_of("model.megatron.num_moe_experts=null")
    assert shape.num_moe_experts is shape.moe_router_topk is shape.moe_ffn_hidden_size is None
    assert shape.has_dense_layers
    assert [name for name in shape.megatron if name.startswith("moe_")] == []
    assert not shape_of().has_dense_layers
    assert shape_of("model.megatron.moe_layer_freq=2").has_dense_layers


def test_resolving_does_not_touch_preset_or_configuration() -> None:
    config = config_with("model.megatron.num_layers=2")
    config.resolved_model().megatron["num_layers"] = 99
    assert config.model.megatron == {"num_layers": 2}
    assert PRESETS["tiny"].megatron["num_layers"] == 4
    assert config.resolved_model().num_layers == 2


def test_prompts_may_take_what_the_response_leaves() -> None:
    assert config_with("rollout.max_response_tokens=28").max_prompt_tokens() == 100
    assert config_with("data.max_prompt_tokens=7").max_prompt_tokens() == 7
