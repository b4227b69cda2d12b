"""training.precision: the fields that it sets, the keys that it needs, and the devices that support
it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size
from pydantic import TypeAdapter

from gspo_megatron.config import parse_config
from gspo_megatron.config.load import ConfigError
from gspo_megatron.config.megatron_fields import installed_fields
from gspo_megatron.config.precision import (
    FP8,
    base_precision,
    device_lacks,
    engine_lacks,
    megatron_fields,
    tokens_multiple,
)
from gspo_megatron.config.rules import check_config, sample_multiple
from gspo_megatron.config.stages import PretrainingConfig
from tests.unit.config.configs import problems_of


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that pretends that this version of Transformer Engine is installed. None: no
    version."""
    real_spec, real_version = importlib.util.find_spec, importlib.metadata.version

    def pretend(version: str | None) -> None:
        def find_spec(name: str, package: str | None = None) -> Any:
            if name == "transformer_engine":
                return None if version is None else object()
            return real_spec(name, package)

        def version_of(name: str) -> str:
            return version or "" if name == "transformer-engine" else real_version(name)

        monkeypatch.setattr("importlib.util.find_spec", find_spec)
        monkeypatch.setattr("importlib.metadata.version", version_of)

    return pretend


@pytest.mark.parametrize("precision", list(FP8))
def test_recipes_are_those_of_the_installed_megatron_core(precision: str) -> None:
    fields = megatron_fields(precision)
    types = installed_fields("model.megatron")
    for name, value in fields.items():
        TypeAdapter(types[name]).validate_python(value)
    assert base_precision(precision) == "bf16"
    # The package pads tokens to the multiple that Megatron-Core aligns sizes to.
    assert tokens_multiple(precision) == get_fp8_align_size(Fp8Recipe(fields["fp8_recipe"]))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_other_precisions_set_nothing(precision: str) -> None:
    assert megatron_fields(precision) == {} and tokens_multiple(precision) == 1
    assert base_precision(precision) == precision
    assert device_lacks(precision, (5, 0), None) is None


@pytest.mark.parametrize(
    ("capability", "cuda", "possible"),
    [
        ((8, 0), (13, 0), set()),
        ((8, 9), (12, 1), {"fp8-delayed"}),
        ((9, 0), (12, 8), {"fp8-delayed"}),
        ((9, 0), (12, 9), {"fp8-delayed", "fp8-blockwise"}),
        ((10, 0), (13, 0), {"fp8-delayed", "fp8-blockwise", "mxfp8"}),
        ((10, 3), (13, 0), {"fp8-delayed", "fp8-blockwise", "mxfp8"}),
        ((12, 0), (13, 0), {"fp8-delayed", "fp8-blockwise"}),
        ((9, 0), None, set()),
    ],
)
def test_devices(
    capability: tuple[int, int], cuda: tuple[int, int] | None, possible: set[str]
) -> None:
    assert {name for name in FP8 if device_lacks(name, capability, cuda) is None} == possible


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "pip install 'gspo-megatron[gpu]'"),
        ("2.2.0", "2.3 or newer, and 2.2.0 is installed"),
        ("1.14.0+cafe", "2.3 or newer"),
        ("2.3.0", None),
        ("2.20.2", None),
        ("3.0.dev0+cafe", None),
    ],
)
def test_transformer_engine_versions(engine: Any, version: str | None, text: str | None) -> None:
    engine(version)
    said = engine_lacks()
    assert said is text if text is None else text in said


def test_fp8_and_its_backend_need_transformer_engine(engine: Any) -> None:
    backend, fp8 = "model.backend=transformer_engine", "training.precision=fp8-delayed"
    engine(None)
    (line,) = problems_of(1, fp8)
    assert line.startswith("training.precision = 'fp8-delayed': needs Transformer Engine: pip")
    (line,) = problems_of(1, backend)
    assert "transformer_engine is not installed; allowed: torch_native or auto" in line
    engine("2.20.2")
    assert problems_of(1, fp8) == problems_of(1, backend) == []
    (line,) = problems_of(1, "training.precision=mxfp8", "model.backend=torch_native")
    assert line.startswith("training.precision = 'mxfp8': model.backend = torch_native has no FP8")
    assert "allowed: fp32 or bf16, or model.backend = transformer_engine" in line


