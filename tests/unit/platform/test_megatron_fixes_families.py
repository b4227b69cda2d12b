"""Mended: what models beside Qwen's meet in Megatron-Core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import gspo_megatron.platform  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.router import TopKRouter

from tests.unit.platform.stock import fresh, is_0_16, needs_no_engine


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
