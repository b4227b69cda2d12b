"""What a rank finds out about itself and its groups: at most a few seconds, at most 256 MiB."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config.parallel import ResolvedParallel
from gspo_megatron.config.precision import device_lacks
from gspo_megatron.platform.devices import built_for_cuda, collective_backend, select_device
from gspo_megatron.platform.preflight.judge import MEMORY, Report

ROUNDS = 7  # of each exchange; their median counts
MATMUL_SECONDS = 0.3
_MATMUL_SIZE = {"cuda": 8192, "cpu": 384}
_MESSAGE_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
_TOOL_SECONDS = 5.0
# What gloo, NCCL and torch's stores say when it is another rank that is gone or late.
_LOST = re.compile(r"connection|peer|remote|time[- ]?d? ?out|abort", re.IGNORECASE)
_BYTES_PER_GIB = 2**30


def host_name() -> str:
    """As Slurm calls the node, where it does."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(rank: int, precision: str) -> Report:
    """The device of this process, and what is wrong with it; raises nothing."""
    report = Report(rank, host_name(), "cpu")
    try:
        if not torch.cuda.is_available():
            return replace(report, wrong=_why_no_gpu())
        device = select_device()
        report = replace(report, device=torch.cuda.get_device_name(device))
        torch.ones(1, device=device).add_(1).item()
        capability = torch.cuda.get_device_capability(device)
        lacks = device_lacks(precision, capability, built_for_cuda())
        if lacks is not None:
            return replace(report, wrong=f"training.precision = {precision} {lacks}")
        free, _ = torch.cuda.mem_get_info(device)
        drivers = (_tool("--query-gpu=driver_version", "--format=csv,noheader") or "").split()
        return replace(
            report,
            driver=drivers[0] if drivers else None,
            figures={MEMORY: free / _BYTES_PER_GIB},
        )
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is to be named with it)
        return replace(report, wrong=_first_line(error))


