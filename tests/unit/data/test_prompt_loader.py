from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gspo_megatron.data.loader import PromptLoader
from tests.unit.data.corpora import refusal

SHAPES = [(10, 3), (7, 7), (5, 4), (13, 1), (8, 4), (11, 10), (1, 1)]


def draw(loader: PromptLoader, steps: int) -> list[list[int]]:
    return [loader.next() for _ in range(steps)]


def flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_step_holds_a_prompt_twice(shuffle: bool) -> None:
    for prompts, per_step in SHAPES:
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
        # The counts differ by at most 2: by 1 within an epoch, and by 1 for a prompt that a step
        # has put off.
        assert max(seen) - min(seen) <= 2
    assert sum(counts.values()) == 60 * per_step


def test_order_depends_on_seed_and_epoch_only() -> None:
    by_four = draw(PromptLoader(12, 4, seed=9), 6)
    by_six = draw(PromptLoader(12, 6, seed=9), 4)
    assert flat(by_four) == flat(by_six)
    assert by_four != draw(PromptLoader(12, 4, seed=10), 6)
    assert by_four[:3] != by_four[3:]
    # Seeds beyond 32 bits are not cut off.
    assert by_four != draw(PromptLoader(12, 4, seed=9 + 2**32), 6)


def test_order_is_fixed_for_good() -> None:
    # The test contains the order itself, because a run must resume in the same order under every
    # later version.
    steps = draw(PromptLoader(8, 8, seed=5), 2)
    assert steps == [[2, 7, 5, 0, 4, 3, 6, 1], [6, 4, 1, 2, 5, 7, 0, 3]]


def test_without_shuffle_the_file_order_is_kept() -> None:
    assert draw(PromptLoader(5, 2, seed=1, shuffle=False), 4) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    # A step that is larger than the file repeats prompts.
    assert PromptLoader(3, 7, seed=1, shuffle=False).next() == [0, 1, 2, 0, 1, 2, 0]


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


# --- several files --------------------------------------------------------------------------------

SIZES, WEIGHTS = (7, 30, 4), (1, 2.5, 1.5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("per_step", [1, 3, 10])
def test_each_file_has_its_share_and_its_epochs(
    weights: tuple[float, ...] | None, per_step: int
) -> None:
    loader = PromptLoader(SIZES, per_step, seed=4, weights=weights)
    wanted = np.array(weights or SIZES) / sum(weights or SIZES)
    starts = np.cumsum([0, *SIZES])
    counts = np.zeros(sum(SIZES), int)
    for step in range(1, 301):
        np.add.at(counts, loader.next(), 1)
        files = [counts[start:end] for start, end in zip(starts, starts[1:])]
        drawn = np.array([file.sum() for file in files])
        assert abs(drawn - wanted * step * per_step).max() < 2
        # Every prompt of a file comes once before any prompt comes again. An earlier test explains
        # the bound of 2.
        assert all(np.ptp(file) <= 2 for file in files)
        if per_step == 1:
            assert all(np.ptp(file) <= 1 for file in files)


def test_without_weights_an_epoch_of_all_files_is_one_of_each() -> None:
    loader = PromptLoader(SIZES, sum(SIZES), seed=4)
    for _ in range(5):
        assert sorted(loader.next()) == [*range(sum(SIZES))]


def test_files_of_equal_size_have_different_orders() -> None:
    step = PromptLoader((8, 8), 16, seed=5).next()
    first, second = ([n % 8 for n in step if n // 8 == file] for file in (0, 1))
    assert sorted(first) == sorted(second) == [*range(8)] and first != second
    # The first file has the same order as in a run with only this file.
    assert first == PromptLoader(8, 8, seed=5).next()


def test_the_order_of_several_files_is_fixed_for_good() -> None:
    assert draw(PromptLoader((3, 5), 4, seed=5, weights=(3, 1)), 3) == [
        [0, 2, 6, 1],
        [2, 1, 7, 0],
        [2, 1, 4, 0],
    ]


@pytest.mark.parametrize(
    ("sizes", "weights"), [*((n, None) for n in (10, 7, 5, 13, 1)), (SIZES, WEIGHTS)]
)
@pytest.mark.parametrize("per_step", [1, 3, 8, 10])
def test_resuming_continues_exactly(
    sizes: int | tuple[int, ...], weights: tuple[float, ...] | None, per_step: int
) -> None:
    for before in (0, 1, 2, 5, 17):
        loader = PromptLoader(sizes, per_step, seed=6, weights=weights)
        draw(loader, before)
        resumed = PromptLoader(sizes, 2 * per_step, seed=6, weights=weights)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        # dynamic sampling asks for any number of prompts at a time
        for count in (*[per_step] * 9, 1, 7):
            assert resumed.next(count) == loader.next(count), before


@pytest.mark.parametrize(
    ("sizes", "others", "named"),
    [
        (10, {"num_prompts": 11}, "num_prompts = 10"),
        (10, {"seed": 7}, "seed = 6"),
        (10, {"shuffle": False}, "shuffle = True"),
        (SIZES, {"num_prompts": (7, 30, 5)}, r"num_prompts = \[7, 30, 4\]"),
        (SIZES, {"num_prompts": sum(SIZES)}, "num_prompts = "),
        (SIZES, {"weights": WEIGHTS}, "shares = "),
    ],
)
def test_state_of_another_order_is_refused(sizes: Any, others: Any, named: str) -> None:
    keys: dict[str, Any] = {"num_prompts": sizes, "prompts_per_step": 4, "seed": 6}
    state = PromptLoader(**keys).state_dict()
    (line,) = refusal(PromptLoader(**(keys | others)).load_state_dict, state)
    assert re.search(named, line)


def test_the_state_of_one_file_is_that_of_earlier_versions() -> None:
    loader = PromptLoader([5], 4, seed=6, weights=[0.3])
    draw(loader, 4)
    assert loader.state_dict() == {
        "num_prompts": 5,
        "seed": 6,
        "shuffle": True,
        "epoch": 3,
        "position": 3,
        "deferred": [1, 3],
    }


def test_a_look_ahead_sees_what_is_drawn_and_draws_nothing() -> None:
    for sizes, steps in (([7], 9), ([5, 30], 12), ([100], 3)):
        plain, looked = PromptLoader(sizes, 4, seed=3), PromptLoader(sizes, 4, seed=3)
        expected = [plain.next() for _ in range(steps + 5)]
        for step in range(steps):
            before = looked.state_dict()
            assert looked.peek(5) == expected[step : step + 5]
            assert looked.state_dict() == before
            assert looked.next() == expected[step]


def test_refills_depend_on_the_step_alone() -> None:
    loader, other = PromptLoader([40, 80], 6, seed=3), PromptLoader([40, 80], 6, seed=3)
    for _ in range(7):
        other.next()
    drawn = {}
    for step in (1, 2, 3):
        first, again = loader.for_refills(step), other.for_refills(step)
        drawn[step] = [first.next() for _ in range(3)]
        assert drawn[step] == [again.next() for _ in range(3)]
        # Each file has its share.
        assert all(sum(row < 40 for row in rows) == 2 for rows in drawn[step])
    assert drawn[1] != drawn[2] != drawn[3]
    assert loader.state_dict() == PromptLoader([40, 80], 6, seed=3).state_dict()
    assert PromptLoader([40, 80], 6, seed=4).for_refills(1).next() != drawn[1][0]
