"""Mended: what Megatron-Core takes for granted of Transformer Engine, where it is and where it is
not."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_megatron.platform import megatron_fixes

# isort: split
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.moe import moe_utils

from tests.unit.platform.stock import fresh, is_0_16, needs_no_engine


@needs_no_engine
def test_the_router_knows_that_transformer_engine_is_missing() -> None:
    assert moe_utils.te_general_gemm is None


@needs_no_engine
def test_stock_routers_read_a_name_that_is_not_there() -> None:
    if hasattr(fresh(moe_utils), "te_general_gemm"):
        assert not is_0_16(), "0.16 binds the name now: the mending can go"


def stock_grouped_linear() -> type:
    """With the method as on disk: the class itself is made only where Transformer Engine is."""
    source = Path(transformer_engine.__file__).read_text(encoding="utf-8")
    (function,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_split_extra_state"
    )
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(ast.unparse(function)), {"te": None, "torch": torch}, namespace)
    return type("TEGroupedLinear", (), namespace)


# In FP8, with a recipe that keeps nothing: Transformer Engine decodes what is empty to None.
MODULE = SimpleNamespace(
    num_gemms=3,
    fp8=True,
    fp8_calibration=False,
    fp8_meta={"fp8_checkpoint": True, "recipe": None},
    _decode_extra_state=lambda state: None,
)


@pytest.mark.parametrize("state", [torch.empty(0, dtype=torch.uint8), None])
def test_an_empty_extra_state_is_empty_for_each_expert(
    state: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = stock_grouped_linear()
    monkeypatch.setattr(transformer_engine, "TEGroupedLinear", grouped)
    megatron_fixes._split_empty_extra_state()
    split = grouped._split_extra_state(MODULE, state)
    assert len(split) == 3 and all(part is state for part in split)


def test_what_is_not_empty_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = stock_grouped_linear()
    monkeypatch.setattr(transformer_engine, "TEGroupedLinear", grouped)
    megatron_fixes._split_empty_extra_state()
    not_in_fp8 = SimpleNamespace(**vars(MODULE) | {"fp8": False, "fp8_meta": {"fp8_checkpoint": 0}})
    state = torch.ones(4)
    assert grouped._split_extra_state(not_in_fp8, state) == [state] * 3


def test_stock_looks_for_experts_in_what_is_empty() -> None:
    split = stock_grouped_linear()._split_extra_state
    try:
        split(MODULE, torch.empty(0, dtype=torch.uint8))
    except TypeError:
        return
    assert not is_0_16(), "0.16 splits an empty state now: the mending can go"
