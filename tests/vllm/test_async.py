"""Runs whose servers draw ahead: the prompts of each step are the synchronous run's, no token is
too old, and what is killed costs no finished response."""

from __future__ import annotations

import json
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from gspo_megatron.config.load import load_config
from gspo_megatron.rl.served_rollouts import weights_folder
from gspo_megatron.rollout.service.bank import read_groups
from tests.vllm.runs import Run, is_alive, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPTS, GROUP = 6, 4
STEPS = 6


def run_with(folder: Path, python: Path, max_staleness: int) -> Run:
    folder.mkdir()
    return make_run(
        folder,
        python,
        rollout={
            "group_size": GROUP,
            "prompts_per_step": PROMPTS,
            "max_response_tokens": 100,
            "max_staleness": max_staleness,
        },
        training={"steps": STEPS, "precision": "fp32"},
        checkpoint={"interval": 1},
        logging={"samples_per_step": PROMPTS * GROUP},
    )


def finished_steps(run: Run) -> int:
    return len(run.steps()) if (run.out / "metrics.jsonl").exists() else 0


def trained_prompts(run: Run) -> dict[int, list[str]]:
    """By step, in their order."""
    found = defaultdict(list)
    for line in (run.out / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]].append(record["row_id"])
    return found


def assert_each_draw_is_trained_once(run: Run, max_staleness: int) -> None:
    """And every response scored once: what was finished was not drawn again, but for a group that
    was scored when the service was killed, which happens twice."""
    assert [record["step"] for record in run.steps()] == list(range(1, STEPS + 1))
    oldest = [record["staleness/max"] for record in run.steps()]
    # the first draws are begun with the first weights
    assert all(age <= min(max_staleness, n) for n, age in enumerate(oldest)) and max(oldest) > 0
    assert all(0 <= record["staleness/mean"] <= age for record, age in zip(run.steps(), oldest))
    rows = Counter(row for row, _ in run.calls())
    assert 0 <= sum(rows.values()) - STEPS * PROMPTS * GROUP <= 2 * GROUP, rows
    assert not list((run.out / "rollouts").glob("*.groups"))


def test_a_killed_run_that_draws_ahead_trains_what_the_synchronous_run_trains(
    vllm_python: Path, tmp_path: Path
) -> None:
    synchronous = run_with(tmp_path / "synchronous", vllm_python, 0)
    synchronous.finish(synchronous.start())
    assert {record["staleness/max"] for record in synchronous.steps()} == {0.0}

    run = run_with(tmp_path / "ahead", vllm_python, 2)
    process, bank = run.start(), run.out / "rollouts"

    def draws_ahead() -> bool:
        """Of a step, while the one before is not trained yet, some groups are finished."""
        last = finished_steps(run)
        later = bank / f"step_{last + 2:08d}_0.groups"
        # the first step is saved; before that a start is a new run
        return last > 1 and later.exists() and bool(read_groups(later, lambda _: True))

    run.wait(process, draws_ahead)
    left = [*run.services(), *run.servers()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(is_alive, left)))
    assert not weights_folder(load_config(run.folder / "config.yaml")).exists()
    process = run.start()
    run.wait(process, lambda: finished_steps(run) >= 4)
    server = run.servers()[0]
    engine = server.children(recursive=True)
    for killed in (*run.services(), server):  # at once: nobody is left to end the engine
        killed.kill()
    wait_for(lambda: not any(map(is_alive, engine)), seconds=20)
    run.finish(process)
    assert_each_draw_is_trained_once(run, 2)
    assert trained_prompts(run) == trained_prompts(synchronous)
