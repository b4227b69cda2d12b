"""Runs one rank of any layout in a single process, to find its shapes and bytes. This needs no
memory for the model, and no other ranks.

The unchanged code of training builds and runs the rank's part of the model on torch's meta device,
over fake process groups. Two things need more than shapes. First, the number of tokens of each
expert is a value that decides shapes. Here this number is the same for all experts. Second, the
reference formula of attention would keep tensors that no fused kernel keeps. Here attention keeps
what a fused kernel keeps.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Generator, Hashable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

META = torch.device("meta")


@contextlib.contextmanager
def pretended_rank(rank: int, world_size: int) -> Generator[Trace]:
    """Make this process `rank` of `world_size` for torch.distributed while the context lasts.
    Megatron-Core then allocates on the meta device. Yields a record of collectives and memory.
    torch.distributed must not be initialised.
    """
    # this import registers the backend `fake`
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process is a rank of a real world already"
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from gspo_megatron.platform.groups import stop_processes

    native_gather = mappings._gather_along_first_dim

    def gather(values: Tensor, group: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Repeat real tensors: they are counts of tokens, which are the same on every rank."""
        if values.is_meta:
            return native_gather(values, group, *args, **kwargs)
        return torch.cat([values] * group.size())

    def gather_objects(objects: list[Any], own: Any, *_args: Any, **_kwargs: Any) -> None:
        """Repeat this rank's object. A new optimizer compares the objects of all ranks."""
        objects[:] = [own] * len(objects)

    def no_record(*_args: Any, **_kwargs: Any) -> Any:
        """Record nothing. Routers add their losses to a process-wide record, which gets the size of
        the first model. A fake rank must not create this record. Megatron-Core 0.19 calls the
        method `record` of the result."""
        return SimpleNamespace(record=no_record)

    record = "save_to_aux_losses_tracker"
    # Megatron-Core 0.16 has the first of these functions, 0.19 the second.
    record = record if hasattr(router, record) else "get_moe_metrics_tracker"
    # After each init_process_group, torch puts the rank once more before every line of a traceback.
    # So the hook that does this is removed at the end.
    with patch.object(sys, "excepthook", sys.excepthook):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            patch.object(torch.cuda, "current_device", lambda: META),
            patch.object(mappings, "_gather_along_first_dim", gather),
            patch.object(dist, "all_gather_object", gather_objects),
            patch.object(router, record, no_record),
            # a class attribute, which lies on the device of the first backward pass
            patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
            Trace() as trace,
        ):
            yield trace
    finally:
        stop_processes()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries. (This runs at every operation,
    and torch's pytree takes ten times as long.)"""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


# The type of the result (Tensor, tuple or list), and the size, stride and dtype of each tensor.
# Each tensor has memory of its own.
_Result = tuple[type, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]]


def _make(result: _Result) -> Any:
    kind, tensors = result
    results = (
        torch.empty_strided(size, stride, dtype=dtype, device="meta")
        for size, stride, dtype in tensors
    )
    return next(results) if kind is Tensor else kind(results)


class MetaResults:
    """Runs operations on meta tensors, and caches the results by the shapes and values of the
    inputs. torch computes the shape of most results in Python, which takes up to a millisecond. A
    dry run does the same few hundred operations on the same shapes in every layer.

    An operation is cached only if it writes nothing, takes only meta tensors, and returns new,
    dense meta tensors.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, _Result | None] = {}
        self._pure: dict[Any, bool] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in self._pure:
            # Some operations return a view although their schema denies this: see `_remembered`.
            schema = func._schema
            returns_new = all(each.alias_info is None for each in schema.returns)
            self._pure[func] = returns_new and not schema.is_mutable
        if not self._pure[func]:
            return func(*args, **kwargs)
        key = (func, _description(args), _description(tuple(kwargs.items())))
        if key in self._results:
            known = self._results[key]
            return func(*args, **kwargs) if known is None else _make(known)
        result = func(*args, **kwargs)
        self._results[key] = _remembered(result, (args, kwargs))
        return result


def _description(value: Any) -> Hashable:
    """Return a key for the cache. The key has the type, because 1, 1.0 and True are equal in
    Python."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_description(item) for item in value)
    return type(value), value


def _remembered(result: Any, inputs: Any) -> _Result | None:
    """Return the description of a result for the cache, or None if it cannot be cached."""
    tensors = tuple(tensors_in(result))
    kind = Tensor if isinstance(result, Tensor) else type(result)
    if kind not in (Tensor, tuple, list) or not tensors:
        return None
    if kind is not Tensor and len(tensors) != len(result):
        return None  # the result has values that are not tensors
    of_inputs = list(tensors_in(inputs))
    if not all(tensor.is_meta for tensor in (*of_inputs, *tensors)):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in of_inputs}
    description = kind, tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    for tensor, rebuilt in zip(tensors, tensors_in(_make(description))):
        storage = tensor.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != rebuilt.untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
    return description


@dataclass(frozen=True)
class Collective:
    """One collective call: its ranks, and the bytes of the whole message. The whole message is the
    output of a gather, and the input of a scatter."""

    kind: str  # all_reduce | all_gather | reduce_scatter | all_to_all | broadcast | other
    ranks: tuple[int, ...]
    num_bytes: int


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# these collectives return only a Work object
_WORK_ALONE = ("alltoall_base_", "barrier", "send", "recv_", "gather_", "reduce_")


class Trace(TorchDispatchMode):
    """Records the collectives and the bytes of new meta tensors while the context lasts."""

    results: ClassVar = MetaResults()  # one cache, because results are the same for every rank

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
        """Return False. Otherwise torch would wrap the method and load torch's compiler. That takes
        a second, and then microseconds at every operation."""
        return False

    def start_peak(self) -> int:
        """Set the peak to the present bytes, and return them."""
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

        name = func._schema.name.split("::")[1]  # such as _allgather_base_
        joined = name.replace("_", "")
        kind = next((kind for kind in _KINDS if joined.startswith(kind.replace("_", ""))), "other")
        named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        group = dist.ProcessGroup.unbox(named["process_group"])
        # the larger side of a gather or a scatter is the whole message
        num_bytes = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
        if num_bytes and group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.collectives.append(Collective(kind, ranks, num_bytes))
        work = FakeWork().boxed()
        return work if name in _WORK_ALONE else (args[0], work)


class EqualLoad(TorchFunctionMode):
    """Gives real values to the numbers that Megatron-Core reads from tensors: every expert gets the
    same number of tokens.

    Counts of tokens are small real tensors. In an operation with meta tensors they become meta
    tensors.
    """

    def __init__(self, share: float) -> None:
        """share: the share of the experts to which a token goes, k / experts."""
        super().__init__()
        self.share = share

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            # On the meta device, torch's grouped product supports only bf16.
            return _GroupedProduct.apply(args[0], args[1])
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
        """Run autograd's backward pass inside this mode, which recomputation needs."""
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
        """Return real counts [experts] for a routing map [tokens, experts] bool."""
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
    """masked_select with a fixed number of results. Keeps the mask for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = values.shape
        return values.new_empty(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.new_empty(ctx.shape), None, None


class _GroupedProduct(torch.autograd.Function):
    """Multiplies each group of rows [rows, in] with its weights [groups, in, out]. Keeps rows and
    weights for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty((rows.shape[0], weights.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: inputs, output, log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        dtype = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:-1], dtype=dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
