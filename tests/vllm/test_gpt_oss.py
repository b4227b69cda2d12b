"""A run of gpt-oss whose responses come from a real vLLM server.

In bf16: vLLM keeps the sinks in bf16, and its attention for CPUs refuses them beside fp32 states.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hf.published import write_model
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# What vLLM's kernels take. The limit is a constant there.
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "swiglu_limit": 7.0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def test_a_server_samples_from_the_policy_at_every_step(vllm_python: Path, tmp_path: Path) -> None:
    """Windows, sinks and YaRN are those of the trainer, before and after an update of the
    weights."""
    changes = {**SIZES, **HEADS, "sliding_window": 16, "torch_dtype": "bfloat16"}
    folder = write_model(tmp_path / "model", "gpt_oss", seed=3, **changes)
    run = make_run(
        tmp_path,
        vllm_python,
        model={"hf_path": str(folder)},
        rollout={"max_response_tokens": 40},
        optimizer={"learning_rate": 2e-3},
        training={"steps": 3, "precision": "bf16"},
    )
    run.finish(run.start())
    for record in run.steps():
        # bf16 on both sides, of other kernels
        assert record["mismatch/abs_mean"] <= 0.03, record["step"]
        assert record["ratio/token/p99"] - record["ratio/token/p01"] > 0.1, record["step"]
        assert record["sync/version"] == record["step"]
