"""Each fix in platform.megatron_fixes works, and the installed Megatron-Core still needs it."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_megatron.models.build import Policy
from gspo_megatron.platform import megatron_fixes
from tests.unit.models.one_rank import tiny_policy
from tests.unit.platform import stock

# isort: split
import megatron.core
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

needs_no_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)


def fresh(module: ModuleType) -> ModuleType:
    """Execute a module a second time. `sys.modules` keeps the module of the first import."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(made)
    return made


def is_0_16() -> bool:
    """Whether this is Megatron-Core 0.16, the version for Python 3.10 and 3.11."""
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
    """The method `_split_extra_state`, taken from the source file, because its class exists only if
    Transformer Engine is installed."""
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


# A module in FP8 whose recipe has no state. For such a module, Transformer Engine decodes an empty
# state to None.
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
    # If this raises no error any more, the fix can be removed.
    with pytest.raises(RuntimeError, match="must match"):
        native(_router(3), ROUTES, padding_mask=PADDING)


def _routers_in_bf16() -> tuple[Policy, list[TopKRouter]]:
    megatron = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.01],
        "moe_router_bias_update_rate": 1e-3,
    }
    policy = tiny_policy(model={"megatron": megatron}, training={"precision": "bf16"})
    return policy, [m for m in policy.models[0].modules() if isinstance(m, TopKRouter)]


def test_counts_of_tokens_stay_exact_in_bf16(one_rank: None) -> None:
    """The first expert gets one token more than the others. float32 cannot represent this count."""
    policy, [first, *_] = _routers_in_bf16()
    experts = len(first.expert_bias)
    first.local_tokens_per_expert += 2**24
    first._apply_expert_bias(torch.eye(experts, dtype=torch.bool)[:1])
    assert first.local_tokens_per_expert.tolist() == [2**24 + 1] + [2**24] * (experts - 1)
    _update_router_expert_bias(policy.models, first.config)
    assert first.expert_bias.sign().tolist() == [-1] + [1] * (experts - 1)


def test_no_counter_of_a_router_is_in_bf16_before_or_after_a_pass(one_rank: None) -> None:
    policy, routers = _routers_in_bf16()
    for steps in (300, 301):
        for router in routers:
            if steps == 300:
                router.ga_steps += 300
            kinds = {name: buffer.dtype for name, buffer in router.named_buffers()}
            assert len(kinds) == 4 and torch.bfloat16 not in kinds.values(), kinds
            assert router.ga_steps == steps  # in bf16, 300 + 1 would be 300
            assert router.weight.dtype is torch.bfloat16
        ids, positions = torch.arange(8)[None], torch.arange(8)[None]
        policy.models[0].train()(input_ids=ids, position_ids=positions, attention_mask=None)


def test_stock_routers_count_in_bf16(one_rank: None) -> None:
    _, [router, *_] = _routers_in_bf16()
    router.local_tokens_per_expert.fill_(256)
    TopKRouter._apply.__wrapped__(router, torch.Tensor.bfloat16)
    router._apply_expert_bias(torch.ones(1, len(router.expert_bias), dtype=torch.bool))
    # If this assertion fails, the fix can be removed.
    assert set(router.local_tokens_per_expert.tolist()) == {256}


def test_the_z_loss_of_bf16_logits_is_no_bf16_sum(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are equal. So the mean of the loss over any number of tokens is the loss of one
    token."""
    _, [router, *_] = _routers_in_bf16()
    seen = SimpleNamespace(apply=lambda logits, loss: loss)
    monkeypatch.setattr(moe_utils, "MoEAuxLossAutoScaler", seen)
    router = SimpleNamespace(
        config=SimpleNamespace(moe_z_loss_coeff=1.0),
        training=True,
        calculate_per_token_loss=False,
        tp_cp_group=router.tp_cp_group,
    )
    loss = TopKRouter.apply_z_loss(router, torch.ones(257, 4, dtype=torch.bfloat16))
    assert float(loss) == pytest.approx((1 + math.log(4)) ** 2, rel=1e-6)


@needs_no_engine
def test_latent_attention_knows_that_transformer_engine_is_missing() -> None:
    assert not multi_latent_attention.HAVE_TE


@needs_no_engine
def test_stock_latent_attention_takes_mocks_for_transformer_engine() -> None:
    stock = fresh(multi_latent_attention)
    if isinstance(stock.TELinear, type) or not stock.HAVE_TE:
        assert not is_0_16(), "0.16 says so by itself now: the mending can go"


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")
def test_stock_delta_nets_are_not_built_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nets = megatron_fixes._delta_nets()
    assert nets.HAVE_FLA
    source = Path(nets.__file__).read_text(encoding="utf-8")
    assert "if not HAVE_FLA:\n            raise ImportError" in source, "the mending can go"
    # The fix replaces this function, and no other function is missing.
    assert nets.chunk_gated_delta_rule is None
    state = torch.zeros(1)
    config = SimpleNamespace(deterministic_mode=False)
    assert not megatron_fixes.has_delta_rule_kernels(state, config)
    monkeypatch.setattr(nets, "chunk_gated_delta_rule", print)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert megatron_fixes.has_delta_rule_kernels(on_gpu, config) is not is_0_16()
    config.deterministic_mode = True
    assert not megatron_fixes.has_delta_rule_kernels(on_gpu, config)
