"""Fields of Megatron-Core's classes: those that a configuration may set, and their legal values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, List, Literal, Optional, Tuple, Union  # noqa: UP035

import pytest
import torch

from gspo_megatron.config import PRESETS, megatron_fields, parse_config
from gspo_megatron.config.megatron_fields import fields_of, installed_fields, megatron_problems
from gspo_megatron.errors import ConfigError


class AttnBackend(enum.Enum):
    auto = 1


# ruff: noqa: UP006, UP007, UP045 (types as Megatron-Core spells them)
@dataclasses.dataclass
class ModelParallelConfig:
    tensor_model_parallel_size: int = 1
    overlap: bool = False
    grad_scale_func: Optional[Callable] = None
    _private: Optional[int] = None


@dataclasses.dataclass
class TransformerConfig(ModelParallelConfig):
    num_layers: int = dataclasses.field(default=0, metadata={"a": 1})
    num_query_groups: Optional[int] = dataclasses.field(default=None)
    hidden_dropout: float = 0.1
    window_size: Optional[Tuple[int, int]] = None
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    granularity: Optional[Literal["full", "selective"]] = None
    version: Optional[Literal[2, 3]] = None
    moe_layer_freq: Union[int, List[int]] = 1
    name: str = ""
    unit: int = None  # type: ignore[assignment]
    modern: int | str | None = None
    params_dtype: torch.dtype = torch.float32
    activation_func: Callable = torch.nn.functional.gelu
    attention_backend: AttnBackend = AttnBackend.auto


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Replace the fields of the installed Megatron-Core by those of the class above."""
    found = fields_of(TransformerConfig)
    monkeypatch.setattr(megatron_fields, "installed_fields", lambda _: found)
    return found


def wrong_with(**values: Any) -> list[str]:
    return list(megatron_problems("model.megatron", values))


def test_fields_are_the_public_ones_of_class_and_base(fields: Mapping[str, Any]) -> None:
    assert {"tensor_model_parallel_size", "overlap", "num_layers", "modern"} < set(fields)
    assert "_private" not in fields
    assert fields["unit"] == int | None and fields["num_layers"] is int


@pytest.mark.parametrize(
    "values",
    [
        {"num_layers": 3, "hidden_dropout": 0, "overlap": True, "name": "x"},
        {"num_query_groups": None, "version": 3, "granularity": None, "unit": None},
        {"dispatcher": "alltoall", "moe_layer_freq": [1, 0], "window_size": [1, 2]},
        {"modern": "x", "activation_func": "silu", "attention_backend": "flash"},
    ],
)
@pytest.mark.usefixtures("fields")
def test_values_that_fit_their_type_pass(values: dict[str, Any]) -> None:
    assert wrong_with(**values) == []


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("num_layer", 3, "num_layer = 3: the installed TransformerConfig has no such field; "
         "did you mean num_layers?"),
        ("zzz", 3, "zzz = 3: the installed TransformerConfig has no such field"),
        ("num_layers", 0, "num_layers = 0: must be an integer from 1"),
        ("num_layers", None, "num_layers = null: must be an integer from 1"),
        ("num_layers", True, "num_layers = true: must be an integer from 1"),
        ("num_query_groups", "2", "num_query_groups = '2': must be an integer from 1, or null"),
        ("moe_layer_freq", 0, "moe_layer_freq = 0: must be an integer from 1, or a list with "
         "0 or 1 for each layer"),
        ("moe_layer_freq", [2, 0], "moe_layer_freq = [2, 0]: must be an integer from 1, or a list "
         "with 0 or 1 for each layer"),
        ("hidden_dropout", "0", "hidden_dropout = '0': must be float"),
        ("hidden_dropout", True, "hidden_dropout = true: must be float"),
        ("hidden_dropout", float("nan"), "hidden_dropout = nan: must be a finite number"),
        ("hidden_dropout", float("-inf"), "hidden_dropout = -inf: must be a finite number"),
        ("overlap", 1, "overlap = 1: must be bool"),
        ("name", 5, "name = 5: must be str"),
        ("unit", 1.5, "unit = 1.5: must be int or null"),
        ("dispatcher", "flex", "dispatcher = 'flex': must be one of allgather, alltoall"),
        ("granularity", "all", "granularity = 'all': must be one of full, selective or null"),
        ("version", 4, "version = 4: must be one of 2, 3 or null"),
        ("modern", 1.5, "modern = 1.5: must be int or str or null"),
        ("activation_func", "swiglu", "activation_func = 'swiglu': must be one of "
         "silu, gelu, relu, quick_gelu"),
        ("grad_scale_func", "f", "grad_scale_func = 'f': takes collections.abc.Callable or null, "
         "which a configuration file cannot hold; leave it out"),
        ("tensor_model_parallel_size", 2, "tensor_model_parallel_size = 2: has a key of its own; "
         "use parallel.tensor_model_parallel_size"),
        ("params_dtype", "bf16", "params_dtype = 'bf16': has a key of its own; "
         "use training.precision"),
        ("vocab_size", 100, "vocab_size = 100: has a key of its own; use model.vocab_size"),
        ("calculate_per_token_loss", True, "calculate_per_token_loss = true: is set by the "
         "training step; leave it out"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fields")
def test_each_wrong_field_is_one_line(name: str, value: Any, line: str) -> None:
    assert wrong_with(**{name: value}) == [f"model.megatron.{line}"]


def test_a_machine_without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing Megatron-Core is reported only if the configuration sets fields of it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    installed_fields.cache_clear()
    assert list(megatron_problems("parallel.ddp", {})) == []
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"tokenizer": "t"}, "optimizer": {"megatron": {"optimizer": "sgd"}}})
    assert caught.value.problems == [
        "optimizer.megatron: cannot check optimizer: megatron-core is not installed; "
        "install it, or leave this section out"
    ]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_legal_for_the_installed_megatron(preset: str) -> None:
    assert wrong_with(**PRESETS[preset].megatron) == []


def test_loading_reports_fields_of_all_three_classes_with_schema_problems() -> None:
    values = {
        "data": {"tokenizer": "t"},
        "model": {"megatron": {"hidden_sise": 64, "moe_router_dtype": "fp33"}},
        "optimizer": {"megatron": {"adam_beta1": 0.9, "exp_avg_dtype": "bf16"}},
        "parallel": {"ddp": {"bukcet_size": 3, "bucket_size": 4}},
        "training": {"steps": -1},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    steps, size, dtype, beta, average, bucket = caught.value.problems
    assert steps.startswith("training.steps = -1: ")
    assert size.startswith("model.megatron.hidden_sise = 64: ") and "hidden_size?" in size
    assert dtype.startswith("model.megatron.moe_router_dtype = 'fp33': must be one of fp32, fp64")
    assert beta == "optimizer.megatron.adam_beta1 = 0.9: has a key of its own; use optimizer.beta1"
    assert average.startswith("optimizer.megatron.exp_avg_dtype = 'bf16': takes torch.dtype")
    assert bucket.startswith("parallel.ddp.bukcet_size = 3: ") and "bucket_size?" in bucket
