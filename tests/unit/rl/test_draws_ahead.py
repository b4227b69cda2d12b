"""Requests that servers start before their step. The engine of these tests is in the same process,
so its `begin` does nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.objectives import build_objective
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rl.loop import ReinforcementLoop, order_of_prompts
from gspo_megatron.rl.run import assemble
from gspo_megatron.rollout.engine import RolloutRequest
from tests.unit.data.corpora import make_tokenizer, write_jsonl
from tests.unit.models.one_rank import tiny_config

FILE, PROMPTS, STEPS, SEED = 10, 3, 6, 5
AHEAD = 2


class Recorded(ReinforcementLoop):
    """A loop that records its requests to the collector."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.begun: list[RolloutRequest] = []
        self.sampled: list[RolloutRequest] = []
        sample = self.collector.sample

        def recorded(draw: RolloutRequest) -> Any:
            self.sampled.append(draw)
            return sample(draw)

        self.collector.sample = recorded
        self.collector.source.begin = self.begun.append

    def draws_of(self, step: int) -> list[RolloutRequest]:
        return [draw for draw in self.sampled if draw.name.startswith(f"step_{step:08d}_")]


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[Any]:
    folder = make_tokenizer(tmp_path / "tokenizer")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [f"{n:02d}" for n in range(FILE)], "prompt")

    loggers: list[RunLogger] = []

    def make(ahead: int, selection: dict[str, Any] | None = None) -> Recorded:
        stop_processes()  # leaves the process group of an earlier loop
        config = tiny_config(
            data={
                "tokenizer": str(folder),
                "prompts": str(prompts),
                "answer_field": "prompt",
                "selection": selection or {},
            },
            logging={"dir": str(tmp_path / f"run_{len(loggers)}")},
            rollout={
                "group_size": 2,
                "prompts_per_step": PROMPTS,
                "max_response_tokens": 2,
                "dynamic_sampling": True,
                "max_refills": 2,
                "max_staleness": ahead,
            },
            training={"steps": STEPS, "seed": SEED},
            checkpoint={"interval": 0},
        )
        # All rewards are equal, so every possible refill is requested.
        reward = Reward("always the same", lambda _: 1.0)
        run = assemble(config, read_inputs(config), reward, build_objective(config.objective, 2))
        loggers.append(run.logger)
        return Recorded(run)

    yield make
    for logger in loggers:
        logger.close()
    stop_processes()


def rolled_out(loop: Recorded, *steps: int) -> Recorded:
    for step in steps:
        loop.roll_out(step)
    return loop


def test_each_draw_is_begun_in_time_and_is_the_one_that_is_trained(make_loop: Any) -> None:
    loop, plain = make_loop(AHEAD), PromptLoader(FILE, PROMPTS, seed=SEED)
    for step in range(1, STEPS + 1):
        rolled_out(loop, step)
        begun = {draw.name: draw for draw in loop.begun}
        last = min(step + AHEAD, STEPS)
        assert list(begun) == [f"step_{number:08d}_0" for number in range(1, last + 1)]
        first, *refills = loop.draws_of(step)
        assert first == begun[first.name] and first.rows == plain.next()
        assert first.version == max(step - 1 - AHEAD, 0)
        assert [draw.name[-2:] for draw in refills] == ["_1", "_2"]
        assert [draw.first for draw in refills] == [PROMPTS, 2 * PROMPTS]


def test_a_resumed_run_asks_for_the_same_draws(make_loop: Any) -> None:
    whole = rolled_out(make_loop(AHEAD), 1, 2)
    saved = whole.loader.state_dict()
    before = len(whole.begun)
    rolled_out(whole, 3, 4)
    resumed = make_loop(AHEAD)
    resumed.loader.load_state_dict(saved)
    rolled_out(resumed, 3, 4)
    assert resumed.begun == whole.begun[before:]
    assert resumed.sampled == whole.draws_of(3) + whole.draws_of(4)


def test_a_run_that_is_resumed_with_its_responses_draws_ahead_at_once(make_loop: Any) -> None:
    whole = rolled_out(make_loop(AHEAD), 1, 2)
    before, experience = len(whole.begun), whole.roll_out(3)
    saved, draws = whole.loader.state_dict(), whole.begun[before:]
    resumed = make_loop(AHEAD)
    resumed.loader.load_state_dict(saved)
    resumed.restored = experience
    rolled_out(resumed, 3)
    assert draws[0].name == "step_00000003_0"
    assert resumed.begun == draws[1:] and not resumed.sampled


def test_without_staleness_refills_are_the_next_prompts(make_loop: Any) -> None:
    loop, plain = make_loop(0), PromptLoader(FILE, PROMPTS, seed=SEED)
    rolled_out(loop, 1, 2)
    assert [draw.rows for draw in loop.sampled] == [plain.next() for _ in range(6)]
    assert [draw.version for draw in loop.sampled] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_draws_chosen_by_pass_rates_are_the_same_when_resumed(
    make_loop: Any, tmp_path: Path, ahead: int
) -> None:
    """The run has refills. Before it is interrupted, servers have already started requests of later
    steps."""
    selection = {"by": "pass_rate", "floor": 0.3, "retire_after": 2}
    whole = rolled_out(make_loop(ahead, selection), 1, 2)
    saved = json.loads(json.dumps(whole.loader.state_dict()))
    (tmp_path / "run_1").mkdir()
    shutil.copy(tmp_path / "run_0/draws.jsonl", tmp_path / "run_1")
    before = len(whole.begun)
    rolled_out(whole, 3, 4)
    begun = {draw.name: draw for draw in whole.begun}
    for step in range(1, 5):
        first, *refills = whole.draws_of(step)
        assert begun.get(first.name, first) == first and len(refills) == 2
        rows = [row for draw in (first, *refills) for row in draw.rows]
        assert len({*rows}) == 3 * PROMPTS
    assert len(begun) == (min(4 + ahead, STEPS) if ahead else 0)

    resumed = make_loop(ahead, selection)
    resumed.loader = order_of_prompts(resumed.run_components, 3)
    resumed.loader.load_state_dict(saved)
    rolled_out(resumed, 3, 4)
    assert resumed.begun == whole.begun[before:]
    assert resumed.sampled == whole.draws_of(3) + whole.draws_of(4)
    names = ("run_0", "run_1")
    lines = [(tmp_path / name / "draws.jsonl").read_text().splitlines() for name in names]
    assert lines[0] == lines[1] and len(lines[0]) == 4 * 3 * PROMPTS
    record = json.loads(lines[0][0])
    assert (record["responses"], record["solved"], record["spread"]) == (2, 2, False)
    explored = [json.loads(line).get("explored", False) for line in lines[0][9:12]]
    # step 2 explores floor(6 * 0.3) - floor(3 * 0.3) = 1 prompt
    assert explored == [True, False, False]
