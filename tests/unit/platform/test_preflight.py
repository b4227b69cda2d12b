"""Preflight: which host is named on what figures, and what a rank says of its device."""

from __future__ import annotations

import datetime
import json
import random
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.cli.preflight import MEASURES
from gspo_megatron.platform.preflight import measure as measuring
from gspo_megatron.platform.preflight.judge import (
    MAIN_OPERATION,
    MEMORY,
    Report,
    excused,
    judge,
    judge_devices,
)
from gspo_megatron.platform.preflight.measure import look, matmul_rate
from gspo_megatron.platform.preflight.run import collect, least_advanced

GPUS = 4  # of a host


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
    """Reports of a layout with tp inside a host and dp across them; figures vary by 10%. `slow`:
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
        figures = {
            "matmul": vary(600.0) * device,
            MEMORY: source.uniform(78.0, 79.0),
            "tp all-reduce": group_rates.setdefault(("tp", *tp[rank]), vary(300.0)),
            "dp all-reduce": group_rates.setdefault(("dp", *dp[rank]), vary(40.0)) * slowest,
            "dp send/recv": vary(20.0) * network,
        }
        groups = {"tp all-reduce": list(tp[rank]), "dp all-reduce": list(dp[rank])}
        reports.append(Report(rank, host_of(rank), "H100", figures=figures, groups=groups))
    return reports


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hosts", [1, 2, 3, 32])
def test_sound_hosts_are_fit_and_the_table_has_every_measure(seed: int, hosts: int) -> None:
    reports = cluster(seed, hosts)
    verdict = judge(reports, 0.7, {})
    assert verdict.problems == {}
    assert [row.measure for row in verdict.rows] == list(reports[0].figures)
    for row in verdict.rows:
        values = [report.figures[row.measure] for report in reports]
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
    assert set(judge(reports, 0.7, {}).problems) == {"node02"}
    assert judge(reports, 0.5, {}).problems == {}


def test_a_slow_group_is_laid_to_the_host_that_no_fast_group_has() -> None:
    reports = cluster(3, 4)
    for number, report in enumerate(reports):  # the tp group of node01 is slow
        if report.host == "node01":
            figures = {**report.figures, "tp all-reduce": 30.0}
            reports[number] = replace(report, figures=figures)
    verdict = judge(reports, 0.7, {})
    assert set(verdict.problems) == {"node01"}
    assert verdict.problems["node01"][0].startswith("ranks 4-7: tp all-reduce 30 GB/s, 1")


def test_a_group_over_two_hosts_names_both_where_nothing_tells_which() -> None:
    def report(rank: int, rate: float) -> Report:
        groups = {"ep all-reduce": [rank // 2 * 2, rank // 2 * 2 + 1]}
        figures = {"ep all-reduce": rate}
        return Report(rank, f"n{rank}", "H100", figures=figures, groups=groups)

    reports = [report(rank, 10.0 if rank in (2, 3) else 40.0) for rank in range(6)]
    assert set(judge(reports, 0.7, {}).problems) == {"n2", "n3"}
    # what is known of one of them clears the other
    slow = replace(reports[3], figures={**reports[3].figures, "matmul": 100.0})
    others = [replace(r, figures={**r.figures, "matmul": 600.0}) for r in reports if r.rank != 3]
    assert set(judge([*others, slow], 0.7, {}).problems) == {"n3"}


def test_minima_are_of_the_operation_that_training_uses() -> None:
    assert set(MAIN_OPERATION) == set(MEASURES)
    reports = cluster(4, 2)
    assert judge(reports, 0.0, {"matmul": 500.0, "dp": 30.0, "tp": 250.0}).problems == {}
    verdict = judge(reports, 0.0, {"dp": 45.0})
    assert set(verdict.problems) == {"node00", "node01"}
    assert "dp all-reduce" in verdict.problems["node00"][0]
    assert verdict.problems["node00"][0].endswith("less than 45")


def test_memory_that_somebody_left_occupied() -> None:
    reports = cluster(5, 3)
    reports[6] = replace(reports[6], figures={**reports[6].figures, MEMORY: 66.0})
    verdict = judge(reports, 0.7, {})
    assert verdict.problems == {"node01": [verdict.problems["node01"][0]]}
    assert verdict.problems["node01"][0].startswith("rank 6: free memory 66 GiB, 8")


def test_devices_that_are_missing_or_of_another_kind() -> None:
    reports = [Report(rank, host_of(rank), "H100") for rank in range(12)]
    assert judge_devices(reports) == {}
    reports[5] = replace(reports[5], device="cpu")
    reports[8] = replace(reports[8], device="A100")
    reports[0] = replace(reports[0], device="cpu", wrong="RuntimeError: no CUDA")
    assert judge_devices(reports) == {
        "node00": ["rank 0: RuntimeError: no CUDA"],
        "node01": ["rank 5 has no GPU, and most have H100"],
        "node02": ["rank 8 has A100, and most have H100"],
    }


def test_who_only_waited_for_a_failed_rank_is_excused() -> None:
    reports = [Report(rank, host_of(rank), "H100") for rank in range(8)]
    lost = [replace(r, wrong="connection closed by peer", is_cut_off=True) for r in reports]
    broken = replace(reports[5], wrong="OutOfMemoryError")
    assert set(judge_devices(excused([*lost[:3], broken], {7: "node01"}, "gone"))) == {"node01"}
    dead = judge_devices(excused(lost[:7], {7: "node01"}, "gone"))
    assert dead == {"node01": ["rank 7: gone"]}
    assert set(judge_devices(excused(lost, {}, "gone"))) == {"node00", "node01"}


def test_reports_are_waited_for_and_an_error_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_megatron.platform.preflight.run._GRACE_SECONDS", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def tell(report: Report) -> None:
        store.set(f"speed/{report.rank}", json.dumps(asdict(report)))

    sound = Report(0, "a", "cpu", figures={"matmul": 1.5}, groups={"dp all-reduce": [0, 1]})
    tell(sound)
    late = threading.Timer(0.5, tell, [replace(sound, rank=1, host="b")])
    late.start()
    found = collect(store, "speed", range(2), 60.0)
    assert found == {0: sound, 1: replace(sound, rank=1, host="b")}
    late.join()
    assert set(collect(store, "speed", range(3), 0.3)) == {0, 1}  # rank 2 never comes
    tell(replace(sound, rank=3, wrong="broken"))
    start = time.monotonic()
    assert set(collect(store, "speed", range(4), 60.0)) == {0, 1, 3}
    assert time.monotonic() - start < 30.0


def test_of_late_ranks_those_that_did_least_hold_the_others_up() -> None:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=5))
    for rank, done in ((1, 3), (2, 2), (4, 2)):
        store.set(f"done/{rank}", str(done))
    late = {rank: f"n{rank}" for rank in (1, 2, 4)}
    assert least_advanced(store, late) == {2: "n2", 4: "n4"}
    assert least_advanced(store, {**late, 5: "n5"}) == {5: "n5"}  # it never began
    assert least_advanced(store, {}) == {}


def test_a_cpu_is_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert look(3, "bf16") == Report(3, "n7", "cpu")
    rate = matmul_rate(torch.device("cpu"))
    assert 1e-5 < rate < 100.0  # TFLOP/s


def test_gpus_that_torch_cannot_use_are_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listing = subprocess.CompletedProcess([], 0, stdout="GPU 0: H100\n")
    monkeypatch.setattr(measuring.subprocess, "run", lambda *_, **__: listing)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "can use none of the GPUs that nvidia-smi lists" in look(0, "bf16").wrong
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert look(0, "bf16").wrong is None


def test_more_ranks_than_gpus_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    wrong = look(15, "bf16").wrong
    assert wrong is not None and "local rank 7" in wrong and "sees 7 GPUs" in wrong
