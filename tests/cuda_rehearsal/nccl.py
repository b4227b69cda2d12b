"""Collectives between rehearsed devices. They run gloo on the memory of the tensors, refuse what
NCCL would refuse, and are ordered like NCCL's, on a stream of the process group."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The types that NCCL can send, from torch's table. int16, for example, is missing.
_SENDABLE = {
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
# Each method except `send` writes the tensors of its first argument, and reads all other tensors.
_METHODS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
)
_DEFAULT = datetime.timedelta(minutes=10)


class _Options:
    """The options of a group. Only the timeout has an effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = type("NCCLConfig", (), {})()
        self._timeout = _DEFAULT


class _Work(torch._C._distributed_c10d.Work):
    """The work of a collective. `wait` makes the current stream wait, not the host."""

    def __init__(self, inner: Any, done: torch.Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._inner, self._done = inner, done
        self._tensors = tensors  # kept until the work is done, as in torch

    def wait(self, timeout: Any = None) -> bool:
        self._inner.wait()
        torch.cuda.current_stream().wait_event(self._done)
        self._tensors = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed() and self._done.query()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def get_future(self) -> Any:
        return self._inner.get_future()

    def result(self) -> list[Tensor]:
        return self._tensors


class Nccl(dist.ProcessGroup):
    """Replaces torch.distributed.ProcessGroupNCCL."""

    Options = _Options

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        timeout = getattr(options, "_timeout", None) or _DEFAULT
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._inner = dist.ProcessGroup(store, rank, size)
        self._inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._gloo, self._stream, self._numbers = gloo, torch.cuda.Stream(), (rank, size)
        self._names = ["", ""]

    def rank(self) -> int:
        return self._numbers[0]

    def size(self) -> int:
        return self._numbers[1]

    def name(self) -> str:
        return "nccl"

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Nccl:
        if device.type != "cuda":
            raise _no_backend(device)
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._names[0] = name

    def _set_group_desc(self, text: str) -> None:
        self._names[1] = text

    @property
    def group_name(self) -> str:
        return self._names[0]

    @property
    def group_desc(self) -> str:
        return self._names[1]

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        self._gloo.shutdown()

    abort = shutdown

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.current_stream().synchronize()  # after NCCL's barrier, the host waits
        return self._inner.barrier()


def _collective(name: str) -> Callable[..., Any]:
    def run(self: Nccl, *args: Any, **kwargs: Any) -> Any:
        assert not kwargs.keys() & {"output", "input", "tensors"}, "tensors come by position"
        written = [] if name == "send" else list(_tensors(args[0]))
        read = list(_tensors(args[name != "send" :]))
        for tensor in (*written, *read):
            _refuse(name, tensor)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for tensor in read:
                torch.ops.rehearsal.use(tensor, False, f"NCCL's {name}")
            for tensor in written:
                torch.ops.rehearsal.use(tensor, True, f"NCCL's {name}")
            done = self._stream.record_event()
        inner = getattr(self._inner, name)(*map(_on_host, args), **kwargs)
        return _Work(inner, done, [*written, *read])

    return run


def _refusing(name: str) -> Callable[..., Any]:
    """Refuse a collective on a device's tensor if the group is not NCCL's. In a build for CUDA,
    gloo accepts some of these tensors and copies them through the host. None of the package's
    groups should do so."""
    native = getattr(dist.ProcessGroup, name)

    def run(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if any(tensor.is_cuda for tensor in _tensors([*args, *kwargs.values()])):
            raise RuntimeError(f"cuda rehearsal: {name} over gloo with a tensor of a device")
        return native(self, *args, **kwargs)

    return run


for _name in _METHODS:
    setattr(Nccl, _name, _collective(_name))
    setattr(dist.ProcessGroup, _name, _refusing(_name))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ops.rehearsal.host_alias(value.detach())
    if isinstance(value, (list, tuple)):
        return [_on_host(each) for each in value]
    return value


def _refuse(name: str, tensor: Tensor) -> None:
    if not tensor.is_cuda:
        raise _no_backend(tensor.device)
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.dtype not in _SENDABLE:
        raise TypeError(f"{name}: {tensor.dtype} is not supported for NCCL process group")


def _no_backend(device: torch.device) -> RuntimeError:
    return RuntimeError(f"No backend type associated with device type {device.type}")
