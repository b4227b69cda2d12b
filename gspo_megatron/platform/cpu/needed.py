"""Substitutes that stock Megatron-Core needs to run without CUDA. Nothing here is about speed.

Megatron-Core allocates on 'cuda', synchronises streams and compares tensor type names in a few
dozen places. With the substitutes below, the unchanged package runs on CPU tensors and over gloo,
with the same code as on GPUs. Tensor factories are wrapped; all other operations are unchanged.
With CUDA `install` does nothing. tests/unit/platform/test_cpu_needed.py fails when an upgrade of
Megatron-Core makes a substitution superfluous. Code that only saves time is in `faster`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")

# Factories that megatron.core calls with device='cuda' or torch.cuda.current_device().
FACTORIES = ("empty", "zeros", "ones", "tensor", "empty_like")

# Megatron-Core uses the kernels of these packages whenever it can import them. The packages may be
# installed on a machine without a GPU, or on a machine whose GPU is hidden for a dry run. On these
# machines the kernels cannot compute, so importing these packages must fail.
GPU_PACKAGES = ("transformer_engine", "apex", "amp_C")


class InertStream:
    """Replaces a CUDA stream or event. Its methods do nothing, because on a CPU the work is done
    when a call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def _same(self, *_args: Any, **_kwargs: Any) -> InertStream:
        return self

    record_event = wait_event = wait_stream = synchronize = _same

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InertStream)

    def __hash__(self) -> int:
        return 0


class Splits(list):
    """A list of split sizes, for callers that expect a numpy array of split sizes."""

    def tolist(self) -> list:
        return list(self)


def is_needed() -> bool:
    """True on machines without CUDA."""
    return not torch.cuda.is_available()


def install() -> None:
    """Make `megatron.core` importable and runnable on a CPU. Called once."""
    if not is_needed():
        return
    _redirect_factories()
    _redirect_tensor_methods()
    _replace_cuda_runtime()
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(GPU_PACKAGES))  # None: an import raises ImportError
    # Megatron-Core compiles its small fused functions by torch.compile. On a CPU this would need a
    # C++ compiler, save no time, and take 2 s per rank, because the decorator alone imports dynamo.
    native = torch.compile
    _substitute(torch, compile=lambda model=None, **_named: model or (lambda function: function))
    try:
        import megatron.core
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        _substitute(torch, compile=native)
    _adapt_megatron()


def _substitute(owner: object, **functions: object) -> None:
    """Give attributes of a module or a class other values."""
    for name, function in functions.items():
        setattr(owner, name, function)


def _is_cuda(device: Any) -> bool:
    if device is None or device is CPU:
        return False
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) or getattr(device, "type", None) == "cuda"


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _redirect_factories() -> None:
    # `with torch.device(...)` makes a list of the factories at its first use. This list must be
    # made before the factories are replaced. Otherwise the list would lack the native factories,
    # and models of transformers, which are built on "meta" and filled later, would keep
    # uninitialised buffers.
    torch.utils._device._device_constructors()
    _substitute(torch, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})


def _redirect_tensor_methods() -> None:
    native_type = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return native_type(self, dtype, *args, **kwargs)
        name = native_type(self)
        # DistributedOptimizer sorts parameters by names such as torch.cuda.FloatTensor.
        return f"torch.cuda.{name.rpartition('.')[2]}" if self.is_floating_point() else name

    _substitute(
        torch.Tensor,
        type=type_name,
        cuda=lambda self, *_args, **_kwargs: self,
        record_stream=_do_nothing(),
    )


def _do_nothing() -> Callable[..., None]:
    """Return a function that does nothing. Every call returns a new function, because dynamo has
    one rule for each function and refuses a second rule for the same function."""
    return lambda *_args, **_kwargs: None


def _replace_cuda_runtime() -> None:
    # Megatron's RNG tracker forks the CUDA generator. On a CPU, the default generator takes its
    # place.
    def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    _substitute(
        torch.cuda,
        current_device=lambda: CPU,
        set_device=_do_nothing(),
        synchronize=_do_nothing(),
        Stream=InertStream,
        Event=InertStream,
        current_stream=InertStream,
        default_stream=InertStream,
        stream=lambda *_args: contextlib.nullcontext(),
        get_rng_state=get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=torch.default_generator.manual_seed,
    )
    _substitute(torch.cuda.random, get_rng_state=get_rng_state)
    _substitute(torch.cuda.nvtx, range_push=_do_nothing(), range_pop=_do_nothing())


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _adapt_megatron() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tracker._set_cuda_rng_state = _set_rng_state
    native_move = moe_utils.maybe_move_tensor_to_cpu

    def move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # stock Megatron-Core returns CPU tensors unchanged, but all_to_all_single needs a list of
        # ints
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return Splits(tensor.tolist())
        return native_move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    moe_utils.maybe_move_tensor_to_cpu = move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = move_tensor_to_cpu

    mappings._gather_along_first_dim = _uneven(mappings._gather_along_first_dim, _gather_uneven)
    mappings._reduce_scatter_along_first_dim = _uneven(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_uneven
    )


def _uneven(native: Any, substitute: Any) -> Any:
    """Use `substitute` if the shares of the ranks are unequal, as they are with expert tensor
    parallelism. Gloo can gather and scatter only equal shares."""

    @functools.wraps(native)
    def collective(
        input_: torch.Tensor, group: Any = None, split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        for name in ("input_split_sizes", "output_split_sizes"):
            split_sizes = kwargs.pop(name, split_sizes)
        if split_sizes is None or group.size() == 1 or len(set(split_sizes)) == 1:
            return native(input_, group, split_sizes, *args, **kwargs)
        return substitute(input_, group, list(split_sizes))

    return collective


def _gather_uneven(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Pad each share to the largest one, gather, and cut the padding off."""
    most = max(sizes)
    padded = input_.new_zeros((most, *input_.shape[1:]))
    padded[: len(input_)] = input_
    shares = input_.new_empty((most * len(sizes), *input_.shape[1:]))
    torch.distributed.all_gather_into_tensor(shares, padded, group=group)
    return torch.cat([s[:n] for s, n in zip(shares.split(most), sizes, strict=True)])


def _reduce_scatter_uneven(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum the whole tensor over all ranks, and keep this rank's share."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
