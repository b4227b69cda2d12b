"""data.selection: the prompts that it chooses, and the statistics that it keeps about prompts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from gspo_megatron.config.selection import SelectionSection
from gspo_megatron.data.selection import PromptSelection, figures_of, identity
from gspo_megatron.types import Prompt
from tests.unit.data.corpora import refusal

SIZE, STEP_SIZE, RESPONSES = 30, 4, 8
NAMES = [f"prompt {row}" for row in range(SIZE)]


def section(**values: Any) -> SelectionSection:
    return SelectionSection(by="pass_rate", **values)


def record(step: int, row: int, solved: int, responses: int = RESPONSES) -> dict[str, Any]:
    reward = solved / responses if responses else None
    values = {"responses": responses, "solved": solved, "reward": reward, "length": 4.0}
    return {"step": step, "prompt": NAMES[row], "row_id": str(row), "spread": True, **values}


def outcome(step: int, row: int) -> int:
    """The number of solved responses to a prompt. A third of the prompts are never solved, a third
    are always solved, and a third are sometimes solved."""
    return (0, RESPONSES, 1 + (step + row) % (RESPONSES - 1))[row % 3]


class Run:
    """Draws prompts and records results as a run does. With `before`, it resumes the run `before`
    after step `done`."""

    def __init__(
        self,
        steps: int,
        staleness: int = 0,
        *,
        refills: int = 0,
        done: int = 0,
        before: Run | None = None,
        names: list[str] = NAMES,
        **values: Any,
    ) -> None:
        self.records = [] if before is None else before.until(done)
        self.selection = PromptSelection(
            names,
            section(**values),
            STEP_SIZE,
            seed=5,
            step=done + 1,
            staleness=staleness,
            records=self.records,
        )
        if before is not None:
            self.selection.load_state_dict(json.loads(json.dumps(before.states[done])))
        self.rows, self.states, self.steps = {}, {}, steps
        self.explored: dict[int, list[int]] = {}
        for step in range(done + 1, steps + 1):
            if staleness:
                self.selection.peek(min(staleness, steps - step) + 1)
            taken = self.selection.next()
            self.explored[step] = taken[: self.selection.explored()]
            taken = [*taken]
            for _ in range(refills):
                taken += self.selection.refill(taken)
            self.rows[step] = taken
            found = [record(step, row, outcome(step, row)) for row in taken]
            self.records = [*self.records, *found]
            self.selection.learn(found)
            self.states[step] = self.selection.state_dict()

    def until(self, step: int) -> list[dict[str, Any]]:
        return [each for each in self.records if each["step"] <= step]


def test_a_prompt_is_known_by_its_contents() -> None:
    prompt = Prompt("1+1=", "2", "a.jsonl:3", {"level": 1}, row_id="a.jsonl:3")
    moved = dataclasses.replace(prompt, source="b.jsonl:9", row_id="b.jsonl:9", token_ids=(1, 2))
    assert identity(moved) == identity(prompt)
    others = [
        dataclasses.replace(prompt, text="1+2="),
        dataclasses.replace(prompt, answer="3"),
        dataclasses.replace(prompt, fields={"level": 2}),
        dataclasses.replace(prompt, messages=({"role": "user", "content": "1+1="},)),
    ]
    assert len({identity(prompt), *map(identity, others)}) == 5


def test_the_figures_of_a_prompt() -> None:
    drawn = [record(1, 0, 2), record(3, 0, 8), record(4, 0, 8), record(4, 1, 0)]
    # The reward failed for all responses of this group.
    drawn += [{**record(9, 0, 0, responses=0), "length": 8.0}]
    known = figures_of(drawn)
    assert known.keys() == {NAMES[0], NAMES[1]}
    one = known[NAMES[0]]
    assert (one.draws, one.responses, one.solved, one.last_step) == (4, 24, 18, 9)
    assert (one.pass_rate, one.last_rate, one.in_a_row) == (0.75, 1.0, 2)
    assert (one.reward / one.responses, one.length / one.draws) == (0.75, 5.0)
    known = figures_of([record(1, 0, 0, responses=0)])
    assert math.isnan(known[NAMES[0]].last_rate) and math.isnan(known[NAMES[0]].pass_rate)


def test_each_prompt_is_drawn_once_before_any_is_chosen_by_its_rate() -> None:
    run = Run(7, floor=0.0)
    drawn = [row for step in range(1, 8) for row in run.rows[step]]
    assert len(drawn) == len({*drawn}) == 28


def test_later_only_those_in_the_band_the_longest_not_drawn_first() -> None:
    run = Run(30, floor=0.0)
    later = [row for step in range(9, 31) for row in run.rows[step]]
    assert {row % 3 for row in later} == {2}  # only the ten prompts in the band are drawn
    # A prompt comes again only after the other nine prompts of the band. So two neighbouring steps
    # of four prompts have no prompt in common.
    assert all(len({*run.rows[step], *run.rows[step + 1]}) == 8 for step in range(10, 30))
    assert not any(run.explored.values())


def test_the_band_has_both_its_bounds() -> None:
    """A prompt whose last pass rate is exactly one of the bounds is in the band, too."""
    known = [record(1, row, min(row, RESPONSES)) for row in range(SIZE)]
    for low, high, wanted in ((0.25, 0.5, {2, 3, 4}), (0.0, 0.25, {0, 1, 2})):
        values = section(low=low, high=high, floor=0.0)
        selection = PromptSelection(NAMES, values, 3, seed=1, step=2, records=known)
        assert {*selection.next()} == wanted
        assert selection.metrics()["selection/band"] == 3


def test_the_floor_is_the_share_of_prompts_chosen_at_random() -> None:
    run = Run(400, floor=0.3)
    explored = [row for step in range(9, 401) for row in run.explored[step]]
    assert len(explored) == pytest.approx(0.3 * 392 * STEP_SIZE, abs=1)
    counts = [sum(row % 3 == kind for row in explored) for kind in range(3)]
    assert min(counts) > 100  # the mean is about 157, because the three kinds are equally frequent
    others = [row for step in range(50, 401) for row in run.rows[step]]
    outside = sum(row % 3 != 2 for row in others) / len(others)
    # two thirds of the floor of 0.3 are outside of the band
    assert outside == pytest.approx(0.2, abs=0.05)
    assert {len({*rows}) for rows in run.rows.values()} == {STEP_SIZE}
    # With a floor of 1, all prompts are drawn equally often.
    every = Run(300, floor=1.0)
    drawn = [row for rows in every.rows.values() for row in rows]
    assert min(drawn.count(row) for row in range(SIZE)) > 20  # the mean is 40


def test_a_prompt_is_retired_after_solved_draws_in_a_row_and_revived() -> None:
    values = {"floor": 0.5, "retire_after": 2}
    run = Run(200, **values)
    draws = {row: [step for step in run.rows if row in run.rows[step]] for row in range(1, SIZE, 3)}
    assert {len(steps) for steps in draws.values()} == {2}
    assert run.selection.metrics() == {
        "selection/band": 10,
        "selection/new": 0,
        "selection/retired": 10,
    }
    revived = Run(200, **values, revive_after=40)
    for row in range(1, SIZE, 3):
        steps = [step for step in revived.rows if row in revived.rows[step]]
        gaps = [after - before for before, after in zip(steps[1:], steps[2:])]
        assert gaps and all(40 <= gap <= 50 for gap in gaps)


def test_prompts_out_of_the_band_fill_up_a_step_and_then_retired_ones() -> None:
    known = [record(1, row, 0 if row == 7 else RESPONSES) for row in range(10)]
    values = section(floor=0.0, retire_after=1)
    selection = PromptSelection(NAMES[:10], values, STEP_SIZE, seed=1, step=2, records=known)
    rows = selection.next()
    assert rows[0] == 7 and len({*rows}) == STEP_SIZE
    # If a file has fewer prompts than a step, it is read several times.
    small = PromptSelection(NAMES[:3], values, 7, seed=1)
    rows = small.next()
    assert {*rows} == {0, 1, 2} and len(rows) == 7


@pytest.mark.parametrize(("staleness", "refills"), [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)])
def test_a_resumed_run_draws_the_same(staleness: int, refills: int) -> None:
    values: dict[str, Any] = {"refills": refills, "floor": 0.3, "retire_after": 3}
    whole = Run(40, staleness, **values, revive_after=9)
    for done in (1, 2, 7, 8, 9, 20, 39):
        resumed = Run(40, staleness, **values, revive_after=9, done=done, before=whole)
        assert resumed.rows == {step: whole.rows[step] for step in range(done + 1, 41)}, done
        assert resumed.records == whole.records


def test_a_run_that_is_prolonged_draws_as_one_that_was_long_from_the_start() -> None:
    """Near its end, the shorter run requested fewer prompts ahead than the longer run did at these
    steps."""
    whole, shorter = Run(30, 2, floor=0.3), Run(17, 2, floor=0.3)
    assert shorter.rows == {step: whole.rows[step] for step in range(1, 18)}
    longer = Run(30, 2, floor=0.3, done=17, before=shorter)
    assert longer.rows == {step: whole.rows[step] for step in range(18, 31)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_draw_does_not_know_what_may_not_be_there_yet(staleness: int) -> None:
    """If a request may begin before a step has ended, then a change of the step's rewards must not
    change the request."""
    whole = Run(30, staleness, floor=0.0)
    other = Run(14, staleness, floor=0.0)
    known = [{**each, "solved": 3} if each["step"] == 14 else each for each in other.records]
    changed = PromptSelection(
        NAMES, section(floor=0.0), STEP_SIZE, 5, step=15, staleness=staleness, records=known
    )
    changed.load_state_dict(other.states[14])
    drawn = changed.peek(staleness + 1)
    assert drawn[:-1] == [whole.rows[step] for step in range(15, 15 + staleness)]
    # The requests differ, because each request knows the results of one more step than the request
    # before it.
    assert len({*map(tuple, drawn)}) == staleness + 1


def test_no_prompt_is_drawn_again_before_its_result_is_known() -> None:
    run = Run(60, 3, floor=0.5)
    for step in range(1, 57):
        rows = [row for later in range(step, step + 4) for row in run.rows[later]]
        assert len(rows) == len({*rows})


def test_refills_are_further_prompts_of_the_step() -> None:
    run = Run(30, refills=2, floor=0.25)
    assert {len({*rows}) for rows in run.rows.values()} == {3 * STEP_SIZE}
    # In step 1, the first request does not depend on the refills that follow.
    assert Run(1, refills=0, floor=0.25).rows[1] == run.rows[1][:STEP_SIZE]


def test_statistics_stay_when_files_grow() -> None:
    before = Run(20, floor=0.0)
    names = ["new a", "new b", *reversed(NAMES)]
    grown = PromptSelection(
        names, section(floor=0.0), STEP_SIZE, 5, step=21, records=before.records
    )
    rows = grown.next()
    assert {0, 1} <= {*rows}  # the two new prompts come first
    assert {int(names[row].split()[1]) % 3 for row in rows if row > 1} == {2}
    assert grown.metrics()["selection/band"] == 10


def test_two_rows_of_the_same_contents_have_the_same_figures() -> None:
    known = [record(1, row, RESPONSES) for row in range(3)] + [record(2, 3, 4)]
    names = [NAMES[0], NAMES[1], NAMES[2], NAMES[3], NAMES[3]]
    selection = PromptSelection(names, section(floor=0.0), 2, 5, step=3, records=known)
    assert {*selection.next()} == {3, 4}


def test_a_run_that_went_back_draws_others() -> None:
    """After a rollback, the steps are repeated with later requests, so their prompts differ."""
    run = Run(25, floor=0.5)
    back = PromptSelection(NAMES, section(floor=0.5), STEP_SIZE, 5, step=11, records=run.until(10))
    back.load_state_dict(run.states[25])
    assert [back.next() for _ in range(5)] != [run.rows[step] for step in range(11, 16)]


def test_draws_for_later_steps_of_another_size_are_made_again() -> None:
    """A phase, or a resumed run, may have another number of prompts in a step."""
    run = Run(20, 2, floor=0.3)
    state = run.states[10]
    assert {11, 12} <= {*map(int, state["drawn"])}  # requested before step 11

    def resumed(step_size: int) -> PromptSelection:
        known = run.until(10)
        selection = PromptSelection(
            NAMES, section(floor=0.3), step_size, 5, step=11, staleness=2, records=known
        )
        selection.load_state_dict(json.loads(json.dumps(state)))
        return selection

    assert resumed(STEP_SIZE).peek(2) == [run.rows[11], run.rows[12]]
    for step_size in (STEP_SIZE - 1, STEP_SIZE + 2):
        drawn = resumed(step_size).peek(3)
        assert [len(rows) for rows in drawn] == [step_size] * 3
        # the results of the last two steps may not be known yet
        assert not {*drawn[0]} & {*run.rows[9], *run.rows[10]}


def test_a_state_of_other_prompts_is_refused() -> None:
    run = Run(2)
    for names, seed, named in ((NAMES[:9], 5, "num_prompts = 30"), (NAMES, 6, "seed = 5")):
        other = PromptSelection(names, section(), STEP_SIZE, seed)
        (line,) = refusal(other.load_state_dict, run.states[2])
        assert named in line


def test_the_choice_is_fixed_for_good() -> None:
    # The choice is fixed in this test, because runs must resume with the same prompts under every
    # later version.
    run = Run(10, 1, refills=1, floor=0.3)
    assert [run.rows[step] for step in (1, 9, 10)] == [
        [17, 2, 24, 6, 5, 3, 10, 20],
        [1, 8, 2, 17, 29, 11, 14, 23],
        [25, 24, 29, 14, 26, 5, 20, 17],
    ]
