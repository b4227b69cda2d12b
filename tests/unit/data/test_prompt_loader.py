from __future__ import annotations

import json
from collections import Counter

import pytest

from gspo_megatron.data.loader import PromptLoader
from tests.unit.data.corpora import refusal

SHAPES = [(10, 3), (7, 7), (5, 4), (13, 1), (8, 4), (11, 10), (1, 1)]


def draw(loader: PromptLoader, steps: int) -> list[list[int]]:
    return [loader.next() for _ in range(steps)]


def flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


@pytest.mark.parametrize(("prompts", "per_step"), SHAPES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_step_holds_a_prompt_twice(prompts: int, per_step: int, shuffle: bool) -> None:
    for step in draw(PromptLoader(prompts, per_step, seed=3, shuffle=shuffle), 100):
        assert len(step) == len(set(step)) == per_step
        assert all(0 <= index < prompts for index in step)


@pytest.mark.parametrize(("prompts", "per_step"), [*SHAPES, (3, 8)])
def test_prompts_are_drawn_equally_often(prompts: int, per_step: int) -> None:
    loader = PromptLoader(prompts, per_step, seed=4)
    counts: Counter[int] = Counter()
    for step in draw(loader, 60):
        counts.update(step)
        seen = [counts[index] for index in range(prompts)]
        # Two at most: one for the epoch under way, one for a prompt put off by a step.
        assert max(seen) - min(seen) <= 2
    assert sum(counts.values()) == 60 * per_step


def test_order_depends_on_seed_and_epoch_only() -> None:
    by_four = draw(PromptLoader(12, 4, seed=9), 6)
    by_six = draw(PromptLoader(12, 6, seed=9), 4)
    assert flat(by_four) == flat(by_six)
    assert by_four != draw(PromptLoader(12, 4, seed=10), 6)
    assert by_four[:3] != by_four[3:]
    # Seeds beyond 32 bits count whole.
    assert by_four != draw(PromptLoader(12, 4, seed=9 + 2**32), 6)


def test_order_is_fixed_for_good() -> None:
    # Written down once: a run must resume in the same order under any later version.
    steps = draw(PromptLoader(8, 8, seed=5), 2)
    assert steps == [[2, 7, 5, 0, 4, 3, 6, 1], [6, 4, 1, 2, 5, 7, 0, 3]]


def test_without_shuffle_the_file_order_is_kept() -> None:
    assert draw(PromptLoader(5, 2, seed=1, shuffle=False), 4) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    # A step larger than the file repeats prompts.
    assert PromptLoader(3, 7, seed=1, shuffle=False).next() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("prompts", "per_step"), [*SHAPES, (3, 8)])
@pytest.mark.parametrize("before", [0, 1, 2, 5, 17])
def test_resuming_continues_exactly(prompts: int, per_step: int, before: int) -> None:
    loader = PromptLoader(prompts, per_step, seed=6)
    draw(loader, before)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = draw(loader, 10)
    resumed = PromptLoader(prompts, per_step, seed=6)
    resumed.load_state_dict(state)
    assert draw(resumed, 10) == expected


def test_state_is_a_copy() -> None:
    loader = PromptLoader(5, 4, seed=6)
    states = []
    for _ in range(8):
        states.append((state := loader.state_dict(), json.dumps(state)))
        loader.next()
    assert all(json.dumps(state) == text for state, text in states)
    assert any(state["deferred"] for state, _ in states)


def test_resuming_with_smaller_steps_loses_no_prompt() -> None:
    loader = PromptLoader(5, 4, seed=6)
    while len(loader.state_dict()["deferred"]) < 2:
        loader.next()
    deferred = loader.state_dict()["deferred"]
    resumed = PromptLoader(5, 1, seed=6)
    resumed.load_state_dict(loader.state_dict())
    assert [resumed.next() for _ in deferred] == [[index] for index in deferred]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptLoader(11, 4, seed=6), "num_prompts = 10"),
        (PromptLoader(10, 4, seed=7), "seed = 6"),
        (PromptLoader(10, 4, seed=6, shuffle=False), "shuffle = True"),
    ],
)
def test_state_of_another_order_is_refused(other: PromptLoader, named: str) -> None:
    (line,) = refusal(other.load_state_dict, PromptLoader(10, 4, seed=6).state_dict())
    assert named in line
