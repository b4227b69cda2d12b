"""Stock Megatron-Core on a machine without CUDA: every substitution in one place.

Megatron-Core allocates on 'cuda', synchronises streams and compares tensor type names in a few
dozen places. With the substitutes below the unchanged package runs over gloo on CPU tensors, by the
same code as on GPUs. Tensor factories are wrapped; all other operations run as they are. With CUDA
`install` does nothing. tests/unit/platform/test_megatron_cpu.py fails when an upgrade of
Megatron-Core makes a substitution superfluous.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any

import torch
import torch.utils._device

from gspo_megatron.platform.cpu.host_collectives import COLLECTIVES, substitute

CPU = torch.device("cpu")

# Factories that megatron.core calls with device='cuda' or torch.cuda.current_device().
FACTORIES = ("empty", "zeros", "ones", "tensor", "empty_like")

# Megatron-Core uses their kernels whenever it can import them. They may be installed on a machine
# without a GPU, or with a GPU hidden for a dry run, where the kernels cannot compute.
GPU_PACKAGES = ("transformer_engine", "apex", "amp_C")

# Options of glibc's mallopt (malloc.h), with values in bytes. The last one is as large as is legal.
MALLOC_OPTIONS = {
    -1: 256 * 2**20,  # M_TRIM_THRESHOLD: free memory at the end of the heap that the process keeps
    -3: 32 * 2**20,  # M_MMAP_THRESHOLD: larger blocks are apart and go back when they are freed
}

_installed = False


class InertStream:
    """Replaces a CUDA stream or event: on a CPU the work is done when a call returns."""

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
    """Split sizes as ints, for callers that expect a numpy array of them."""

    def tolist(self) -> list:
        return list(self)


def is_needed() -> bool:
    """True on machines without CUDA."""
    return not torch.cuda.is_available()


def install() -> None:
    """Make `megatron.core` importable and runnable on CPU; once, and only without CUDA."""
    global _installed
    if _installed or not is_needed():
        return
    _installed = True
    _redirect_factories()
    _redirect_tensor_methods()
    _replace_cuda_runtime()
    _keep_freed_memory()
    _replace_collectives()
    _share_gloo_devices()
    for name in GPU_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]  # an import raises ImportError
    # Megatron-Core compiles its small fused functions. On a CPU this gains nothing, and the
    # decorator alone imports dynamo (2 s per rank).
    native = torch.compile
    torch.compile = lambda model=None, **_kwargs: model or (lambda function: function)
    try:
        import megatron.core
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
    finally:
        torch.compile = native
    _adapt_megatron()


def _keep_freed_memory() -> None:
    """Tensors of one update have freed their memory when those of the next one need it. By default
    glibc gives it back to the system meanwhile, which then has to clear thousands of pages a step.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if set_option is not None:
        for option, value in MALLOC_OPTIONS.items():
            set_option(option, value)


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
    # `with torch.device(...)` lists the factories at its first use. Made after this, the list would
    # lack the native ones, and models of transformers, built on "meta" and filled later, would
    # keep uninitialised buffers.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    native_type = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return native_type(self, dtype, *args, **kwargs)
        name = native_type(self)
        # DistributedOptimizer sorts parameters by names such as torch.cuda.FloatTensor.
        return f"torch.cuda.{name.rpartition('.')[2]}" if self.is_floating_point() else name

    torch.Tensor.type = type_name
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.Tensor.record_stream = lambda self, *_args: None


def _replace_cuda_runtime() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *_args: None
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.Stream = cuda.Event = InertStream
    cuda.current_stream = cuda.default_stream = InertStream
    cuda.stream = lambda *_args: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_args, **_kwargs: None
    # Megatron's RNG tracker forks 'the CUDA generator': here the CPU's default one.
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _replace_collectives() -> None:
    """Megatron-Core's modules keep some under names of their own when they are imported."""
    for name, own in COLLECTIVES.items():
        setattr(torch.distributed, name, substitute(getattr(torch.distributed, name), own))


def _share_gloo_devices() -> None:
    """All process groups use the first one's devices. Each device has a thread that wakes up a
    hundred times a second, and Megatron-Core makes twenty groups, most of them of one rank."""
    gloo = torch.distributed.ProcessGroupGloo
    native, known = gloo.__init__, {}  # by process: a fork has none of the threads

    @functools.wraps(native)
    def start(self: Any, store: Any, rank: int, size: int, *others: Any, **named: Any) -> None:
        devices = known.get(os.getpid())
        is_usual = not others and all(name == "timeout" or not named[name] for name in named)
        if devices is None or not is_usual:
            native(self, store, rank, size, *others, **named)
            if is_usual:
                known[os.getpid()] = self.options._devices
            return
        options = gloo._Options()
        options._devices, options._timeout = devices, named.get("timeout", options._timeout)
        native(self, store, rank, size, options)

    gloo.__init__ = start


