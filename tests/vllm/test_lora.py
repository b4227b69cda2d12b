"""Adapters whose responses come from real vLLM servers: what these get is merged on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hf.published import write_model
from tests.vllm.runs import make_run

# Sizes that the kernels for CPUs take.
KERNELS = {"head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_servers_sample_from_the_base_with_its_adapters(vllm_python: Path, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=9, vocab_size=53, **KERNELS)
    run = make_run(
        tmp_path,
        vllm_python,
        model={"hf_path": str(source), "lora": {"rank": 4}},
        parallel={"layout": "tp=2,ep=2"},
        rollout={"max_response_tokens": 24},
        optimizer={"learning_rate": 1e-2},
        training={"steps": 2, "precision": "fp32"},
    )
    run.finish(run.start())
    steps = run.steps()
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["mismatch/abs_mean"] <= 1e-5, record["step"]
        assert record["ratio/token/p99"] - record["ratio/token/p01"] > 1e-3, record["step"]
        assert record["sync/version"] == record["step"]
