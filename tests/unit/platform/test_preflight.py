"""Preflight: which host is named on what metrics, and what a rank says of its device."""

from __future__ import annotations

import datetime
import json
import os
import random
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform import preflight
from gspo_megatron.platform.preflight import MEMORY, Report, blame, collect, judge, look

GPUS = 4  # of a host


def devices(reports: list[Report]) -> dict[str, list[str]]:
    """The problems by host that need no measurement."""
    return judge(reports, 0.7, {}).problems


def host_of(rank: int) -> str:
    return f"node{rank // GPUS:02d}"


def best_link(host: int, hosts: int, slow: int | None, factor: float) -> float:
    """Of a host's exchanges with its two neighbours in a ring, the faster; either is as slow as
    the slower of its ends."""
    if slow is None:
        return 1.0
    neighbours = ((host + 1) % hosts, (host - 1) % hosts)
    return max(factor if slow in (host, other) else 1.0 for other in neighbours)


def cluster(
    seed: int, hosts: int, *, slow: int | None = None, what: str = "", factor: float = 0.3
) -> list[Report]:
    """Reports of a layout with tp inside a host and dp across them; metrics vary by 10%. `slow`:
    the host whose `what` (device or network) is slower by `factor`."""
    source = random.Random(seed)
    world = hosts * GPUS
    tp = {rank: range(rank // GPUS * GPUS, rank // GPUS * GPUS + GPUS) for rank in range(world)}
    dp = {rank: range(rank % GPUS, world, GPUS) for rank in range(world)}

    def vary(usual: float) -> float:
        return usual * source.uniform(0.9, 1.0)

    group_rates: dict[tuple, float] = {}
    reports = []
    for rank in range(world):
        is_slow = rank // GPUS == slow
        device = factor if is_slow and what == "device" else 1.0
        network = best_link(rank // GPUS, hosts, slow if what == "network" else None, factor)
        slowest = factor if what == "network" else 1.0  # every dp group has a rank on each host
        metrics = {
            "matmul": vary(600.0) * device,
            MEMORY: source.uniform(78.0, 79.0),
            "tp all-reduce": group_rates.setdefault(("tp", *tp[rank]), vary(300.0)),
            "dp all-reduce": group_rates.setdefault(("dp", *dp[rank]), vary(40.0)) * slowest,
            "dp send/recv": vary(20.0) * network,
        }
        groups = {"tp all-reduce": list(tp[rank]), "dp all-reduce": list(dp[rank])}
        reports.append(Report(rank, host_of(rank), "H100", metrics=metrics, groups=groups))
    return reports


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hosts", [1, 2, 3, 32])
def test_sound_hosts_are_fit_and_the_table_has_every_measure(seed: int, hosts: int) -> None:
    reports = cluster(seed, hosts)
    verdict = judge(reports, 0.7, {})
    assert verdict.problems == {}
    assert [row.measure for row in verdict.rows] == list(reports[0].metrics)
    for row in verdict.rows:
        values = [report.metrics[row.measure] for report in reports]
        assert row.slowest.value == min(values) <= row.median <= max(values)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("what", ["device", "network"])
def test_the_slow_host_alone_is_named(seed: int, what: str) -> None:
    hosts = random.Random(seed).choice([4, 8, 16] if what == "network" else [2, 3, 8, 16])
    slow = random.Random(seed + 100).randrange(hosts)
    verdict = judge(cluster(seed, hosts, slow=slow, what=what), 0.7, {})
    assert set(verdict.problems) == {host_of(slow * GPUS)}
    lines = verdict.problems[host_of(slow * GPUS)]
    assert len(lines) == GPUS
    measure = {"device": "matmul", "network": "dp send/recv"}[what]
    assert all(measure in line and "of its peers'" in line for line in lines)


def test_a_share_decides_what_is_slow() -> None:
    reports = cluster(1, 4, slow=2, what="device", factor=0.6)
    assert set(devices(reports)) == {"node02"}
    assert judge(reports, 0.5, {}).problems == {}


def with_metrics(report: Report, metrics: dict[str, float]) -> Report:
    return replace(report, metrics={**report.metrics, **metrics})


def test_a_slow_group_is_blamed_on_the_host_that_is_in_no_fast_group() -> None:
    slow = {"tp all-reduce": 30.0}
    reports = [with_metrics(r, slow) if r.host == "node01" else r for r in cluster(3, 4)]
    verdict = judge(reports, 0.7, {})
    assert set(verdict.problems) == {"node01"}
    assert verdict.problems["node01"][0].startswith("ranks 4-7: tp all-reduce 30 GB/s, 1")


def test_a_group_over_two_hosts_names_both_where_nothing_tells_which() -> None:
    def report(rank: int, rate: float) -> Report:
        groups = {"ep all-reduce": [rank // 2 * 2, rank // 2 * 2 + 1]}
        metrics = {"ep all-reduce": rate}
        return Report(rank, f"n{rank}", "H100", metrics=metrics, groups=groups)

    reports = [report(rank, 10.0 if rank in (2, 3) else 40.0) for rank in range(6)]
    assert set(judge(reports, 0.7, {}).problems) == {"n2", "n3"}
    # what is known of one of them clears the other
    reports = [with_metrics(r, {"matmul": 100.0 if r.rank == 3 else 600.0}) for r in reports]
    assert set(judge(reports, 0.7, {}).problems) == {"n3"}


def test_a_users_minimum() -> None:
    reports = cluster(4, 2)
    minima = {"matmul": 500.0, "dp all-reduce": 30.0, "tp all-reduce": 250.0}
    assert judge(reports, 0.0, minima).problems == {}
    verdict = judge(reports, 0.0, {"dp all-reduce": 45.0})
    assert set(verdict.problems) == {"node00", "node01"}
    assert "dp all-reduce" in verdict.problems["node00"][0]
    assert verdict.problems["node00"][0].endswith("less than 45")


def test_memory_that_another_program_uses() -> None:
    reports = cluster(5, 3)
    reports[6] = with_metrics(reports[6], {MEMORY: 66.0})
    ((host, (line,)),) = judge(reports, 0.7, {}).problems.items()
    assert host == "node01" and line.startswith("rank 6: free memory 66 GB, 8")


def test_devices_and_drivers_that_are_missing_or_of_another_kind() -> None:
    reports = [Report(rank, host_of(rank), "H100", driver="580.65") for rank in range(12)]
    assert devices(reports) == {}
    reports[0] = replace(reports[0], device="cpu", problem="RuntimeError: no CUDA")
    reports[1] = replace(reports[1], driver=None)  # it does not tell
    reports[5] = replace(reports[5], device="cpu")
    reports[6] = replace(reports[6], driver="570.1")
    reports[9] = replace(reports[9], device="A100", driver="570.1")
    assert devices(reports) == {
        "node00": ["rank 0: RuntimeError: no CUDA"],
        "node01": [
            "rank 5 has no GPU, and most have H100",
            "rank 6 has driver 570.1, and most have 580.65",
        ],
        "node02": ["rank 9 has A100, and most have H100"],
    }
    assert devices([replace(report, driver=None) for report in reports[1:5]]) == {}


def test_a_rank_that_only_waited_for_a_failed_one_is_not_blamed() -> None:
    reports = [Report(rank, host_of(rank), "H100") for rank in range(8)]
    lost = [replace(r, problem="connection closed by peer", lost_peer=True) for r in reports]
    broken = replace(reports[5], problem="OutOfMemoryError")
    assert set(devices(blame([*lost[:3], broken], {7: "node01"}, "gone"))) == {"node01"}
    dead = devices(blame(lost[:7], {7: "node01"}, "gone"))
    assert dead == {"node01": ["rank 7: gone"]}
    assert set(devices(blame(lost, {}, "gone"))) == {"node00", "node01"}


def test_a_group_with_an_excused_rank_is_judged_by_the_others() -> None:
    reports = cluster(1, 2)
    broken = replace(reports[7], problem="OutOfMemoryError", metrics={}, groups={})
    found = blame([*reports[:3], broken], {3: "node00"}, "gone")  # 3 had no time to report
    verdict = judge(found, 0.7, {})
    assert set(verdict.problems) == {"node01"}
    assert "tp all-reduce" in {row.measure for row in verdict.rows}


def test_reports_are_waited_for_and_an_error_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_GRACE_SECONDS", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def tell(report: Report) -> None:
        store.set(f"speed/{report.rank}", json.dumps(asdict(report)))

    sound = Report(0, "a", "cpu", metrics={"matmul": 1.5}, groups={"dp all-reduce": [0, 1]})
    tell(sound)
    late = threading.Timer(0.5, tell, [replace(sound, rank=1, host="b")])
    late.start()
    found = collect(store, "speed", range(2), 60.0)
    assert found == {0: sound, 1: replace(sound, rank=1, host="b")}
    late.join()
    assert set(collect(store, "speed", range(3), 0.3)) == {0, 1}  # rank 2 never comes
    tell(replace(sound, rank=3, problem="broken"))
    start = time.monotonic()
    assert set(collect(store, "speed", range(4), 60.0)) == {0, 1, 3}
    assert time.monotonic() - start < 30.0


def test_of_late_ranks_those_that_did_least_hold_the_others_up() -> None:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=5))
    for rank, done in ((1, 3), (2, 2), (4, 2)):
        store.set(f"done/{rank}", str(done))
    late = {rank: f"n{rank}" for rank in (1, 2, 4)}
    assert preflight.least_advanced(store, late) == {2: "n2", 4: "n4"}
    assert preflight.least_advanced(store, {**late, 5: "n5"}) == {5: "n5"}  # it never began
    assert preflight.least_advanced(store, {}) == {}


def test_a_cpu_is_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert look(3, "bf16") == Report(3, "n7", "cpu")
    assert 1e-5 < preflight.matmul_rate(torch.device("cpu")) < 100.0  # TFLOP/s


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name before all others in PATH, to be written by the test."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.touch(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    return path


def test_a_rank_says_what_driver_it_has(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "select_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**9))
    nvidia_smi.write_text('#!/bin/sh\necho "$@" | grep -q driver_version && echo 580.65; exit 0\n')
    report = Report(2, "n7", "NVIDIA H100", driver="580.65", metrics={MEMORY: 1.0})
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert look(2, "bf16") == report
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert look(2, "bf16") == replace(report, driver=None)


def test_gpus_that_torch_cannot_use_are_no_cpu(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nvidia_smi.write_text("#!/bin/sh\necho 'GPU 0: H100'\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "can use none of the GPUs that nvidia-smi lists" in look(0, "bf16").problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert look(0, "bf16").problem is None


def test_more_ranks_than_gpus_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    problem = look(15, "bf16").problem
    assert problem is not None and "local rank 7" in problem and "sees 7 GPUs" in problem


def test_rank_0_leaves_after_those_that_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the store. Ranks that said nothing are not waited for; nobody for ever."""
    monkeypatch.setattr(preflight, "_LEAVING_SECONDS", 60.0)
    store, reported = dist.HashStore(), {0: None, 1: None, 3: None}
    main = threading.Thread(target=preflight._leave, args=(store, 0, reported))
    main.start()
    preflight._leave(store, 3)
    main.join(0.5)
    assert main.is_alive()
    preflight._leave(store, 1)
    main.join(10)
    assert not main.is_alive()
    monkeypatch.setattr(preflight, "_LEAVING_SECONDS", 0.2)
    preflight._leave(dist.HashStore(), 0, reported)
