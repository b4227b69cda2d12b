"""Lets torch.cuda and torch's backend for NCCL use the rehearsed device of device.cpp. The code in
`startup` calls this module in each process that imports torch.

`load_device` must be called before the first import of torch, and `complete` after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

LIBRARY = "CUDA_REHEARSAL_LIBRARY"  # the path of the shared object
# The number of devices on this host; default: the number of its ranks.
DEVICES = "CUDA_REHEARSAL_DEVICES"
# A folder. Each process writes a file into this folder, with the places where the host waited for
# the device.
WAITS = "CUDA_REHEARSAL_WAITS"
MEMORY = 80 << 30  # bytes; the memory size that each device reports

_device: Any = None
_Tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def load_device() -> None:
    """Register the device. This must come before the import of torch, because torch looks for CUDA
    during its import."""
    global _device
    _device = ctypes.CDLL(os.environ[LIBRARY], ctypes.RTLD_GLOBAL)
    for name in ("allocated", "peak", "stream", "doubles"):
        getattr(_device, f"rehearsal_{name}").restype = ctypes.c_long
    rank = os.environ.get("LOCAL_RANK")
    count = int(os.environ.get(DEVICES) or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    begin(count, -1 if rank is None else int(rank))


def begin(devices: int, own: int) -> None:
    """Set the number of devices on the host, and the index of this rank's own device. Use of
    another device's memory is an error. An index of -1 says that this process has no own device."""
    _device.rehearsal_begin(devices, own)


def complete() -> None:
    """Give torch.cuda the functions that it has in a build with CUDA."""
    import torch

    assert torch.version.cuda is None, "a build for CUDA has kernels of its own"
    _complete_bindings(torch)
    _complete_module(torch)
    _complete_streams(torch)
    _complete_memory(torch)
    _complete_collectives()
    if folder := os.environ.get(WAITS):
        _count_waits_until_the_end(folder)


def _complete_bindings(torch: Any) -> None:
    # torch.cuda's own functions call these functions.
    native = torch._C
    native._cuda_getDeviceCount = lambda: len(torch.cuda.default_generators)
    native._cuda_getDevice = lambda: _device.rehearsal_device()
    native._cuda_setDevice = torch.cuda._exchange_device = _use_device
    torch.cuda._maybe_exchange_device = lambda index: (
        _use_device(index) if index >= 0 else _device.rehearsal_device()
    )
    native._cuda_synchronize = lambda: _device.rehearsal_synchronize()
    native._cuda_isInBadFork = lambda: False  # a fork does no harm to devices in host memory
    native._cuda_getCurrentRawStream = lambda index: _device.rehearsal_stream(index)

    def current(index: int) -> tuple[int, int, int]:
        if index < 0:
            index = _device.rehearsal_device()
        return _device.rehearsal_stream(index), index, 1

    def default(index: int) -> tuple[int, int, int]:
        return 0, index if index >= 0 else _device.rehearsal_device(), 1

    def use_stream(stream_id: int, device_index: int, device_type: int) -> None:
        _device.rehearsal_use_stream(device_index, ctypes.c_long(stream_id))

    native._cuda_getCurrentStream, native._cuda_getDefaultStream = current, default
    native._cuda_setStream = use_stream
    count = int(os.environ.get(DEVICES) or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    generator_of = torch.ops.rehearsal.generator_of
    torch.cuda.default_generators = tuple(generator_of(index) for index in range(count))


def _use_device(index: int) -> int:
    before = _device.rehearsal_use_device(index)
    if before < 0:
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
    return before


def _complete_module(torch: Any) -> None:
    cuda = torch.cuda
    cuda._initialized = True
    cuda._queued_calls.clear()
    properties = types.SimpleNamespace(
        name="host memory",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 << 20,
        uuid="00000000-0000-0000-0000-000000000000",
    )
    cuda.device_count = lambda: len(cuda.default_generators)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_name = lambda device=None: properties.name
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda message: None,
        range_pop=lambda: None,
        range=lambda *args, **kwargs: contextlib.nullcontext(),
    )
    # There is no Triton for the rehearsed device, so functions stay as they are.
    torch.compile = lambda model=None, **options: model or (lambda function: function)


def _complete_streams(torch: Any) -> None:
    class Stream(torch.Stream):
        """A torch.cuda.Stream that is made from torch's generic streams."""

        def __new__(cls, device: Any = None, priority: int = 0, **place: int) -> Any:
            if place:
                return super().__new__(cls, **place)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        """A torch.cuda.Event that is made from torch's generic events."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Any:
            options = {"enable_timing": enable_timing, "blocking": blocking}
            return super().__new__(cls, device="cuda", interprocess=interprocess, **options)

    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event


def _complete_memory(torch: Any) -> None:
    def figure(of_index: Callable[[int], int]) -> Callable[..., int]:
        get_index = torch.cuda._utils._get_device_index
        return lambda device=None: of_index(get_index(device, optional=True))

    allocated = figure(lambda index: _device.rehearsal_allocated(index))
    peak = figure(lambda index: _device.rehearsal_peak(index))
    figures = {
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": figure(lambda index: _device.rehearsal_reset_peak(index)),
        "mem_get_info": lambda device=None: (MEMORY - allocated(device), MEMORY),
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": allocated(device)},
        "empty_cache": lambda: None,
    }
    for name, function in figures.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.memory, name, function)


def _complete_collectives() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from tests.cuda_rehearsal.nccl import Nccl

    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = Nccl
        module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    torch.cuda.nccl.version = lambda: (2, 0, 0)


@contextlib.contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """A context that counts the waits of the host, by the line of the package that waits."""
    found: Counter[str] = Counter()

    def tell(what: bytes) -> None:
        found[f"{what.decode()} at {_place()}"] += 1

    callback = _Tell(tell)
    _device.rehearsal_on_wait(callback)
    try:
        yield found
    finally:
        _device.rehearsal_on_wait(_Tell())


def doubles() -> int:
    """The number of float64 elements that this process has made on devices."""
    return _device.rehearsal_doubles()


def _place() -> str:
    """The innermost line of the package or of Megatron-Core in the call stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        for package in ("/gspo_megatron/", "/megatron/core/"):
            if package in path:
                name = path.rpartition(package)[2]
                return f"{package[1:]}{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the backward pass"


def _count_waits_until_the_end(folder: str) -> None:
    import atexit
    import json
    from pathlib import Path

    counting = counted_waits()
    found = counting.__enter__()
    rank = os.environ.get("RANK", "0")

    def write() -> None:
        counting.__exit__(None, None, None)
        Path(folder, f"rank_{rank}.json").write_text(json.dumps(found, indent=1))

    atexit.register(write)
