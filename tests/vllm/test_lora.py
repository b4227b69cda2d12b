"""Runs that train adapters, with responses from real vLLM servers. The weights are sent merged, or
as adapters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.hf.published import write_model
from tests.vllm.runs import Run, make_run

# The kernels for CPUs support these sizes.
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


def adapter_run(folder: Path, python: Path, steps: int = 2, staleness: int = 0, **vllm: Any) -> Run:
    """A run of a dense model. On CPUs, vLLM 0.30 cannot run adapters of models with experts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = write_model(folder / "source", "qwen3", seed=9, vocab_size=53, **heads, **KERNELS)
    return make_run(
        folder,
        python,
        model={
            "hf_path": str(source),
            "megatron": {},
            "lora": {"rank": 4, "alpha": 8.0, "targets": "all"},
        },
        parallel={"layout": "tp=2"},
        rollout={
            "max_response_tokens": 24,
            "max_staleness": staleness,
            "vllm": {"lora": "adapter", **vllm},
        },
        optimizer={"learning_rate": 1e-2},
        training={"steps": steps, "precision": "fp32"},
    )


def names_in_log(run: Run, done: str) -> list[str]:
    """The names of adapters in the server's log, in the order in which they were loaded or
    removed."""
    logs = (run.out / "rollouts" / "servers").glob("*.log")
    text = "".join(path.read_text() for path in logs)
    return re.findall(rf"{done} LoRA adapter: name '([^']+)'", text)


def test_servers_sample_with_the_adapters_of_each_version(
    vllm_python: Path, tmp_path: Path
) -> None:
    """The run has two phases. When the second phase begins, the run does not send the adapter that
    the server already has."""
    run = adapter_run(tmp_path, vllm_python)
    phases = "[{until_step: 1}, {rollout: {max_response_tokens: 20}}]"
    said = run.finish(run.start(f"training.phases={phases}", "checkpoint.interval=1"))
    assert "the servers go on with the next phase" in said
    steps = run.steps()
    assert [record["sync/version"] for record in steps] == [1, 2]
    assert steps[1]["response/length_max"] <= 20
    for record in steps:
        assert record["mismatch/abs_mean"] <= 1e-5, record["step"]
        assert record["ratio/token/p99"] - record["ratio/token/p01"] > 1e-3, record["step"]
        # adapters of rank 4 in fp32; the model itself is far larger
        assert record["sync/bytes"] == 4 * 4 * 4 * (
            2 * (64 + 128) + 2 * (64 + 64) + 3 * (64 + 64)
        ), record["step"]
    assert names_in_log(run, "Loaded new") == ["policy-0", "policy-1", "policy-2"]
    assert names_in_log(run, "Removed") == ["policy-0", "policy-1"]


@pytest.mark.full
def test_responses_under_way_end_with_their_adapter(vllm_python: Path, tmp_path: Path) -> None:
    """A restarted server gets the newest adapter."""
    run = adapter_run(tmp_path, vllm_python, steps=4, staleness=1)
    process = run.start()
    run.wait(process, lambda: (run.out / "rollouts" / "step_00000002_0.groups").exists())
    run.servers()[0].kill()
    said = run.finish(process)
    assert "was killed by SIGKILL; restart 1" in said
    steps = run.steps()
    assert [record["sync/version"] for record in steps] == [1, 2, 3, 4]
    assert max(record["staleness/max"] for record in steps) == 1
    assert max(record["engine/restarts"] for record in steps) == 1
    # Only in this step are all responses from the policy of the step.
    assert steps[0]["mismatch/abs_mean"] <= 1e-5
    loaded = names_in_log(run, "Loaded new")
    assert sorted(set(loaded)) == [f"policy-{version}" for version in range(5)]
    # After the restart, the newest adapter may be loaded a second time.
    assert len(loaded) - len(set(loaded)) <= 1
    assert "policy-3" in names_in_log(run, "Removed")


def test_a_server_that_drops_a_part_of_an_adapter_is_told(
    vllm_python: Path, tmp_path: Path
) -> None:
    """vLLM itself reports nothing. At the start of a run B is zero, so the log-probs do not show
    that a part is missing."""
    options = {"lora_target_modules": "down_proj"}
    run = adapter_run(tmp_path, vllm_python, options=options, restarts=0)
    said = run.finish(run.start(), code=2)
    assert "silently ignores 24 of 28 parts of the adapter: layers.0." in said