def _adapt_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tracker._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    native_move = moe_utils.maybe_move_tensor_to_cpu

    def move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # stock returns CPU tensors unchanged, and all_to_all_single needs a list of ints
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return Splits(tensor.tolist())
        return native_move(tensor, as_numpy=as_numpy, record_stream=record_stream)

    moe_utils.maybe_move_tensor_to_cpu = move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = move_tensor_to_cpu

    token_dispatcher.sort_chunks_by_idxs = _unless_sorted(token_dispatcher.sort_chunks_by_idxs)
    token_dispatcher.all_to_all = _unless_alone(token_dispatcher.all_to_all)

    rope_utils._apply_rotary_pos_emb_thd = _turned_at_once(rope_utils._apply_rotary_pos_emb_thd)

    mappings._gather_along_first_dim = _uneven(mappings._gather_along_first_dim, _gather_uneven)
    mappings._reduce_scatter_along_first_dim = _uneven(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_uneven
    )


def _unless_sorted(native: Any) -> Any:
    """With all experts on a rank the dispatcher's second sort copies the tokens as they are."""

    @functools.wraps(native)
    def sort(
        input: torch.Tensor,
        split_sizes: torch.Tensor,
        sorted_idxs: torch.Tensor,
        probs: torch.Tensor | None = None,
        fused: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if sorted_idxs.tolist() == list(range(len(sorted_idxs))):
            return input, probs
        return native(input, split_sizes, sorted_idxs, probs=probs, fused=fused)

    return sort


def _unless_alone(native: Any) -> Any:
    """A rank with all experts sends its tokens to nobody. Stock runs an autograd function for that,
    three times a layer, each of which takes 10 to 20 microseconds a pass."""

    @functools.wraps(native)
    def send(group: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input_ if group.size() == 1 else native(group, input_, *args, **kwargs)

    return send


def _turned_at_once(native: Any) -> Any:
    """Rotary embedding of packed sequences. Stock slices the angles of each sequence anew, in every
    layer for queries and for keys; here a micro-batch has tables, which its boundaries carry."""

    @functools.wraps(native)
    def turn(
        states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *others: Any,
        mscale: float = 1.0,
        cp_group: Any = None,
        **switches: Any,  # each turns other pairs of channels; the names differ between versions
    ) -> torch.Tensor:
        named = {"mscale": mscale, "cp_group": cp_group}
        in_part = freqs.shape[-1] != states.shape[-1]  # some channels are not turned
        if in_part or others or any(switches.values()):
            return native(states, cu_seqlens, freqs, *others, **named, **switches)
        tables = vars(cu_seqlens).setdefault("rotary_tables", {})
        key = (id(freqs), mscale, cp_group, states.dtype)
        if key not in tables:
            # What becomes of (1, 0) is (cos, sin).
            unit = states.new_zeros((len(states), 1, states.shape[-1]))
            unit[..., : states.shape[-1] // 2] = 1.0
            cos, sin = native(unit, cu_seqlens, freqs, **named).chunk(2, dim=-1)
            tables[key] = torch.cat((cos, cos), -1), sin.contiguous(), freqs
        return _Turn.apply(states, *tables[key][:2])

    return turn


class _Turn(torch.autograd.Function):
    """Pairs (first half, second half of the channels) turned by angles."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _turned(gradient, *ctx.saved_tensors, -1), None, None


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """states [tokens, heads, dim], cos [tokens, 1, dim], sin [tokens, 1, dim / 2]."""
    turned = states * cos
    (low, high), (low_out, high_out) = states.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    low_out.addcmul_(high, sin, value=-sign)
    high_out.addcmul_(low, sin, value=sign)
    return turned


def _uneven(native: Any, substitute: Any) -> Any:
    """Gloo gathers and scatters only equal shares; expert tensor parallelism has unequal ones."""

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
    """Pad to the largest share, gather, cut."""
    most = max(sizes)
    padded = input_.new_zeros((most, *input_.shape[1:]))
    padded[: len(input_)] = input_
    shares = input_.new_empty((most * len(sizes), *input_.shape[1:]))
    torch.distributed.all_gather_into_tensor(shares, padded, group=group)
    return torch.cat([s[:n] for s, n in zip(shares.split(most), sizes, strict=True)])


def _reduce_scatter_uneven(input_: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum everything, keep this rank's share."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
