"""Phases of a run with servers. The servers continue to run after the border between two phases.
Before the border they generate no responses for steps after it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.vllm.runs import is_alive, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BORDER = 2


@pytest.mark.full
def test_the_responses_after_a_border_are_the_synchronous_ones(
    tmp_path: Path, vllm_python: Path
) -> None:
    """In the first step after a border, the responses are generated with the weights at the border,
    and have the lengths of the new phase. In the later steps of a phase, the weights that
    generate are one step old. A run that is killed at the border still uses each prompt once."""
    phases = [{"until_step": BORDER}, {"rollout": {"max_response_tokens": 12}}]
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "tp=2,pp=2,ep=2"},
        rollout={
            "group_size": 2,
            "prompts_per_step": 4,
            "max_response_tokens": 6,
            "max_staleness": 1,
        },
        training={"steps": 4, "precision": "fp32", "phases": phases},
        checkpoint={"interval": 1},
        logging={"samples_per_step": 8},
    )
    process, border = run.start(), run.out / "checkpoints" / f"rl_{BORDER:08d}"
    run.wait(process, border.is_dir)
    process.kill()
    process.wait(timeout=60)
    run.finish(run.start())
    records = {each["step"]: each for each in run.records()}
    oldest = {step: records[step]["staleness/max"] for step in range(1, 5)}
    assert oldest == {1: 0, 2: 1, 3: 0, 4: 1}
    longest = {step: records[step]["response/length_max"] for step in range(1, 5)}
    assert max(longest[1], longest[2]) <= 6 < max(longest[3], longest[4]) <= 12
    lines = map(json.loads, (run.out / "samples.jsonl").read_text().splitlines())
    # All phases share one order of prompts. Each prompt comes once, with two responses.
    prompts = Counter(line["row_id"] for line in lines)
    assert len(prompts) == 16 and set(prompts.values()) == {2}


# The reward function runs in the rollout service. The servers are children of this process.
REWARD = """
import json
from pathlib import Path
import psutil
def reward(sample):
    servers = [p.pid for p in psutil.Process().children() if "gspo_vllm_server" in p.cmdline()]
    with (Path(__file__).parent / "seen").open("a") as file:
        file.write(json.dumps([sample.row_id, sorted(servers), NUMBER]) + "\\n")
    return len(sample.response) % 5 / 4
"""


def test_the_servers_of_a_phase_go_on_in_the_next_one(tmp_path: Path, vllm_python: Path) -> None:
    """The same servers are used if lengths, prompts and rewards change. If options of vLLM change,
    new servers are needed."""
    run = make_run(
        tmp_path,
        vllm_python,
        model={"max_sequence_length": 128},
        rollout={
            "group_size": 2,
            "prompts_per_step": 2,
            "max_response_tokens": 6,
            "vllm": {"weight_transport": "nccl"},  # as on GPUs; on CPUs the transfer uses gloo
        },
        reward={"import_path": "reward_1:reward"},
        training={"steps": 5, "precision": "fp32"},
        checkpoint={"interval": 4},
    )
    for number in (1, 2):
        (tmp_path / f"reward_{number}.py").write_text(REWARD.replace("NUMBER", str(number)))
    lines = (tmp_path / "toy" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[:8]))
    other = {"data": {"prompts": str(tmp_path / "other.jsonl")}}
    other |= {"reward": {"import_path": "reward_2:reward"}}
    phases = [
        {"until_step": 2},
        {"until_step": 4, "rollout": {"max_response_tokens": 24}, **other},
        {"rollout": {"vllm": {"options": {"max_num_seqs": 32}}}},
    ]
    said = run.finish(run.start(f"training.phases={json.dumps(phases)}"))
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 5 * 4
    of_phase = [seen[:8], seen[8:16], seen[16:]]
    (first,), (second,), (third,) = ({tuple(pids) for _, pids, _ in part} for part in of_phase)
    assert len(first) == 1 and second == first and third != first
    assert [{number for *_, number in part} for part in of_phase] == [{1}, {2}, {2}]
    assert {row.split(":")[0] for row, *_ in of_phase[0]} == {"train.jsonl"}
    assert {row.split(":")[0] for row, *_ in of_phase[1]} == {"other.jsonl"}
    assert said.count("the servers go on with the next phase") == 1
    assert said.count("the servers are started again: the next phase changes rollout.vllm") == 1
    steps = {record["step"]: record for record in run.steps()}
    longest = {step: steps[step]["response/length_max"] for step in range(1, 6)}
    assert max(longest[1], longest[2]) <= 6 < max(longest[3], longest[4]) <= 24
    # The servers have run without a restart, and have the weights of the run.
    assert max(record["mismatch/abs_mean"] for record in steps.values()) <= 1e-5
    assert [steps[n]["sync/version"] for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert all(record["engine/restarts"] == 0 for record in steps.values())
    wait_for(lambda: not any(map(_lives, {*first, *third})), seconds=60)


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and is_alive(psutil.Process(pid))
