"""Runs of the real code on rehearsed devices, with every kind of layout. In fp32 their metrics
equal those of the same runs on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_rehearsal.conftest import MakeConfig
from tests.cuda_rehearsal.host import Host
from tests.cuda_rehearsal.tasks import stream_weights, train, train_stage
from tests.parallel.pool import Pool

RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp=2,cp=2 with r2": {"parallel__layout": "tp=2,cp=2", "routing__replay": "r2"},
    "dp=2,ep=2 with r3 and KL": {
        "parallel__layout": "dp=2,ep=2",
        "routing__replay": "r3",
        "objective__kl": "k3",
        "objective__kl_coefficient": 0.01,
    },
    "pp=2,vpp=2 with recomputation": {
        "parallel__layout": "pp=2,vpp=2",
        "training__recompute": "full",
    },
    "dp=2 with overlap": {
        "parallel__layout": "dp=2",
        "parallel__ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "tp=2,pp=2,ep=2": {"parallel__layout": "tp=2,pp=2,ep=2"},
    "dp=2 with dynamic sampling": {
        "parallel__layout": "dp=2",
        "rollout__dynamic_sampling": True,
        "rollout__max_refills": 1,
    },
}
STAGES = {"sft": "dp=2,ep=2", "pretrain": "tp=2,pp=2"}


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Check that the metrics of steps agree, up to the rounding of float32 sums in another
    order."""
    assert len(found) == len(expected) == 3  # one evaluation and two steps
    for step, reference in zip(found, expected, strict=True):
        assert step.keys() == reference.keys()
        for name, value in reference.items():
            if isinstance(value, float):
                assert step[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
            else:
                assert step[name] == value, name


@pytest.mark.parametrize("name", RUNS)
def test_fp32_reports_what_cpus_report(
    host: Host, cpus: Pool, make_config: MakeConfig, name: str
) -> None:
    expected = cpus.on(make_config(**RUNS[name]), train)
    assert_close(host.on(make_config(**RUNS[name]), train), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_other_stages_report_what_cpus_report(
    host: Host, cpus: Pool, make_stage: Callable[[str, str], Any], stage: str
) -> None:
    expected = cpus.on(make_stage(stage, STAGES[stage]), train_stage)
    assert_close(host.on(make_stage(stage, STAGES[stage]), train_stage), expected)


def test_a_server_loads_the_weights_that_cpus_send(
    host: Host, cpus: Pool, make_config: MakeConfig
) -> None:
    """Rank 0 of a sharded model sends two versions of the weights with the transport nccl."""
    config = make_config(parallel__layout="tp=2,ep=2")
    expected = cpus.on(config, stream_weights, timeout=240)
    assert len(expected) == 2 and expected[0] != expected[1]
    assert host.on(config, stream_weights, timeout=240) == expected
