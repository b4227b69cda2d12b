"""How the ranks of a job agree on whether their nodes are fit.

Everything travels through torch's key-value store, over TCP: it needs no rank but the main one, so
that a rank which is dead, stuck or without a device is found by what it did not say.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from gspo_megatron.config.parallel import ResolvedParallel
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.platform.preflight.judge import Report, Verdict, excused, judge, judge_devices
from gspo_megatron.platform.preflight.measure import look, measure

ARRIVAL_SECONDS = 300.0  # until all ranks have imported torch, from a shared file system
MEASURE_SECONDS = 90.0  # for measurements that take a few, and NCCL's first connections
_GRACE_SECONDS = 3.0  # for further reports, once one says that something is wrong
_LEAVING_SECONDS = 30.0  # for ranks that have reported to hear the result and to leave
_POLL_SECONDS = 0.1
_UNKNOWN = "a host that did not say its name"


@dataclass(frozen=True)
class Limits:
    """What no host may fall short of; see judge."""

    share: float
    minima: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """`is_stuck`: a collective hangs in a thread, and the process has to be ended without it."""

    is_fit: bool
    is_stuck: bool = False


def run_preflight(
    parallel: ResolvedParallel, precision: str, limits: Limits, show: Callable[[Verdict], None]
) -> Outcome:
    """Look at the device and the links of this rank, together with all others of RANK and
    WORLD_SIZE. The main rank shows what was found; all are told whether every host is fit."""
    rank, world = int(os.environ.get("RANK", "0")), parallel.world_size
    store, spare = _stores(rank, world)
    reports: dict[int, Report] = {}
    own = look(rank, precision)
    _tell(store, "device", own)
    if rank == 0:
        reports = collect(store, "device", range(world), ARRIVAL_SECONDS)
        absent = dict.fromkeys(set(range(world)) - set(reports), _UNKNOWN)
        why = f"not there after {ARRIVAL_SECONDS:.0f} s"
        problems = judge_devices(excused(reports.values(), absent, why))
        if problems:
            show(Verdict([], problems))
        store.set("devices", "unfit" if problems else "fit")
        hosts = {n: report.host for n, report in reports.items()}
    if _answer(store, "devices", ARRIVAL_SECONDS) == "unfit":
        _leave(store, rank, reports)
        return Outcome(False)

    def work() -> None:
        _tell(spare, "speed", measure(own, parallel, spare, MEASURE_SECONDS))

    thread = threading.Thread(target=work, name="preflight", daemon=True)
    thread.start()
    if rank == 0:
        reports = collect(store, "speed", range(world), MEASURE_SECONDS)
        late = least_advanced(store, {n: hosts[n] for n in hosts if n not in reports})
        found = excused(reports.values(), late, "has died, or stands still, and gave no figures")
        verdict = judge(found, limits.share, limits.minima)
        show(verdict)
        store.set("speeds", "unfit" if verdict.problems else "fit")
    is_fit = _answer(store, "speeds", 2 * MEASURE_SECONDS) == "fit"
    thread.join(_GRACE_SECONDS)
    if not thread.is_alive():
        stop_processes()
    _leave(store, rank, reports)
    return Outcome(is_fit, thread.is_alive())


def _stores(rank: int, world: int) -> tuple[dist.Store, dist.Store]:
    """Two connections to one store: a thread that waits on one does not hold up the other."""
    if world == 1:
        store = dist.HashStore()
        return store, store
    own, _, _ = next(iter(dist.rendezvous("env://", rank, world)))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    other = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    # the rendezvous may have put a prefix of its own before the keys
    return tuple(dist.PrefixStore("preflight", s) for s in (_plain(own), other))


def _plain(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _tell(store: dist.Store, subject: str, report: Report) -> None:
    store.set(f"{subject}/{report.rank}", json.dumps(asdict(report)))


def collect(
    store: dist.Store, subject: str, ranks: Collection[int], seconds: float
) -> dict[int, Report]:
    """The reports that come in time; soon after the first that says what is wrong, no more are
    waited for."""
    found: dict[int, Report] = {}
    end = time.monotonic() + seconds
    while len(found) < len(ranks) and time.monotonic() < end:
        before = len(found)
        for rank in ranks:
            key = f"{subject}/{rank}"
            if rank not in found and store.check([key]):
                found[rank] = Report(**json.loads(store.get(key)))
                if found[rank].wrong is not None:
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if len(found) == before:
            time.sleep(_POLL_SECONDS)
    return found


def least_advanced(store: dist.Store, late: Mapping[int, str]) -> dict[int, str]:
    """Of the ranks that have not answered, those that the others wait for: with the least done."""
    done = {
        rank: int(store.get(key)) if store.check([key := f"done/{rank}"]) else 0 for rank in late
    }
    return {rank: host for rank, host in late.items() if done[rank] == min(done.values())}


def _answer(store: dist.Store, key: str, seconds: float) -> str:
    store.wait([key], datetime.timedelta(seconds=seconds + _GRACE_SECONDS))
    return store.get(key).decode()


def _leave(store: dist.Store, rank: int, reported: Collection[int] = ()) -> None:
    """The store is gone with the main rank: it leaves last of those that it has heard of. On a slow
    host that takes its time."""
    if rank:
        store.set(f"left/{rank}", "")
        return
    keys = [f"left/{other}" for other in reported if other]
    end = time.monotonic() + _LEAVING_SECONDS
    while keys and not store.check(keys) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
