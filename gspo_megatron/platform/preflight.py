"""Whether the nodes of a job are fit to train: their devices, and the links between the ranks.

Rank 0 compares every figure with the median of its peers, and names the hosts that are slow or
broken. Reports travel through torch's key-value store over TCP, not through collectives. The store
needs only rank 0, so a rank that is dead or stuck is found because its report is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
import socket
import statistics
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config.parallel import ResolvedParallel
from gspo_megatron.config.precision import device_lacks
from gspo_megatron.observe.environment import output_of
from gspo_megatron.platform.devices import built_for_cuda, collective_backend, select_device
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.platform.rendezvous import join_store

ARRIVAL_SECONDS = 300.0  # until all ranks have imported torch from a shared file system
MEASURE_SECONDS = 90.0  # the measurements take a few; NCCL's first connections take longer
_GRACE_SECONDS = 3.0  # for further reports, once one rank has reported a problem
_LEAVING_SECONDS = 30.0  # for the other ranks to read the result from the store
_POLL_SECONDS = 0.1

MEMORY = "free memory"
_UNITS = {"matmul": "TFLOP/s", MEMORY: "GB"}  # of links: GB/s
# Memory that is in use was left behind by another program, so little of it may be missing.
_MEMORY_SHARE = 0.9
_ROUNDS = 7  # of each exchange; their median counts
_MATMUL_SECONDS = 0.3
_MATMUL_SIZE = {"cuda": 8192, "cpu": 384}
_MESSAGE_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
# What gloo, NCCL and torch's stores report when another rank is gone or late.
_LOST_PEER = re.compile(r"connection|peer|remote|time[- ]?d? ?out|abort", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """What one rank found out."""

    rank: int
    host: str
    device: str  # the GPU's name, or cpu
    problem: str | None = None  # why the rank cannot take part
    driver: str | None = None  # the GPU driver's version; None: unknown, or no GPU
    lost_peer: bool = False  # the problem may be that of another rank
    metrics: Mapping[str, float] = field(default_factory=dict)  # by measure; more is better
    # For a measure that several ranks take together: these ranks.
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Unit(NamedTuple):
    """One figure, of a rank or of a group of ranks."""

    ranks: tuple[int, ...]  # ascending
    hosts: frozenset[str]
    value: float

    @property
    def names(self) -> str:
        """`rank 4`, `ranks 4-7` or `ranks 3, 7`."""
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        is_range = last - first == len(self.ranks) - 1
        return f"ranks {first}-{last}" if is_range else f"ranks {', '.join(map(str, self.ranks))}"


class Row(NamedTuple):
    """One measure over all ranks."""

    measure: str
    unit: str
    median: float
    slowest: Unit


class Verdict(NamedTuple):
    """The table, and the problems by host; no problems: all hosts are fit."""

    rows: list[Row]
    problems: dict[str, list[str]]


def run_preflight(
    parallel: ResolvedParallel,
    precision: str,
    share: float,
    minima: Mapping[str, float],
    show: Callable[[Verdict], None],
) -> tuple[bool, bool]:
    """Measure this rank together with all others of RANK and WORLD_SIZE. Rank 0 calls `show`.

    `share`, `minima`: as `judge` takes them. Returns whether every host is fit, the same on all
    ranks, and whether this process is stuck: a collective hangs in a thread, and only os._exit ends
    the process.
    """
    rank, world = int(os.environ.get("RANK", "0")), parallel.world_size
    # a lone process needs no port
    shared = join_store(dist.default_pg_timeout) if world > 1 else dist.HashStore()
    store: Any = dist.PrefixStore("preflight", shared)  # whose annotations lack `clone`
    thread_store = store.clone()  # a thread that waits on one does not block the other
    own, hosts = Report(rank, "", ""), dict.fromkeys(range(world), "unknown host")

    def work(phase: str) -> None:
        nonlocal own
        is_first = phase == "device"
        own = look(rank, precision) if is_first else measure(own, parallel, thread_store)
        thread_store.set(f"{phase}/{rank}", json.dumps(asdict(own)))

    for phase, seconds in (("device", ARRIVAL_SECONDS), ("speed", MEASURE_SECONDS)):
        thread = threading.Thread(target=work, args=(phase,), name=phase, daemon=True)
        thread.start()
        reports: dict[int, Report] = {}
        if rank == 0:
            reports = collect(store, phase, range(world), seconds)
            late = least_advanced(store, {n: hosts[n] for n in hosts if n not in reports})
            why = f"died or got stuck, or took more than {seconds:.0f} s"
            verdict = judge(blame(reports.values(), late, why), share, minima)
            if phase == "speed" or verdict.problems:
                show(verdict)
            store.set(phase, "unfit" if verdict.problems else "fit")
            hosts = {n: report.host for n, report in reports.items()}
        limit = 2 * seconds + _GRACE_SECONDS  # from here; ranks do not begin at the same time
        store.wait([phase], datetime.timedelta(seconds=limit))
        is_fit = store.get(phase) == b"fit"
        thread.join(_GRACE_SECONDS)
        if not is_fit:
            break
    if not thread.is_alive():
        stop_processes()
    _leave(store, rank, reports)
    return is_fit, thread.is_alive()


def collect(
    store: dist.Store, subject: str, ranks: Collection[int], seconds: float
) -> dict[int, Report]:
    """The reports that arrive in time; soon after the first that has a problem, stop waiting."""
    found: dict[int, Report] = {}
    end = time.monotonic() + seconds
    while len(found) < len(ranks) and time.monotonic() < end:
        before = len(found)
        for rank in ranks:
            key = f"{subject}/{rank}"
            if rank not in found and store.check([key]):
                found[rank] = Report(**json.loads(store.get(key)))
                if found[rank].problem is not None:
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if len(found) == before:
            time.sleep(_POLL_SECONDS)
    return found


def least_advanced(store: dist.Store, late: Mapping[int, str]) -> dict[int, str]:
    """Of the ranks without a report (rank to host), those that came least far: the others wait for
    them."""
    keys = {rank: f"done/{rank}" for rank in late}
    done = {rank: int(store.get(key)) if store.check([key]) else 0 for rank, key in keys.items()}
    return {rank: host for rank, host in late.items() if done[rank] == min(done.values())}


def _leave(store: dist.Store, rank: int, reported: Collection[int] = ()) -> None:
    """Rank 0 holds the store, so it leaves after all ranks that have reported, slow ones too."""
    if rank:
        store.set(f"left/{rank}", "")
        return
    keys = [f"left/{other}" for other in reported if other]
    with contextlib.suppress(RuntimeError):  # some are too slow
        store.wait(keys, datetime.timedelta(seconds=_LEAVING_SECONDS))


# What a rank measures.


def look(rank: int, precision: str) -> Report:
    """The device of this process and its problem, if any; raises nothing."""
    # Slurm's name of the node, because a user excludes it by that name.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = Report(rank, host, "cpu")
    try:
        if not torch.cuda.is_available():
            is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # on purpose
            if is_hidden or not output_of("nvidia-smi", "--list-gpus"):
                return report
            text = f"torch {torch.__version__} can use none of the GPUs that nvidia-smi lists"
            return replace(report, problem=text)
        device = select_device()
        report = replace(report, device=torch.cuda.get_device_name(device))
        torch.ones(1, device=device).add_(1).item()
        capability = torch.cuda.get_device_capability(device)
        lacks = device_lacks(precision, capability, built_for_cuda())
        if lacks is not None:
            return replace(report, problem=f"training.precision = {precision} {lacks}")
        free, _ = torch.cuda.mem_get_info(device)
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = next(iter((output_of(*query) or "").split()), None)
        return replace(report, driver=driver, metrics={MEMORY: free / 1e9})
    except Exception as error:  # noqa: BLE001 (whatever it is, the host is named with it)
        return replace(report, problem=_first_line(error))


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].splitlines()[0].rstrip(": ")


def measure(report: Report, parallel: ResolvedParallel, store: dist.Store) -> Report:
    """Add the speed of the device and of each kind of group of the layout; raises nothing.

    All ranks call it. It may hang where a link hangs, for MEASURE_SECONDS where gloo or NCCL
    notice. The store shows how far each rank has come, under done/<rank>.
    """
    links_begin = False
    try:
        device = select_device()
        report = replace(report, metrics={**report.metrics, "matmul": matmul_rate(device)})
        links_begin = parallel.world_size > 1
        metrics, groups = dict(report.metrics), {}
        for name, rate, ranks in _link_rates(report.rank, parallel, store, device):
            metrics[name] = rate
            if ranks is not None:
                groups[name] = ranks
        return replace(report, metrics=metrics, groups=groups)
    except Exception as error:  # noqa: BLE001 (as above)
        text = _first_line(error)
        lost_peer = links_begin and _LOST_PEER.search(text) is not None
        return replace(report, problem=text, lost_peer=lost_peer)


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of products of square matrices, bf16 on a GPU and fp32 on a CPU."""
    size = _MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factor = torch.ones((size, size), dtype=dtype, device=device)
    multiply = partial(torch.mm, factor, factor, out=torch.empty_like(factor))
    _seconds(multiply, device)  # loads libraries
    count = took = 0.0
    while took < _MATMUL_SECONDS:
        took += _seconds(multiply, device)
        count += 1
    return count * 2 * size**3 / took / 1e12


