"""The table in docs/checkpoints.md of the features of each family, compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_megatron.config import check_config, parse_config
from gspo_megatron.errors import ConfigError
from gspo_megatron.families import FAMILIES, describe
from tests.programs import ROOT
from tests.unit.hf.published import CONFIGS, write_model
from tests.vllm.test_families import SERVED

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def table() -> dict[str, dict[str, str]]:
    """The cells of each family, by the names of their columns."""
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    [found] = re.findall(r"^\| `model_type` \| import.*?\n\n", page, re.MULTILINE | re.DOTALL)
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in found.split("\n")[:-2]
    )
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def accepts(folder: Path, **sections: object) -> bool:
    """Whether the rules accept a run of this model on two ranks."""
    model = {"hf_path": str(folder), "backend": "torch_native"}
    config = parse_config({"model": model, "data": {"tokenizer": "none"}, **sections})
    try:
        check_config(config, 2)
    except ConfigError:
        return False
    return True


def test_each_family_has_a_row() -> None:
    assert table().keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_says_what_the_family_can_do(family: str, tmp_path: Path) -> None:
    row = table()[family]
    model = write_model(tmp_path / "model", family, seed=1)
    can = {
        "import and export": family in CONFIGS,
        "CP": accepts(model, parallel={"layout": "cp=2"}),
        "packing": accepts(model, training={"packing": True}),
        "rollouts in process": accepts(model, rollout={"engine": "megatron"}),
        "vLLM on CPUs": family in SERVED,
        "FP8 import": not problems_of(CONFIGS[family] | {"quantization_config": FP8}),
        "same as transformers": family in CONFIGS,
    }
    assert {name: cell != "no" for name, cell in row.items()} == can


def problems_of(hf: dict[str, object]) -> list[str]:
    try:
        describe(hf)
    except ConfigError as error:
        return error.problems
    return []
