"""Fields of megatron-core's classes, read from source."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import PRESETS, parse_config
from gspo_megatron.config.megatron_fields import (
    find_megatron_core,
    megatron_problems,
    read_fields,
)
from gspo_megatron.errors import ConfigError

BASE = '''
import torch

def helper(shards_field: str = "x") -> None:
    """Annotated arguments are no fields."""

@dataclass
class ModelParallelConfig:
    """Doc."""
    tensor_model_parallel_size: int = 1
    overlap: bool = False
    """A docstring with a line such as
       note: not a field
    """
    grad_scale_func: Optional[Callable] = None
    _private: Optional[int] = None
    def __post_init__(self):
        local: int = 3
'''
DERIVED = """
@dataclass
class TransformerConfig(ModelParallelConfig):
    num_layers: int = field(default=0, metadata={"a": 1})
    num_query_groups: Optional[int] = field(default=None)
    hidden_dropout: float = 0.1
    window_size: Optional[Tuple[int, int]] = None
    dispatcher: Literal['allgather', "alltoall"] = "allgather"
    granularity: Optional[Literal['full', 'selective']] = None
    version: Optional[Literal[2, 3]] = None
    frequency: Union[int, List[int]] = 1
    name: str = ""
    unit: int = None
    modern: int | str | None = None
    params_dtype: torch.dtype = torch.float32
    init_method: Callable[[torch.Tensor], torch.Tensor] = None
    activation_func: Callable = F.gelu
    attention_backend: AttnBackend = AttnBackend.auto