def _link_rates(
    rank: int, parallel: ResolvedParallel, store: dist.Store, device: torch.device
) -> Iterator[tuple[str, float, list[int] | None]]:
    """(measure, GB/s, the ranks of the group where the rate is one of the whole group). The bytes
    of a collective are those that a rank sends with the algorithm that sends least."""
    if parallel.world_size == 1:
        return
    steps = itertools.count(1)

    def advance() -> None:
        store.set(f"done/{rank}", str(next(steps)))

    advance()
    dist.init_process_group(
        backend=collective_backend(device),
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=parallel.world_size,
        timeout=datetime.timedelta(seconds=MEASURE_SECONDS),
    )
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, **parallel.group_sizes()
    )
    for kind, group in {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
    }.items():
        if (size := group.size()) == 1:
            continue
        advance()
        dist.barrier()  # one kind at a time
        advance()
        ranks = dist.get_process_group_ranks(group)
        each = _MESSAGE_BYTES[device.type] // 4 // size
        data = torch.ones(each * size, dtype=torch.float32, device=device)
        received = torch.empty_like(data)
        if kind == "pp":
            dist.all_reduce(data[:1], group=group)  # all must take part in a group's first call
        else:
            sent = (size - 1) / size * data.nbytes / 1e9
            reduce = partial(dist.all_reduce, data, group=group)
            data.zero_()  # which sums leave as they are
            yield f"{kind} all-reduce", 2 * sent / _median_of(reduce, device), ranks
            swap = partial(dist.all_to_all_single, received, data, group=group)
            yield f"{kind} all-to-all", sent / _median_of(swap, device), ranks
        if pairs := _pair_seconds(group, data, received, device):
            yield f"{kind} send/recv", data.nbytes / 1e9 / min(pairs), None


