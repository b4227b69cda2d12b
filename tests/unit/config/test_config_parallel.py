"""Layouts: their text form, the section `parallel`, the resolved sizes, and the sizes of the model
after merging."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gspo_megatron.config import (
    PRESETS,
    Layout,
    ModelShape,
    apply_layout,
    check_config,
    parse_config,
    resolve_parallel,
)
from gspo_megatron.errors import ConfigError
from tests.unit.config.configs import config_with


def test_layout_text_parses_in_any_order_and_round_trips() -> None:
    assert Layout.parse("ep=2, tp=4 ,pp=2") == Layout(tp=4, pp=2, ep=2)
    assert Layout.parse("tp=1") == Layout()
    full = Layout(tp=1, pp=2, vpp=3, ep=4, etp=5, cp=6, dp=7)
    assert Layout.parse("tp=1,pp=2,vpp=3,ep=4,etp=5,cp=6,dp=7") == full
    choices = itertools.product((1, 2), (1, 4), (None, 1, 2), (1, 8), (None, 1), (1, 2), (None, 3))
    for tp, pp, vpp, ep, etp, cp, dp in choices:
        layout = Layout(tp, pp, vpp, ep, etp, cp, dp)
        assert Layout.parse(str(layout)) == layout


def test_layout_reports_all_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.parse("tp=0,xp=2,pp,ep=two,cp=2,cp=2,dp=-1,=3")
    text = "layout = 'tp=0,xp=2,pp,ep=two,cp=2,cp=2,dp=-1,=3': "
    wrong = [line.removeprefix(text) for line in caught.value.problems]
    assert [line.split(";")[0] for line in wrong] == [
        "tp is '0'",
        "unknown key xp",
        "'pp' is not KEY=SIZE",
        "ep is 'two'",
        "cp is given twice",
        "dp is '-1'",
        "'=3' is not KEY=SIZE",
    ]
    for text in ("", " ", ",", "tp=2,", "tp", "tp=2;pp=2", "tp=2.0", "tp=²", "tp=1" + "0" * 9):
        with pytest.raises(ConfigError):
            Layout.parse(text)
    with pytest.raises(ConfigError) as caught:  # Python does not convert so many digits
        Layout.parse("tp=" + "9" * 5000)
    assert caught.value.problems[0].endswith("allowed: an integer from 1 to 999999999")
    assert Layout.parse("tp=02,dp=999999999") == Layout(tp=2, dp=999999999)


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("tp=1", 1),
        ("tp=2,pp=3,cp=5", 30),
        ("tp=2,pp=2,ep=2", 4),  # experts share the tensor-parallel ranks
        ("ep=4", 4),  # the dense layers are data-parallel; the experts need four ranks
        ("tp=2,ep=3", 6),  # the smallest number that both 2 and 3 divide
        ("tp=2,pp=2,ep=4,etp=2", 16),
        ("tp=2,pp=2,vpp=2", 4),
        ("tp=2,dp=3", 6),
    ],
)
def test_world_size_is_the_smallest_that_holds_weights_and_experts(
    text: str, world_size: int
) -> None:
    assert Layout.parse(text).world_size == world_size
    assert config_with(f"parallel.layout={text}").world_size_hint() == world_size


def test_layout_fills_the_keys_of_the_parallel_section() -> None:
    parallel = config_with("parallel.layout=tp=2,pp=3,vpp=2,ep=4,etp=2,cp=5,dp=6").parallel
    assert parallel.model_dump(exclude={"layout", "sequence_parallel", "ddp"}) == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 3,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 2,
        "context_parallel_size": 5,
        "data_parallel_size": 6,
    }
    both = ["parallel.layout=tp=2", "parallel.tensor_model_parallel_size=2"]
    assert config_with(*both, "parallel.context_parallel_size=2").layout() == Layout(tp=2, cp=2)


def test_a_size_named_both_ways_with_different_values_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(
            "parallel.layout=tp=2,pp=2",
            "parallel.tensor_model_parallel_size=4",
            "parallel.pipeline_model_parallel_size=8",
            "parallel.cp=2",
        )
    first, second, third = caught.value.problems
    assert "tp is 2 here and parallel.tensor_model_parallel_size is 4" in first
    assert "pp is 2 here and parallel.pipeline_model_parallel_size is 8" in second
    assert third.startswith("parallel.cp = 2: unknown key")


def test_a_new_layout_replaces_the_sizes_of_a_resolved_configuration() -> None:
    def layout(*overrides: str) -> Layout:
        return parse_config(values, overrides).layout()

    before = parse_config({"data": {"tokenizer": "t"}, "parallel": {"layout": "tp=2,pp=2"}})
    values: dict[str, Any] = before.model_dump()
    assert layout("parallel.layout=tp=4") == Layout(tp=4)
    assert layout("parallel.context_parallel_size=2", "parallel.layout=tp=4") == Layout(tp=4, cp=2)
    assert layout("parallel.layout=") == layout("parallel.layout=null") == Layout(tp=2, pp=2)
    # a file that names some sizes
    values = {"data": {"tokenizer": "t"}, "parallel": {"context_parallel_size": 2}}
    assert layout("parallel.layout=tp=4") == Layout(tp=4, cp=2)


def test_resolved_sizes_are_concrete() -> None:
    config = config_with("parallel.layout=tp=2,pp=2,ep=4")
    check_config(config, 16)
    resolved = resolve_parallel(config, 16)
    assert resolved.data_parallel_size == 4  # 16 / (2 * 2)
    assert resolved.expert_data_parallel_size == 2  # 16 / (1 * 4 * 2)
    assert resolved.layout == Layout(tp=2, pp=2, ep=4, etp=1, cp=1, dp=4)
    assert str(resolved) == "tp=2,pp=2,ep=4,etp=1,dp=4"

    # the keyword arguments of Megatron-Core, without data parallelism
    assert resolved.group_sizes() == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "context_parallel_size": 1,
    }


def test_sequence_parallel_follows_tensor_parallel_unless_said() -> None:
    assert not resolve_parallel(config_with(), 1).sequence_parallel
    assert resolve_parallel(config_with("parallel.layout=tp=2"), 2).sequence_parallel
    off = config_with("parallel.layout=tp=2", "parallel.sequence_parallel=false")
    assert not resolve_parallel(off, 2).sequence_parallel


def test_apply_layout_replaces_all_sizes_and_nothing_else() -> None:
    config = config_with(
        "parallel.layout=tp=2,pp=2,dp=3",
        "parallel.sequence_parallel=true",
        "parallel.ddp.bucket_size=1000",
        "training.seed=9",
    )
    moved = apply_layout(config, Layout(ep=2, cp=2))
    assert moved.layout() == Layout(ep=2, cp=2)
    assert moved.parallel.layout is None
    assert not moved.parallel.uses_sequence_parallel()
    assert moved.parallel.ddp == {"bucket_size": 1000}
    assert moved.training == config.training
    assert config.layout() == Layout(tp=2, pp=2, dp=3)


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
    assert config.model.megatron == {"num_layers": 2} and config.resolved_model().num_layers == 2
    assert PRESETS["tiny"].megatron["num_layers"] == 4


def test_prompts_may_take_what_the_response_leaves() -> None:
    assert config_with("rollout.max_response_tokens=28").max_prompt_tokens() == 100
    assert config_with("data.max_prompt_tokens=7").max_prompt_tokens() == 7
