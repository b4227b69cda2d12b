"""RL runs with responses from real vLLM servers, compared with the trainer's own results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.rollout.store import read_groups
from tests.unit.test_metrics_doc import SERVED
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_servers_sample_from_the_policy_at_every_step(vllm_python: Path, tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "tp=2,pp=2,ep=2"},
        rollout={"max_response_tokens": 24, "temperature": 0.7},
        optimizer={"learning_rate": 2e-3},
        training={"steps": 4, "precision": "fp32", "evaluation_interval": 2},
        evaluation={
            "interval": 2,
            "suites": {
                "near": {
                    "prompts": str(tmp_path / "toy" / "test.jsonl"),
                    "reward": {"name": "per_character"},
                    "samples": 2,
                    "top_k": 5,
                    "max_response_tokens": 4,
                }
            },
        },
        data={"eval_prompts": str(tmp_path / "toy" / "test.jsonl")}
        | {
            "tokenizer": str(tmp_path / "toy" / "tokenizer.model"),
            "prompts": str(tmp_path / "toy" / "train.jsonl"),
        },
    )
    run.finish(run.start())
    steps = run.steps()
    assert [record["step"] for record in steps] == list(range(1, 5))
    for record in steps:
        # Both sides compute in float32 with different kernels. We have seen a difference of 1.5e-7.
        assert record["mismatch/abs_mean"] <= 1e-5, record["step"]
        # The second mini-batch is trained after an update of the policy, so its ratios differ from
        # 1.
        assert record["ratio/token/p99"] - record["ratio/token/p01"] > 1e-2, record["step"]
        assert record["sync/version"] == record["step"] and record["sync/bytes"] > 1e6
    assert run.records()[0]["step"] == 0 and "evaluation/accuracy" in run.records()[0]
    drawn = [json.loads(line) for line in (run.out / "evaluation.jsonl").read_text().splitlines()]
    of_suite = [response for response in drawn if "suite" in response]
    assert len(drawn) - len(of_suite) == 3 * 8 and len(of_suite) == 3 * 8 * 2
    assert max(response["num_tokens"] for response in of_suite) == 4
    assert all(record["evaluation/near/problems"] == 8 for record in (steps[1], steps[3]))
    assert not list((run.out / "rollouts").glob("*.groups"))  # the groups are not needed any more


# The environment repeats a part of each turn, and records the turns that it gets.
ENVIRONMENT = """
import json
from pathlib import Path
folder = Path(__file__).parent
class Echo:
    async def rollout(self, client, task):
        turns = [await client.generate(max_tokens=5)]
        while len(turns) < 3 and sum(turns[-1].token_ids) % 3:
            turns.append(await client.generate(text="+" + turns[-1].text[:3], max_tokens=7))
        with (folder / "seen").open("a") as file:
            file.write(json.dumps([turn.token_ids for turn in turns]) + "\\n")
"""


def sampled_tokens(bank: Path) -> list[list[int]]:
    """The tokens that the policy wrote in each episode. The order of episodes is arbitrary."""
    found = []
    for group in read_groups(bank).values():
        lengths = group.prompt_lengths + group.response_lengths
        rows = np.split(group.tokens, lengths.cumsum()[:-1])
        masks = np.split(group.sampled, group.response_lengths.cumsum()[:-1])
        for ids, prompt, mask in zip(rows, group.prompt_lengths, masks, strict=True):
            found.append(ids[prompt:][mask].tolist())
    return sorted(found)


def test_the_servers_experts_are_those_of_training(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes have several turns. The small mismatch shows that the update uses the servers'
    experts, because with different experts the log-probs would differ."""
    monkeypatch.syspath_prepend(tmp_path)  # this folder has the modules of reward and environment
    (tmp_path / "vllm_test_environment.py").write_text(ENVIRONMENT)
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "pp=2,ep=2,dp=2"},
        environment={"import_path": "vllm_test_environment:Echo"},
        rollout={"max_response_tokens": 24, "max_staleness": 1},
        objective={"name": "gspo", "mini_batches": 1, "max_token_staleness": 0},
        routing={"replay": "r3"},
        training={"steps": 1, "precision": "fp32"},
        checkpoint={"interval": 2},
    )
    bank, kept = run.out / "rollouts" / "step_00000001_0.groups", tmp_path / "kept.groups"
    process = run.start()
    # The file must be copied now, because it is removed when the run has been saved.
    run.wait(process, lambda: bank.exists() and len(read_groups(bank)) == 6)
    shutil.copy(bank, kept)
    run.finish(process)
    [record] = run.steps()
    assert record["mismatch/abs_mean"] <= 1e-5
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert sorted([n for turn in turns for n in turn] for turns in seen) == sampled_tokens(kept)
    assert 1.5 < record["environment/turns"] < 3 and record["environment/errors"] == 0
    assert 0.5 < record["environment/sampled_share"] < 1
    assert record["replay/missing_rows"] == 0 and record["replay/bytes"] > 0
    assert record.keys() >= SERVED
    busy, idle = (record[k] for k in ("engine/busy_share", "perf/engines_idle_share"))
    # The servers spend the rest of the time on updates of the weights.
    assert busy > 0 and idle > 0 and busy + idle < 1
