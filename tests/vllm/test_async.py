"""Runs whose servers generate ahead. The prompts of each step are those of a synchronous run, no
token is too old, and no kill loses a finished response."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import psutil
import pytest

from gspo_megatron.config.load import load_config
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.rollout.store import read_groups
from gspo_megatron.rollout.vllm.weights_folder import weights_folders
from tests.programs import ROOT, gspo
from tests.vllm.runs import Run, is_alive, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FILE, PROMPTS, GROUP, SEED = 64, 6, 4, 1
STALENESS = 2
# With "server and service", both are killed at the same moment, so no process is left that ends the
# server's engine.
VICTIMS = ["trainer", "service", "server", "all", "server and service"]


def run_with(folder: Path, python: Path, steps: int) -> Run:
    return make_run(
        folder,
        python,
        rollout={
            "group_size": GROUP,
            "prompts_per_step": PROMPTS,
            "max_response_tokens": 100,
            "max_staleness": STALENESS,
            "vllm": {"restarts": steps},
        },
        training={"steps": steps, "precision": "fp32", "seed": SEED, "keep_step_inputs": steps},
        routing={"replay": "r3"},
        checkpoint={"interval": 1},
        logging={"samples_per_step": PROMPTS * GROUP},
    )


def finished_steps(run: Run) -> int:
    return len(run.steps()) if (run.out / "metrics.jsonl").exists() else 0


def draws_ahead(run: Run) -> bool:
    """Whether a group is finished for a step whose predecessor is not yet trained."""
    later = run.out / "rollouts" / f"step_{finished_steps(run) + 2:08d}_0.groups"
    return later.exists() and bool(read_groups(later))


def trained_prompts(run: Run) -> dict[int, list[str]]:
    """The prompts of each step, in the order of the samples."""
    found = defaultdict(list)
    for line in (run.out / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]].append(record["row_id"])
    return found


def synchronous_prompts(steps: int) -> dict[int, list[str]]:
    """The prompts that a run trains in each step if it does not generate ahead."""
    loader = PromptLoader(FILE, PROMPTS, SEED)
    return {
        step: [f"train.jsonl:{row + 1}" for row in loader.next() for _ in range(GROUP)]
        for step in range(1, steps + 1)
    }


class Killer:
    """Kills processes of a run at random moments. Restarts the run if the run does not
    restart these processes itself."""

    def __init__(self, run: Run, random: Random) -> None:
        self.run, self.random = run, random
        self.process = run.start()
        self.seen: set[psutil.Process] = set()

    def kill(self, victim: str) -> None:
        run = self.run
        groups = {"trainer": run.trainers, "service": run.services, "server": run.servers}
        chosen, had_server = [], bool(run.servers())
        for name, find in groups.items():
            found = find()
            for each in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen |= {each, *each.children(recursive=True)}
            chosen += found if name in victim or victim == "all" else []
        for each in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if victim in ("trainer", "all"):
            self.process.communicate()
            wait_for(lambda: not any(map(is_alive, self.seen)), seconds=120)
            # The service ends by itself when the trainer dies. If the service has only just begun,
            # it has no server yet, and the next start clears its folder.
            if victim == "trainer" and had_server:
                assert not weights_folders(load_config(run.folder / "config.yaml"))
            self.process = run.start()

    def kill_after(self, step: int, victim: str, seconds: float) -> None:
        """Kill the victim at a random moment after this step."""
        self.run.wait(self.process, lambda: finished_steps(self.run) >= step)
        time.sleep(self.random.uniform(0, seconds))
        self.kill(victim)


@pytest.mark.parametrize(
    "victims",
    [
        ["trainer", "server and service"],
        pytest.param(20 * VICTIMS, marks=[pytest.mark.full, pytest.mark.timeout(9000)]),
    ],
    ids=len,
)
def test_whatever_is_killed_each_draw_is_trained_once_in_the_synchronous_order(
    vllm_python: Path, tmp_path: Path, victims: list[str]
) -> None:
    """Every response is scored once. Finished responses are not generated again, except those of a
    group that was being scored when its process was killed."""
    kills = len(victims)
    steps = kills + 3
    run, random = run_with(tmp_path, vllm_python, steps), Random(kills)
    killer = Killer(run, random)
    # The first step must be saved, because otherwise the next start is a new run.
    run.wait(killer.process, lambda: finished_steps(run) > 1 and draws_ahead(run))
    for number, victim in enumerate(random.sample(victims, kills)):
        killer.kill_after(2 + number, victim, seconds=1.0)
    run.finish(killer.process)
    wait_for(lambda: not any(map(is_alive, killer.seen)), seconds=120)

    assert [record["step"] for record in run.steps()] == list(range(1, steps + 1))
    assert trained_prompts(run) == synchronous_prompts(steps)
    oldest = [record["staleness/max"] for record in run.steps()]
    # The first requests use the first weights, so the tokens of the first steps cannot be as old as
    # the limit allows.
    assert all(age <= min(STALENESS, n) for n, age in enumerate(oldest)) and max(oldest) > 0
    assert all(0 <= record["staleness/mean"] <= age for record, age in zip(run.steps(), oldest))
    rows = Counter(row for row, _ in run.calls())
    assert 0 <= sum(rows.values()) - steps * PROMPTS * GROUP <= kills * GROUP, rows
    assert not list((run.out / "rollouts").glob("*.groups"))
    assert_layouts_agree(run, 1 + oldest.index(max(oldest)))


def assert_layouts_agree(run: Run, step: int) -> None:
    """Check that responses from several versions of the weights lead to the same update on every
    layout."""
    words = ["verify", run.out, "--step", step, "--layouts", "tp=2,pp=2,ep=2"]
    done = gspo(*words, PYTHONPATH=os.pathsep.join([str(ROOT), str(run.folder)]))
    assert float(re.search(r"\bworst_error=(\S+)", done.stdout)[1]) <= 1e-5, done.stdout
