"""A run with servers whose policy collapses. The run goes back to an earlier step, and the servers
get the weights of that step."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.rollout.store import read_groups
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]
FILE, PROMPTS, GROUP, SEED = 64, 2, 4, 1
STEPS, LAST_GOOD = 11, 7
# Until the run has gone back, the reward is 0 from step 8 on.
REWARD = f"""
import zlib
from pathlib import Path
folder = Path(__file__).parent
def reward(sample):
    calls = folder / "calls"
    with calls.open("a") as file:
        file.write("x")
    is_late = calls.stat().st_size > {LAST_GOOD * PROMPTS * GROUP}
    if is_late and not (folder / "run/checkpoints/rollbacks.json").exists():
        return 0.0
    return 0.5 + zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 960
"""


def synchronous_order(steps: int) -> list[list[str]]:
    """The prompts of each step in a run without interruptions."""
    loader = PromptLoader(FILE, PROMPTS, SEED)
    return [[f"train.jsonl:{row + 1}" for row in loader.next()] for _ in range(steps)]


def test_servers_go_back_with_the_run(tmp_path: Path, vllm_python: Path) -> None:
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "tp=2,pp=2,ep=2"},
        rollout={
            "group_size": GROUP,
            "prompts_per_step": PROMPTS,
            "max_response_tokens": 6,
            "max_staleness": 1,
        },
        reward={"import_path": "planted:reward"},
        training={"steps": STEPS, "precision": "fp32", "seed": SEED, "on_collapse": "rollback"},
        checkpoint={"interval": 2, "keep_last": 1},
        logging={"samples_per_step": PROMPTS * GROUP},
    )
    (tmp_path / "planted.py").write_text(REWARD)
    said = run.finish(run.start())
    (told,) = json.loads((run.out / "checkpoints/rollbacks.json").read_text())["rollbacks"]
    back, bad = told["to_step"], told["from_step"]
    assert LAST_GOOD < bad <= LAST_GOOD + 5 and back % 2 == 0
    assert f"rollback 1 of 2: the run goes on after step {back}" in said
    steps = {record["step"]: record for record in run.steps()}
    assert [*steps] == [*range(1, STEPS + 1)]
    assert min(record["reward/mean"] for record in steps.values()) >= 0.5
    # Responses that servers generated ahead are not used. After the rollback, the first responses
    # are from the weights of the earlier step.
    oldest = {step: record["staleness/max"] for step, record in steps.items()}
    fresh = {1, back + 1}
    assert oldest == {step: float(step not in fresh) for step in steps}
    assert steps[back + 1]["mismatch/abs_mean"] <= 1e-5
    # The prompts continue in the order of a run without a rollback, each once.
    rows = defaultdict(list)
    for line in map(json.loads, (run.out / "samples.jsonl").read_text().splitlines()):
        rows[line["step"]].append(line["row_id"])
    order = synchronous_order(bad + STEPS - back)
    wanted = order[:back] + order[bad:]
    assert [*rows.values()] == [[row for row in each for _ in range(GROUP)] for each in wanted]
    assert not [path for path in (run.out / "rollouts").glob("*.groups") if read_groups(path)]
