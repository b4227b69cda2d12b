"""Context variables in recomputation. Stock Megatron-Core loses them, and platform.megatron_fixes
keeps them.

Tests of the stock functions fail if an upgrade makes the fix unnecessary, or breaks it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import (
    CheckpointFunction,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch import Tensor

from gspo_megatron.platform import megatron_fixes
from tests.unit.platform import stock as megatron

TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None

variable: ContextVar[str] = ContextVar("variable", default="nothing")
Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def _random_states() -> Iterator[None]:
    before = get_cuda_rng_tracker().get_states()
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    yield
    get_cuda_rng_tracker().set_states(before)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CheckpointFunction.forward.__wrapped__
    monkeypatch.setattr(CheckpointFunction, "forward", staticmethod(forward))


def values_seen(*, in_a_thread: bool = False) -> list[str]:
    """The values of the variable that two checkpointed functions read, first in their forward
    passes, and then in recomputation."""
    seen: list[str] = []

    def read(hidden: Tensor) -> Tensor:
        seen.append(variable.get())
        return hidden * 2

    outputs = []
    for name in ("first", "second"):
        token = variable.set(name)
        hidden = torch.ones(3, requires_grad=True)
        outputs.append(CheckpointFunction.apply(read, False, hidden))
        variable.reset(token)

    def backward() -> None:
        # As in 1F1B, the backward pass of the first function comes after the forward pass of the
        # second.
        for output in outputs:
            output.sum().backward()

    if in_a_thread:  # autograd runs the backward pass of a device in a thread of its own
        with ThreadPoolExecutor() as threads:
            threads.submit(backward).result()
    else:
        backward()
    return seen


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_recomputation_sees_the_variables_of_its_forward_pass(in_a_thread: bool) -> None:
    assert values_seen(in_a_thread=in_a_thread) == ["first", "second", "first", "second"]


@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.usefixtures("stock")
def test_stock_recomputation_does_not(in_a_thread: bool) -> None:
    """If this fails, Megatron-Core itself keeps the context, and the fix can be removed."""
    assert values_seen(in_a_thread=in_a_thread) == ["first", "second", "nothing", "nothing"]


def test_nested_checkpoints_and_changes_inside() -> None:
    """The inner checkpoint gets the values that the outer function has set, in recomputation,
    too."""
    seen: list[str] = []

    def inner(hidden: Tensor) -> Tensor:
        seen.append(variable.get())
        return hidden * 3

    def outer(hidden: Tensor) -> Tensor:
        seen.append(variable.get())
        token = variable.set("inner")
        hidden = CheckpointFunction.apply(inner, False, hidden * 2)
        variable.reset(token)
        return hidden

    token = variable.set("outer")
    hidden = torch.ones(2, requires_grad=True)
    output = CheckpointFunction.apply(outer, False, hidden)
    variable.reset(token)
    output.sum().backward()
    # First the forward pass, then the recomputation of the outer function, then that of the inner
    # function in its backward pass.
    assert seen == ["outer", "inner", "outer", "inner", "inner"]
    assert hidden.grad.tolist() == [6.0, 6.0]


def test_the_mended_place_is_where_recomputation_takes_its_function_from() -> None:
    native = inspect.getsource(CheckpointFunction.forward.__wrapped__)
    assert "ctx.run_function = run_function" in native
    assert list(inspect.signature(CheckpointFunction.forward).parameters)[:2] == [
        "ctx",
        "run_function",
    ]
    assert "ctx.run_function(*" in inspect.getsource(CheckpointFunction.backward)


# Megatron-Core 0.19 has a file of its own for the recomputation of transformer blocks.
OF_BLOCKS = next(
    file
    for file in ("recompute.py", "transformer/transformer_block.py")
    if (megatron.CORE / file).exists()
)


@pytest.mark.parametrize("file", [OF_BLOCKS, "transformer/moe/moe_layer.py"])
def test_routers_are_recomputed_in_no_other_way(file: str) -> None:
    called = {ast.unparse(call.func) for call in megatron.calls(file)}
    ways = {name for name in called if name.endswith("checkpoint")}
    assert ways == {"tensor_parallel.checkpoint", "te_checkpoint"}
    assert "torch.utils.checkpoint" not in megatron.source(file)
    assert "router" not in megatron.source("tensor_parallel/random.py")


def test_megatron_takes_transformer_engines_function_at_each_call() -> None:
    """Megatron-Core imports the function at each call, from the module in which megatron_fixes
    replaces it. So the order of imports does not matter."""
    te_checkpoint = megatron.function("extensions/transformer_engine.py", "te_checkpoint")
    assert "from transformer_engine.pytorch.distributed import checkpoint" in te_checkpoint


class KeepsTheFunction(torch.autograd.Function):
    """A stand-in for Transformer Engine's checkpoint, which stores the function unchanged."""

    @staticmethod
    def forward(ctx: Any, function: Forward, kwargs: dict[str, Any], *args: Tensor) -> Tensor:
        ctx.function, ctx.kwargs = function, kwargs
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs, **ctx.kwargs)
        torch.autograd.backward(output, gradient)
        return (None, None, *(value.grad for value in inputs))


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the package Transformer Engine, which cannot be imported here."""
    names = ("", ".pytorch", ".pytorch.distributed")
    package, pytorch, distributed = (ModuleType(f"transformer_engine{name}") for name in names)

    def checkpoint(function: Forward, *args: Tensor, **kwargs: Any) -> Tensor:
        return KeepsTheFunction.apply(function, kwargs, *args)

    distributed.checkpoint = checkpoint
    package.pytorch, pytorch.distributed = pytorch, distributed
    for module in (package, pytorch, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # Restore the function after the test, because the fix is applied to it a second time.
    monkeypatch.setattr(CheckpointFunction, "forward", CheckpointFunction.forward)
    return distributed


@pytest.mark.skipif(
    TRANSFORMER_ENGINE, reason="a stand-in is tested where Transformer Engine is not installed"
)
@pytest.mark.parametrize("mended", [False, True])
def test_transformer_engines_recomputation(transformer_engine: ModuleType, mended: bool) -> None:
    if mended:
        megatron_fixes._carry_context_into_recompute()
    seen: list[tuple[str, float]] = []

    def read(hidden: Tensor, factor: float = 1.0) -> Tensor:
        seen.append((variable.get(), factor))
        return hidden * factor

    token = variable.set("first")
    hidden = torch.ones(2, requires_grad=True)
    output = transformer_engine.checkpoint(read, hidden, factor=4.0)
    variable.reset(token)
    output.sum().backward()
    assert seen == [("first", 4.0), ("first" if mended else "nothing", 4.0)]
    assert hidden.grad.tolist() == [4.0, 4.0]


@pytest.mark.skipif(
    not TRANSFORMER_ENGINE, reason="reads the source of Transformer Engine, which is not installed"
)
def test_transformer_engine_keeps_the_function_as_it_is() -> None:
    """If this fails, Transformer Engine may keep the context itself, or import the function from
    another module."""
    from transformer_engine.pytorch import distributed

    assert distributed.checkpoint.__wrapped__ is not None
    assert "ctx.run_function = run_function" in inspect.getsource(distributed)
