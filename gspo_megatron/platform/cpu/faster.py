"""Makes Megatron-Core faster on a CPU. No result depends on this, except for rounding.

The substitutes in `needed` are necessary. The substitutes in this file, in `host_collectives` and
in `windows` only save time. GSPO_CPU_FASTER=0 in the environment of all ranks turns them off.
Without these substitutes, sums are computed in a different order, and the results agree within
rounding (tests/parallel/test_cpu_faster.py). `models` has functions of its own for CPUs, which
check `applies_to`. With CUDA nothing is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gspo_megatron.platform.cpu.host_collectives import COLLECTIVES, substitute
from gspo_megatron.platform.cpu.needed import is_needed

IS_ON = os.environ.get("GSPO_CPU_FASTER", "1") != "0"

# Options of glibc's mallopt (malloc.h). With the second one, large blocks are in the heap, too, and
# do not go back to the system when they are freed.
MALLOC_OPTIONS = {
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: bytes of free memory that stay at the end of the heap
    -4: 0,  # M_MMAP_MAX: blocks that are not in the heap
}
# Elements that are computed at a time (`strips`).
STRIP = 2**19
# If glibc keeps more free memory than this, it is given back after an update. In bytes.
_MUCH_FREE = 8 * 2**30


def applies_to(tensor: torch.Tensor) -> bool:
    """Return whether a function for CPUs shall compute with `tensor`."""
    return IS_ON and tensor.is_cpu


def strips(first: torch.Tensor, *others: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Cut tensors [rows, ...] into strips of the same rows, to compute strip after strip. What an
    operator returns for a strip of `first` stays in the caches. For whole tensors it would be new
    memory, and the system takes longer to clear new memory than most operators to compute.

    On the meta device there is nothing to compute, and one strip has the sizes of all of them."""
    if first.numel() <= STRIP or first.is_cuda:
        return [(first, *others)]
    rows = max(STRIP * len(first) // first.numel(), 1)
    if first.is_meta:
        return [tuple(tensor[:rows] for tensor in (first, *others))]
    return zip(*(tensor.split(rows) for tensor in (first, *others)), strict=True)


def prepare_torch() -> None:
    """Replace the functions of torch that Megatron-Core uses. This must come before Megatron-Core
    is imported, because some of its modules keep collectives under names of their own."""
    if IS_ON and is_needed():
        _keep_freed_memory()
        for name, own in COLLECTIVES.items():
            setattr(dist, name, substitute(getattr(dist, name), own))
        _share_gloo_devices()
        _step_without_compiler()


def adapt_megatron() -> None:
    """Replace functions of Megatron-Core that a single rank or packed sequences do not need."""
    if not (IS_ON and is_needed()):
        return
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import token_dispatcher

    clip_grads.multi_tensor_scale_impl = _scaled_in_place(clip_grads.multi_tensor_scale_impl)
    DistributedDataParallel._make_backward_post_hook = _adding_in_strips(
        DistributedDataParallel._make_backward_post_hook
    )
    token_dispatcher.sort_chunks_by_idxs = _unless_sorted(token_dispatcher.sort_chunks_by_idxs)
    token_dispatcher.all_to_all = _unless_alone(token_dispatcher.all_to_all)
    rope_utils._apply_rotary_pos_emb_thd = _rotary_with_tables(rope_utils._apply_rotary_pos_emb_thd)


def _keep_freed_memory() -> None:
    """Do not give freed memory back to the system, so that the next update can use the memory that
    this update frees. By default glibc gives the memory back, and the system then has to clear
    thousands of pages a step."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if set_option is not None:
        for option, value in MALLOC_OPTIONS.items():
            set_option(option, value)


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2: ten sizes, of which the ninth is the free memory in bytes."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)

    @property
    def free_bytes(self) -> int:
        return int(self.sizes[8])


def return_free_memory() -> None:
    """Give the free memory of the heap back to the system if there is much of it.

    `_keep_freed_memory` keeps what is free between used blocks, without a limit. A large model
    would keep several gigabytes.
    """
    libc = ctypes.CDLL(None)
    if not (IS_ON and is_needed() and hasattr(libc, "mallinfo2")):
        return
    libc.mallinfo2.restype = _Heap
    if libc.mallinfo2().free_bytes > _MUCH_FREE:
        libc.malloc_trim(0)


def _step_without_compiler() -> None:
    """Keep torch's optimizers from importing torch's compiler, which takes a second of each rank's
    start. The optimizers import the compiler only to exclude themselves from compilation, and
    nothing is compiled on a CPU."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method: Any = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, getattr(method, "__wrapped__", method))
    for optimizer in (torch.optim.Adam, torch.optim.SGD):  # AdamW is an Adam
        step: Any = optimizer.step
        if hasattr(step, "__wrapped__"):
            optimizer.step = torch.no_grad()(step.__wrapped__)


def _share_gloo_devices() -> None:
    """Let all process groups use the devices of the first group. Each device has a thread that
    wakes up a hundred times a second. Megatron-Core makes twenty groups, and most groups have one
    rank.
    """
    gloo: Any = dist.ProcessGroupGloo
    native = gloo.__init__
    # Process id -> devices. A forked process has no threads of these devices, so it needs new
    # devices.
    known: dict[int, Any] = {}

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


def _scaled_in_place(native: Any) -> Any:
    """Clip gradients in place. The function that Megatron-Core uses without Transformer Engine
    makes a scaled copy of each gradient, which is new memory that the system has to clear."""

    @functools.wraps(native)
    def scale(
        chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, scale: float | torch.Tensor
    ) -> None:
        sources, targets = tensor_lists
        if any(source is not target for source, target in zip(sources, targets, strict=True)):
            native(chunk_size, noop_flag, tensor_lists, scale)
            return
        for target in targets:
            target.mul_(scale)

    return scale


def _adding_in_strips(native: Any) -> Any:
    """Add the bf16 gradient of a parameter to its fp32 gradient in strips. Added as a whole, torch
    would first convert it to a new tensor in fp32."""

    @functools.wraps(native)
    def make_hook(self: Any, param: Any) -> Any:
        hook = native(self, param)

        def add(*unused: Any) -> None:
            grad = param.grad
            is_usual = grad is not None and grad.is_contiguous() and param.requires_grad
            is_usual = is_usual and not getattr(param, "zero_out_wgrad", False)
            if not is_usual or param.grad_added_to_main_grad or grad.dtype == param.main_grad.dtype:
                hook(*unused)
                return
            for total, part in strips(param.main_grad.view(-1), grad.view(-1)):
                total.add_(part)
            param.grad_added_to_main_grad = True
            hook(*unused)
            param.grad_added_to_main_grad = False

        return add

    return make_hook


def _unless_sorted(native: Any) -> Any:
    """Skip the dispatcher's second sort if the tokens are in order already. With all experts on one
    rank, this sort would only copy the tokens."""

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
    """Skip the all-to-all in a group of one rank. Stock Megatron-Core runs an autograd function for
    it three times in each layer. Each run takes 10 to 20 microseconds in a pass."""

    @functools.wraps(native)
    def send(group: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input_ if group.size() == 1 else native(group, input_, *args, **kwargs)

    return send


def _rotary_with_tables(native: Any) -> Any:
    """Replace the rotary embedding of packed sequences. In every layer, for queries and for keys,
    stock Megatron-Core slices the angles of each sequence again. Here the tables of angles are made
    once for a micro-batch, and stored as an attribute of `cu_seqlens`."""

    @functools.wraps(native)
    def rotate(
        states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *others: Any,
        mscale: float = 1.0,
        cp_group: Any = None,
        **switches: Any,  # flags for other ways to pair the channels; names differ by version
    ) -> torch.Tensor:
        named = {"mscale": mscale, "cp_group": cp_group}
        in_part = freqs.shape[-1] != states.shape[-1]  # some channels are not rotated
        if in_part or others or any(switches.values()):
            return native(states, cu_seqlens, freqs, *others, **named, **switches)
        tables = vars(cu_seqlens).setdefault("rotary_tables", {})
        key = (id(freqs), mscale, cp_group, states.dtype)
        if key not in tables:
            # Rotating (1, 0) gives (cos, sin).
            unit = states.new_zeros((len(states), 1, states.shape[-1]))
            unit[..., : states.shape[-1] // 2] = 1.0
            cos, sin = native(unit, cu_seqlens, freqs, **named).chunk(2, dim=-1)
            # `freqs` is kept, so that no other tensor can get its id.
            tables[key] = torch.cat((cos, cos), -1), sin.contiguous(), freqs
        return _Rotation.apply(states, *tables[key][:2])

    return rotate


class _Rotation(torch.autograd.Function):
    """Rotates pairs of channels by angles. A pair has one channel of each half."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(states, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotated(gradient, *ctx.saved_tensors, -1), None, None


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate states [tokens, heads, dim] by cos [tokens, 1, dim] and sin [tokens, 1, dim / 2]."""
    rotated = states * cos
    (low, high), (low_out, high_out) = states.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    low_out.addcmul_(high, sin, value=-sign)
    high_out.addcmul_(low, sin, value=sign)
    return rotated