@dataclass
class MLATransformerConfig(TransformerConfig):
    q_lora_rank: int = 512
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A folder laid out as megatron/core is."""
    files = {
        "model_parallel_config.py": BASE,
        "transformer/transformer_config.py": DERIVED,
        "optimizer/optimizer_config.py": "class OptimizerConfig:\n    lr: float = 1.0\n"
        "    optimizer: str = 'adam'\n    exp_avg_dtype: torch.dtype = torch.float32\n",
    }
    for name, text in files.items():
        path = tmp_path / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path / "core"


def wrong_with(core: Path, **values: Any) -> list[str]:
    return list(megatron_problems("model.megatron", values, lambda: core))


def test_fields_are_the_annotated_names_of_class_and_base(core: Path) -> None:
    fields = read_fields(core, "model.megatron")
    assert {"tensor_model_parallel_size", "overlap", "num_layers", "modern"} < set(fields)
    assert not {"note", "local", "_private", "shards_field", "q_lora_rank"} & set(fields)
    assert isinstance(fields["num_layers"].annotation, ast.Name)


@pytest.mark.parametrize(
    "values",
    [
        {"num_layers": 3, "hidden_dropout": 0, "overlap": True, "name": "x"},
        {"num_query_groups": None, "version": 3, "granularity": None, "unit": None},
        {"dispatcher": "alltoall", "frequency": [1, 0], "window_size": [1, 2]},
        {"modern": "x", "activation_func": "silu", "attention_backend": "flash"},
    ],
)
def test_values_that_fit_their_annotation_pass(core: Path, values: dict[str, Any]) -> None:
    assert wrong_with(core, **values) == []


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
        ("hidden_dropout", "0", "hidden_dropout = '0': must be float"),
        ("hidden_dropout", True, "hidden_dropout = true: must be float"),
        ("overlap", 1, "overlap = 1: must be bool"),
        ("name", 5, "name = 5: must be str"),
        ("unit", 1.5, "unit = 1.5: must be int"),
        ("dispatcher", "flex", "dispatcher = 'flex': must be one of allgather, alltoall"),
        ("granularity", "all", "granularity = 'all': must be one of full, selective or null"),
        ("version", 4, "version = 4: must be one of 2, 3 or null"),
        ("modern", 1.5, "modern = 1.5: must be int or str or null"),
        ("activation_func", "swiglu", "activation_func = 'swiglu': must be one of "
         "silu, gelu, relu"),
        ("grad_scale_func", "f", "grad_scale_func = 'f': takes Optional[Callable], "
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
def test_each_wrong_field_is_one_line(core: Path, name: str, value: Any, line: str) -> None:
    assert wrong_with(core, **{name: value}) == [f"model.megatron.{line}"]


def test_all_wrong_fields_are_reported(core: Path) -> None:
    assert len(wrong_with(core, num_layer=3, overlap="x", num_layers=2, vocab_size=3)) == 3


def test_missing_megatron_core_is_said_only_when_fields_are_given() -> None:
    assert list(megatron_problems("parallel.ddp", {}, lambda: None)) == []
    (line,) = megatron_problems("parallel.ddp", {"bucket_size": 3}, lambda: None)
    assert line == (
        "parallel.ddp: cannot check bucket_size: megatron-core is not installed; "
        "install it, or leave this section out"
    )


def test_loading_says_that_megatron_core_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="megatron-core is not installed"):
        parse_config({"data": {"tokenizer": "t"}, "optimizer": {"megatron": {"optimizer": "sgd"}}})


def test_a_megatron_core_with_files_elsewhere_is_a_clear_problem(core: Path) -> None:
    (line,) = megatron_problems("parallel.ddp", {"bucket_size": 3}, lambda: core)
    assert "cannot read DistributedDataParallelConfig of megatron-core" in line


def test_optimizer_fields_have_their_own_keys(core: Path) -> None:
    values = {"lr": 1.0, "optimizer": "sgd", "exp_avg_dtype": "bf16"}
    lines = list(megatron_problems("optimizer.megatron", values, lambda: core))
    assert len(lines) == 2
    assert lines[0].endswith("use optimizer.learning_rate")
    assert "takes torch.dtype" in lines[1]


@pytest.fixture(scope="module")
def installed() -> Path:
    found = find_megatron_core()
    if found is None:
        pytest.skip("megatron-core is not installed")
    return found


def test_installed_classes_have_the_fields_we_rely_on(installed: Path) -> None:
    model = read_fields(installed, "model.megatron")
    assert {"num_moe_experts", "sequence_parallel", "moe_router_dtype", "bf16"} < set(model)
    assert {"lr", "clip_grad", "adam_eps"} < set(read_fields(installed, "optimizer.megatron"))
    assert "bucket_size" in read_fields(installed, "parallel.ddp")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_legal_for_the_installed_megatron(installed: Path, preset: str) -> None:
    values = PRESETS[preset].megatron
    assert list(megatron_problems("model.megatron", values, lambda: installed)) == []


def test_fields_read_from_source_are_those_of_the_imported_classes(installed: Path) -> None:
    # In a process of its own: other tests make megatron.core fit for CPU before they import it.
    code = """
import dataclasses, json
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
classes = {"model.megatron": TransformerConfig, "optimizer.megatron": OptimizerConfig,
           "parallel.ddp": DistributedDataParallelConfig}
print(json.dumps({k: [f.name for f in dataclasses.fields(c)] for k, c in classes.items()}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    for section_key, names in json.loads(done.stdout.splitlines()[-1]).items():
        public = {name for name in names if not name.startswith("_")}
        assert set(read_fields(installed, section_key)) == public


def test_loading_reports_fields_of_all_three_classes_with_schema_problems(
    installed: Path,
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {
                "data": {"tokenizer": "t"},
                "model": {"megatron": {"hidden_sise": 64}},
                "optimizer": {"megatron": {"adam_beta1": 0.9}},
                "parallel": {"ddp": {"bukcet_size": 3}},
                "training": {"steps": 0},
            }
        )
    keys = [line.split(" ")[0] for line in caught.value.problems]
    assert keys == [
        "training.steps",
        "model.megatron.hidden_sise",
        "optimizer.megatron.adam_beta1",
        "parallel.ddp.bukcet_size",
    ]
