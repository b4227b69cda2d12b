"""Each fix of platform.megatron_fixes works, and the installed Megatron-Core still needs it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_megatron.platform import megatron_fixes
from tests.unit.platform import stock

# isort: split
import megatron.core
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

needs_no_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)


def fresh(module: ModuleType) -> ModuleType:
    """A module imported anew, which replaces nothing."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(made)
    return made


def is_0_16() -> bool:
    """Of the line for Python 3.10 and 3.11."""
    return megatron.core.__version__.startswith("0.16")


@needs_no_engine
def test_the_router_knows_that_transformer_engine_is_missing() -> None:
    assert moe_utils.te_general_gemm is None


@needs_no_engine
def test_stock_routers_read_a_name_that_is_not_there() -> None:
    if hasattr(fresh(moe_utils), "te_general_gemm"):
        assert not is_0_16(), "0.16 binds the name now: the mending can go"


@pytest.fixture
def stock_split() -> Callable[..., list[Any]]:
    """The method as on disk: its class is made only where Transformer Engine is."""
    method = stock.function("extensions/transformer_engine.py", "_split_extra_state")
    namespace: dict[str, Any] = {}
    exec(method, {"te": None, "torch": torch}, namespace)
    return namespace["_split_extra_state"]


@pytest.fixture
def mended_split(
    stock_split: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    grouped = type("TEGroupedLinear", (), {"_split_extra_state": stock_split})
    monkeypatch.setattr(transformer_engine, "TEGroupedLinear", grouped)
    megatron_fixes._split_empty_extra_state()
    return grouped._split_extra_state


# In FP8, with a recipe that keeps nothing: Transformer Engine decodes what is empty to None.
MODULE = SimpleNamespace(
    num_gemms=3,
    fp8=True,
    fp8_calibration=False,
    fp8_meta={"fp8_checkpoint": True, "recipe": None},
    _decode_extra_state=lambda state: None,
)


EMPTY = torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("state", [EMPTY, None])
def test_an_empty_extra_state_is_empty_for_each_expert(
    mended_split: Callable[..., list[Any]], state: torch.Tensor | None
) -> None:
    split = mended_split(MODULE, state)
    assert len(split) == 3 and all(part is state for part in split)


def test_what_is_not_empty_is_stocks(mended_split: Callable[..., list[Any]]) -> None:
    not_in_fp8 = SimpleNamespace(**vars(MODULE) | {"fp8": False, "fp8_meta": {"fp8_checkpoint": 0}})
    state = torch.ones(4)
    assert mended_split(not_in_fp8, state) == [state] * 3


def test_stock_looks_for_experts_in_what_is_empty(stock_split: Callable[..., list[Any]]) -> None:
    try:
        stock_split(MODULE, EMPTY)
    except TypeError:
        return
    assert not is_0_16(), "0.16 splits an empty state now: the mending can go"


def _router(experts: int) -> SimpleNamespace:
    return SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(experts))


ROUTES = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
PADDING = torch.tensor([False, True, False, True])


def test_real_tokens_of_each_expert_are_counted() -> None:
    router = _router(3)
    TopKRouter._apply_expert_bias(router, ROUTES, padding_mask=PADDING)
    assert router.local_tokens_per_expert.tolist() == [2, 1, 1]
    TopKRouter._apply_expert_bias(router, ROUTES)
    assert router.local_tokens_per_expert.tolist() == [5, 4, 3]


def test_stock_routers_cannot_count_with_a_mask() -> None:
    native = TopKRouter._apply_expert_bias.__wrapped__
    with pytest.raises(RuntimeError, match="must match"):  # or the mending can go
        native(_router(3), ROUTES, padding_mask=PADDING)


@needs_no_engine
def test_latent_attention_knows_that_transformer_engine_is_missing() -> None:
    assert not multi_latent_attention.HAVE_TE


@needs_no_engine
def test_stock_latent_attention_takes_mocks_for_transformer_engine() -> None:
    stock = fresh(multi_latent_attention)
    if isinstance(stock.TELinear, type) or not stock.HAVE_TE:
        assert not is_0_16(), "0.16 says so by itself now: the mending can go"