def _pair_seconds(
    group: dist.ProcessGroup, data: torch.Tensor, received: torch.Tensor, device: torch.device
) -> list[float]:
    """Seconds of an exchange with the next rank of the group, then with the one before. A slow rank
    is slow with both; its neighbours are slow with one."""
    size, ranks = group.size(), dist.get_process_group_ranks(group)

    def exchange(peer: int) -> None:
        sending = dist.P2POp(dist.isend, data, peer, group)
        receiving = dist.P2POp(dist.irecv, received, peer, group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    found = []
    for first in (0, 1) if size > 2 else (0,):
        place = (group.rank() - first) % size
        if size % 2 and place == size - 1:
            continue  # no partner this time
        peer = ranks[(group.rank() + (1 if place % 2 == 0 else -1)) % size]
        found.append(_median_of(partial(exchange, peer), device))
    return found


def _median_of(work: Callable[[], Any], device: torch.device) -> float:
    work()  # the first call makes connections
    return statistics.median(_seconds(work, device) for _ in range(_ROUNDS))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else bool  # on a CPU nothing is left
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


# Which hosts are unfit, from the reports of all ranks.


def blame(reports: Iterable[Report], missing: Mapping[int, str], why: str) -> list[Report]:
    """The reports without those of ranks that only lost a peer, and with one for each rank that
    sent none (`missing`: its host).

    Where a rank failed by itself, the others lost it or had no time: none of them is blamed.
    """
    reports = list(reports)
    absent = [Report(rank, host, "unknown", why) for rank, host in sorted(missing.items())]
    failed = [r for r in reports if r.problem is not None and not r.lost_peer]
    sound = [r for r in reports if r.problem is None]
    if failed:
        return sound + failed
    return sound + absent if absent else reports


def judge(reports: Sequence[Report], share: float, minima: Mapping[str, float]) -> Verdict:
    """Compare every figure with `share` times the median of its peers, and with the user's
    `minima`, by measure. The peers of a rank are all other ranks; those of a group are the groups
    of its kind over as many hosts."""
    problems = _device_problems(reports)
    rows, slow_groups = [], []
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        units = _units(reports, name)
        median = statistics.median(unit.value for unit in units)
        row = Row(name, _UNITS.get(name, "GB/s"), median, min(units, key=lambda unit: unit.value))
        rows.append(row)
        slow = {}
        for unit in units:
            text = f"{unit.names}: {name} {unit.value:,.3g} {row.unit}"
            peers = [u.value for u in units if u is not unit and len(u.hosts) == len(unit.hosts)]
            usual = statistics.median(peers or [0.0])
            needed = max(share, _MEMORY_SHARE) if name == MEMORY else share
            if unit.value < (least := minima.get(name, 0.0)):
                slow[unit] = f"{text}, less than {least:,.3g}"
            elif unit.value < needed * usual:
                slow[unit] = f"{text}, {unit.value / usual:.0%} of its peers' {usual:,.3g}"
        fast_hosts = {host for unit in units if unit not in slow for host in unit.hosts}
        for unit, line in slow.items():
            if len(unit.ranks) == 1:
                problems[min(unit.hosts)].append(line)
            else:
                slow_groups.append((unit.hosts, fast_hosts, line))
    faulty = set(problems)
    for hosts, fast_hosts, line in slow_groups:
        # Not a host that is also in a fast group; of the rest, one with a problem of its own.
        suspects = (hosts - fast_hosts) or hosts
        for host in sorted(suspects & faulty or suspects):
            problems[host].append(line)
    return Verdict(rows, dict(problems))


def _device_problems(reports: Sequence[Report]) -> defaultdict[str, list[str]]:
    """By host: what is known before anything is measured."""
    problems: defaultdict[str, list[str]] = defaultdict(list)
    sound = [report for report in reports if report.problem is None]
    usual_device = statistics.mode([report.device for report in sound] or [""])
    usual_driver = statistics.mode([r.driver for r in sound if r.driver] or [""])
    for report in reports:
        if report.problem is not None:
            text = f": {report.problem}"
        elif report.device != usual_device:
            device, usual = ("no GPU" if d == "cpu" else d for d in (report.device, usual_device))
            text = f" has {device}, and most have {usual}"
        elif report.driver not in (None, usual_driver):
            text = f" has driver {report.driver}, and most have {usual_driver}"
        else:
            continue
        problems[report.host].append(f"rank {report.rank}{text}")
    return problems


def _units(reports: Sequence[Report], measure: str) -> list[Unit]:
    """A group's figure is that of its slowest member."""
    hosts = {report.rank: report.host for report in reports}
    values: dict[tuple[int, ...], float] = {}
    for report in reports:
        if measure in report.metrics:
            ranks = tuple(report.groups.get(measure, (report.rank,)))
            value = report.metrics[measure]
            values[ranks] = min(value, values.get(ranks, value))
    # `blame` may have removed reports of a group's members.
    return [
        Unit(ranks, frozenset(hosts[rank] for rank in ranks if rank in hosts), value)
        for ranks, value in values.items()
    ]
