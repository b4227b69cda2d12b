"""One rank of any layout in a single process: shapes and bytes, without memory or other ranks.

The unchanged package builds and runs a rank's part of the model on torch's meta device, over fake
process groups. Two things need more than shapes: values that decide shapes (the number of tokens
of each expert: here the same for all), and attention, whose reference formula would keep tensors
that no fused kernel keeps.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gspo_megatron.platform.meta_results import MetaResults, tensors_in

META = torch.device("meta")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def pretended_rank(rank: int, world_size: int) -> Iterator[Trace]:
    """Inside, this process is `rank` of `world_size` for torch.distributed, and Megatron-Core
    allocates on the meta device. Yields a record of collectives and memory. torch.distributed must
    not be initialised.
    """
    # registers the backend `fake`
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process is a rank of a real world already"
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from gspo_megatron.platform.groups import stop_processes

    native_gather = mappings._gather_along_first_dim

    def gather(values: Tensor, group: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Only counts of tokens are real tensors, and they are the same on every rank."""
        if values.is_meta:
            return native_gather(values, group, *args, **kwargs)
        return torch.cat([values] * group.size())

    def gather_objects(objects: list[Any], own: Any, *_args: Any, **_kwargs: Any) -> None:
        """The optimizer's construction compares objects of all ranks."""
        objects[:] = [own] * len(objects)

    def no_record(*_args: Any, **_kwargs: Any) -> Any:
        """Routers add their losses to a process-wide record of the first model's size, which must
        not be created for a fake rank. 0.19 calls `record` of the result."""
        return SimpleNamespace(record=no_record)

    record = "save_to_aux_losses_tracker"
    record = record if hasattr(router, record) else "get_moe_metrics_tracker"  # 0.16 or 0.19
    # each init_process_group makes torch put the rank before every line of a traceback once more
    with replaced(sys, "excepthook", sys.excepthook):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            replaced(torch.cuda, "current_device", lambda: META),
            replaced(mappings, "_gather_along_first_dim", gather),
            replaced(dist, "all_gather_object", gather_objects),
            replaced(router, record, no_record),
            # a class attribute, on the device of the first backward pass
            replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
            Trace() as trace,
        ):
            yield trace
    finally:
        stop_processes()


@dataclass(frozen=True)
class Collective:
    """One call, its ranks, and the bytes of the whole message: the output of a gather, the input of
    a scatter."""

    kind: str  # all_reduce | all_gather | reduce_scatter | all_to_all | broadcast | other
    ranks: tuple[int, ...]
    num_bytes: int


_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
}
# these return only a Work
_WORK_ALONE = ("alltoall_base_", "barrier", "send", "recv_", "gather_", "reduce_")


class Trace(TorchDispatchMode):
    """Records the collectives inside, and the bytes of the meta tensors created inside."""

    results: ClassVar = MetaResults()  # the same for every rank

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs or {})
        # without this, EqualLoad would see every t.shape
        with torch._C.DisableTorchFunction():
            result = self.results(func, args, kwargs or {})
            for tensor in tensors_in(result):
                if tensor.is_meta:
                    self._add(tensor.untyped_storage())
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch wraps the method and loads its compiler: a second, and microseconds at every
        operation."""
        return False

    def start_peak(self) -> int:
        """Forget the peak so far; returns the present bytes."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._C._distributed_c10d import FakeWork

        name = func._schema.name.split("::")[1]
        named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        group = dist.ProcessGroup.unbox(named["process_group"])
        # the larger side of a gather or a scatter is the whole message
        num_bytes = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
        if num_bytes and group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.collectives.append(Collective(_KINDS.get(name, "other"), ranks, num_bytes))
        work = FakeWork().boxed()
        return work if name in _WORK_ALONE else (args[0], work)


class EqualLoad(TorchFunctionMode):
    """Gives real values to the numbers that Megatron-Core reads from tensors: every expert gets the
    same number of tokens.

    Counts of tokens are real (small) tensors; in an operation with meta tensors they become meta
    tensors.
    """

    def __init__(self, share: float) -> None:
        """share: of the experts that a token goes to, k / experts."""
        super().__init__()
        self.share = share

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _GroupedProduct.apply(args[0], args[1])  # torch's knows bf16 alone on meta
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None:
            if func in (Tensor.sum, torch.sum) and first.is_meta and first.dtype is torch.bool:
                dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
                if first.dim() == 2 and dim == 0:
                    return self._counts(first)
            if func in (Tensor.masked_select, torch.masked_select) and first.is_meta:
                mask = args[1] if len(args) > 1 else kwargs["mask"]
                return _Selected.apply(first, mask, round(mask.numel() * self.share))
            if func in (Tensor.to, Tensor.cuda) and not first.is_meta and _to_meta(args, kwargs):
                return first
        if len({tensor.is_meta for tensor in tensors_in((args, kwargs))}) == 2:
            args, kwargs = tree_map_only(
                Tensor,
                lambda t: t if t.is_meta else torch.empty_like(t, device=META),
                (args, kwargs),
            )
        return func(*args, **kwargs)

    def _backward(self, tensors: Any, grad_tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        """autograd's backward, but inside this mode, which recomputation needs."""
        graph = torch.autograd.graph
        tensors, gradients = (
            (values,) if isinstance(values, Tensor) else tuple(values)
            for values in (tensors, grad_tensors)
        )
        with self:
            graph._engine_run_backward(
                tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _counts(self, tokens_to_experts: Tensor) -> Tensor:
        """[tokens, experts] bool -> [experts], real."""
        tokens, experts = tokens_to_experts.shape
        total = round(tokens * experts * self.share)
        return torch.tensor([total // experts + (i < total % experts) for i in range(experts)])


def _to_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    targets = [*args[1:], kwargs.get("device"), kwargs.get("other")]
    return any(
        t == META if isinstance(t, torch.device) else isinstance(t, Tensor) and t.is_meta
        for t in targets
    )


class _Selected(torch.autograd.Function):
    """masked_select with a given number of results; keeps the mask for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = values.shape
        return values.new_empty(count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.new_empty(ctx.shape), None, None


class _GroupedProduct(torch.autograd.Function):
    """rows [rows, in] by group x weights [groups, in, out]; keeps both for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty((rows.shape[0], weights.shape[2]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


class _FusedAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: inputs, output, and the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty(
            (*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device
        )
        dtype = torch.promote_types(query.dtype, torch.float32)
        sums = torch.empty(query.shape[:-1], dtype=dtype, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