def _why_no_gpu() -> str | None:
    """Where there are GPUs after all, which torch cannot use; None: there are none, or they are
    hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not _tool("--list-gpus"):
        return None
    return f"torch {torch.__version__} can use none of the GPUs that nvidia-smi lists"


def measure(
    report: Report, parallel: ResolvedParallel, store: dist.Store, seconds: float
) -> Report:
    """Add the speed of the device and of each kind of group of the layout; raises nothing. All
    ranks call it; it may hang where a link does, for `seconds` at most if gloo or NCCL notice. How
    far it has come is in the store, done/<rank>."""
    try:
        device = select_device()
        report = replace(report, figures={**report.figures, **_speed(device)})
    except Exception as error:  # noqa: BLE001 (as above)
        return replace(report, wrong=_first_line(error))
    if parallel.world_size == 1:
        return report
    try:
        return _measure_links(report, parallel, store, seconds, device)
    except Exception as error:  # noqa: BLE001 (as above)
        text = _first_line(error)
        return replace(report, wrong=text, is_cut_off=_LOST.search(text) is not None)


def _measure_links(
    report: Report,
    parallel: ResolvedParallel,
    store: dist.Store,
    seconds: float,
    device: torch.device,
) -> Report:
    done = itertools.count(1)

    def advance() -> None:
        store.set(f"done/{report.rank}", str(next(done)))

    advance()
    dist.init_process_group(
        backend=collective_backend(device),
        store=dist.PrefixStore("groups", store),
        rank=report.rank,
        world_size=parallel.world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, **parallel.group_sizes()
    )
    figures = dict(report.figures)
    groups: dict[str, list[int]] = {}
    for kind, group in _groups().items():
        advance()
        dist.barrier()  # one kind at a time
        advance()
        for operation, rate, together in link_rates(group, kind, device):
            figures[f"{kind} {operation}"] = rate
            if together:
                groups[f"{kind} {operation}"] = dist.get_process_group_ranks(group)
    return replace(report, figures=figures, groups=groups)


def _groups() -> Mapping[str, dist.ProcessGroup]:
    """By kind, those of more than one rank."""
    found = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }
    return {kind: group for kind, group in found.items() if group.size() > 1}


def _speed(device: torch.device) -> dict[str, float]:
    """The rate of matrix products, and the clock meanwhile where nvidia-smi tells it."""
    multiply = multiplication(device)
    figures = {"matmul": matmul_rate(multiply, device)}
    if device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        clock = uuid and busy_clock(lambda: _seconds(multiply, device), f"GPU-{uuid}")
        if clock:
            figures["clock"] = clock
    return figures


def multiplication(device: torch.device) -> Callable[[], None]:
    """A product of square matrices of _MATMUL_SIZE, bf16 on a GPU and fp32 on a CPU."""
    size = _MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones((size, size), dtype=dtype, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)

    return multiply


def matmul_rate(multiply: Callable[[], None], device: torch.device) -> float:
    """TFLOP/s of such products one after the other."""
    _seconds(multiply, device)  # loads libraries
    count = took = 0.0
    while took < MATMUL_SECONDS:
        took += _seconds(multiply, device)
        count += 1
    return count * 2 * _MATMUL_SIZE[device.type] ** 3 / took / 1e12


def busy_clock(work: Callable[[], object], gpu: str) -> float | None:
    """MHz of a GPU's multiprocessors while it does `work`, again and again until nvidia-smi has
    answered: that takes long enough for an idle GPU to lower its clock. None where it does not
    tell."""
    query = ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        tool = subprocess.Popen(
            ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    with tool:
        end = time.monotonic() + _TOOL_SECONDS
        while tool.poll() is None:
            work()
            if time.monotonic() > end:
                tool.kill()
                return None
        assert tool.stdout is not None
        text = tool.stdout.read()
    try:
        return float(text) if tool.returncode == 0 else None
    except ValueError:
        return None  # [N/A], as on a part of a GPU


def link_rates(
    group: dist.ProcessGroup, kind: str, device: torch.device
) -> Iterator[tuple[str, float, bool]]:
    """(operation, GB/s, whether it is one figure of the whole group). Of collectives, the bytes
    that a rank sends, by the algorithm that sends least."""
    size = group.size()
    each = _MESSAGE_BYTES[device.type] // 4 // size
    data = torch.ones(each * size, dtype=torch.float32, device=device)
    received = torch.empty_like(data)
    if kind != "pp":
        share = (size - 1) / size * data.nbytes / 1e9
        took = _median_of(lambda: dist.all_reduce(data.fill_(1.0), group=group), device)
        yield "all-reduce", 2 * share / took, True
        took = _median_of(lambda: dist.all_to_all_single(received, data, group=group), device)
        yield "all-to-all", share / took, True
    else:
        dist.all_reduce(data[:1], group=group)  # all ranks have to take part in a first call
    pairs = _pair_seconds(group, data, received, device)
    if pairs:
        yield "send/recv", data.nbytes / 1e9 / min(pairs), False


def _pair_seconds(
    group: dist.ProcessGroup, data: torch.Tensor, received: torch.Tensor, device: torch.device
) -> list[float]:
    """Seconds of an exchange with the next rank of the group and with the one before, one after the
    other: a slow rank is slow with both, its neighbours with one."""
    size, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    found = []
    for first in (0, 1) if size > 2 else (0,):
        place = (rank - first) % size
        other = (rank + 1 if place % 2 == 0 else rank - 1) % size
        if size % 2 and place == size - 1:
            continue  # alone this time

        def exchange(peer: int = ranks[other]) -> None:
            work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, data, peer, group),
                    dist.P2POp(dist.irecv, received, peer, group),
                ]
            )
            for each in work:
                each.wait()

        found.append(_median_of(exchange, device))
    return found


def _median_of(work: Callable[[], Any], device: torch.device) -> float:
    work()  # connections are made in the first call
    return statistics.median(_seconds(work, device) for _ in range(ROUNDS))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _tool(*options: str) -> str | None:
    """What nvidia-smi says; None where it does not."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *options],
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