@pytest.mark.parametrize(
    ("world_size", "overrides", "text"),
    [
        (4, ["parallel.layout=tp=4", "training.precision=mxfp8"],
         "num_attention_heads * kv_channels over 4 ranks is 16 each"),
        (8, ["parallel.layout=etp=8", "training.precision=fp8-delayed"],
         "moe_ffn_hidden_size over 8 ranks is 8 each; FP8 matrix products take multiples of 16"),
        (1, ["model.megatron.hidden_size=72", "training.precision=fp8-blockwise"],
         "hidden_size is 72;"),
        (1, ["model.megatron={moe_layer_freq: 2, ffn_hidden_size: 40}",
             "training.precision=mxfp8"], "ffn_hidden_size is 40"),
        (1, ["model.megatron.moe_shared_expert_intermediate_size=24",
             "training.precision=mxfp8"], "moe_shared_expert_intermediate_size is 24"),
        (1, ["model.megatron.first_last_layers_bf16=true", "training.precision=fp8-delayed"],
         "model.megatron.first_last_layers_bf16 = true: not with training.precision = fp8-delayed"),
        (1, ["model.megatron.tp_only_amax_red=true", "training.precision=fp8-delayed"],
         "a checkpoint keeps only one set; allowed: false"),
        (1, ["model.megatron.fp8_dot_product_attention=true", "training.precision=fp8-delayed"],
         "a checkpoint does not hold the scales of attention"),
        (2, ["model.megatron={first_last_layers_bf16: true, num_layers_at_end_in_bf16: 3}",
             "training.precision=mxfp8", "parallel.layout=pp=2"],
         "model.megatron.num_layers_at_end_in_bf16 = 3: a pipeline stage has 2 layers"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_do_is_refused(
    engine: Any, world_size: int, overrides: list[str], text: str
) -> None:
    engine("2.20.2")
    assert any(text in line for line in problems_of(world_size, *overrides))


def test_layers_at_the_ends_may_stay_in_bf16(engine: Any) -> None:
    engine("2.20.2")
    ends = "model.megatron={first_last_layers_bf16: true, num_layers_at_end_in_bf16: 2}"
    for precision in ("fp8-blockwise", "mxfp8", "bf16"):
        assert problems_of(1, f"training.precision={precision}", ends) == []


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.megatron.fp8=hybrid", "use training.precision"),
        ("model.megatron.fp8_recipe=mxfp8", "use training.precision"),
        ("model.megatron.fp8_param=true", "weights are initialised, saved and exported in bf16"),
        ("model.megatron.fp32_residual_connection=true", "pipeline stages exchange activations"),
        (
            "parallel.ddp.fp8_param_gather=true",
            "weights are initialised, saved and exported in bf16",
        ),
        ("model.megatron.fp4=e2m1", "FP4 is not supported"),
        ("model.megatron.overlap_moe_expert_parallel_comm=true", "alternates the layers of two"),
        ("model.megatron.mtp_num_layers=1", "layers that predict further tokens are not trained"),
    ],
)
def test_fields_that_precision_decides(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config({"data": {"tokenizer": "t"}}, [override])


def test_stages_follow_the_same_rules(engine: Any) -> None:
    engine(None)
    values = {
        "data": {"tokenizer": "t", "train": ["a"], "sequence_length": 96},
        "parallel": {"layout": "tp=2"},
        "training": {"steps": 1, "precision": "mxfp8"},
    }
    config = parse_config(values, schema=PretrainingConfig)
    assert sample_multiple(config) == 64
    found = {}
    for here in (False, True):
        with pytest.raises(ConfigError) as error:
            check_config(config, 2, here=here)
        found[here] = error.value.problems
    precision, groups, length = found[True]
    assert "needs Transformer Engine" in precision and "num_query_groups" in groups
    assert precision.startswith("training.precision = 'mxfp8': ")
    assert length.startswith("data.sequence_length = 96") and "multiples of 64" in length
    assert found[False] == [groups, length]
