"""The figures that a run keeps about its prompts, and the choice of the next prompts by these
figures.

Each group of responses is a record of draws.jsonl. The figures of a prompt are computed from its
records. A resumed run cuts the file at the resumed step, so it computes the same figures. A prompt
is identified by its contents, so it keeps its figures when files grow or change their order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_megatron.config.selection import SelectionSection
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt

Record = Mapping[str, Any]  # a line of draws.jsonl


def identity(prompt: Prompt) -> str:
    """Return a name of a prompt that depends on its contents alone: the text or the messages, the
    answer and the other fields of its row."""
    contents = [prompt.text, prompt.messages, prompt.answer, prompt.fields]
    text = json.dumps(contents, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class PromptFigures:
    """The figures of one prompt."""

    draws: int = 0  # number of groups of responses
    responses: int = 0  # number of responses with a reward
    solved: int = 0  # number of these responses that are solved
    reward: float = 0.0  # sum of the rewards of the responses
    length: float = 0.0  # sum of the mean lengths of the groups, in tokens
    last_step: int = 0
    last_rate: float = math.nan  # pass rate of the last group with rewards; NaN: no such group yet
    in_a_row: int = 0  # number of the latest groups in a row with only solved responses

    def add(self, record: Record) -> None:
        """Add a group. A group without rewards changes no rate."""
        responses, solved = record["responses"], record["solved"]
        self.draws += 1
        self.length += record["length"]
        self.last_step = record["step"]
        if responses:
            self.responses += responses
            self.solved += solved
            self.reward += record["reward"] * responses
            self.last_rate = solved / responses
            self.in_a_row = self.in_a_row + 1 if solved == responses else 0

    @property
    def pass_rate(self) -> float:
        """The share of all responses that were solved; NaN without responses."""
        return self.solved / self.responses if self.responses else math.nan


def figures_of(records: Iterable[Record]) -> dict[str, PromptFigures]:
    """Return the figures of each prompt that was drawn, by its identity."""
    figures: dict[str, PromptFigures] = defaultdict(PromptFigures)
    for record in records:
        figures[record["prompt"]].add(record)
    return dict(figures)


class PromptSelection:
    """Chooses the prompts of a step by pass rates. It takes the place of `PromptLoader`.

    A choice for `step` depends only on the seed, the number of the draw, and the figures of all
    steps up to `step - 1 - staleness`. These steps are always finished when the draw may begin. So
    the prompts of a draw do not depend on how early it is made. All ranks get the same prompts.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        section: SelectionSection,
        prompts_per_step: int,
        seed: int,
        *,
        step: int = 1,
        staleness: int = 0,
        records: Iterable[Record] = (),
    ) -> None:
        """prompts: the identity of each row; step: the next step; records: the records of earlier
        steps."""
        self.section, self._prompts_per_step, self._seed = section, prompts_per_step, seed
        self._prompts, self._staleness = prompts, staleness
        self._step = self._draw = step  # after a rollback there are more draws than steps
        # rows of the last draws and of the draws for later steps
        self._drawn: dict[int, list[int]] = {}
        self._refills = 0  # number of refills of the last draw
        self._waiting = deque(records)  # records that are not in the figures yet
        self._figures: dict[str, PromptFigures] = defaultdict(PromptFigures)
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, name in enumerate(prompts):
            self._rows[name].append(row)
        self._last_step = np.zeros(len(prompts), np.int64)
        self._rate = np.full(len(prompts), np.nan)
        self._in_a_row = np.zeros(len(prompts), np.int64)

    def learn(self, records: Iterable[Record]) -> None:
        """Take the groups of one more step."""
        self._waiting.extend(records)

    # The interface of PromptLoader

    def next(self) -> list[int]:
        """Return the rows of the next step's prompts."""
        rows = self._rows_of(self._draw)
        self._draw, self._step, self._refills = self._draw + 1, self._step + 1, 0
        for old in [each for each in self._drawn if each < self._draw - self._staleness]:
            del self._drawn[old]
        return rows

    def peek(self, steps: int) -> list[list[int]]:
        """Return the rows of the next steps without advancing."""
        return [self._rows_of(self._draw + ahead) for ahead in range(steps)]

    def rows_of_step(self, step: int, *, ahead: bool) -> Iterator[list[int]]:
        """Yield the rows of the next step's prompts, then those of each of its refills. The rows of
        a step differ. Those of a refill are chosen by the figures of all earlier steps."""
        taken = self.next()
        yield taken
        while True:
            more = self.refill(taken)
            taken = taken + more
            yield more

    def refill(self, taken: Iterable[int]) -> list[int]:
        """Return the rows of further prompts for the step of the last `next`. These rows differ
        from `taken`, the step's rows so far. They are chosen by the figures of all earlier
        steps."""
        self._refills += 1
        self._add_records_up_to(self._step - 2)
        return self._choose(self._draw - 1, self._refills, {*taken})

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values. The figures are in draws.jsonl."""
        drawn = {str(number): list(rows) for number, rows in self._drawn.items()}
        return {
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "draw": self._draw,
            "drawn": drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError if the state belongs to other prompts."""
        for key, mine in (("num_prompts", len(self._prompts)), ("seed", self._seed)):
            if state.get(key) != mine:
                raise DataError(
                    f"the checkpoint's selection was made with {key} = {state.get(key)}, this run "
                    f"has {key} = {mine}; resume with the same prompt files and settings"
                )
        self._draw = state["draw"]
        drawn = {int(number): list(rows) for number, rows in state["drawn"].items()}
        # Draws for later steps are drawn again if a step has another number of prompts now.
        self._drawn = {
            number: rows
            for number, rows in drawn.items()
            if number < self._draw or len(rows) == self._prompts_per_step
        }

    # The choice

    def explored(self, draw: int | None = None) -> int:
        """Return how many prompts of a draw were chosen at random. These are the first prompts of
        the draw. draw: None for the last one."""
        draw = self._draw - 1 if draw is None else draw
        before, after = (
            math.floor(number * self._prompts_per_step * self.section.floor)
            for number in (draw - 1, draw)
        )
        return after - before

    def metrics(self) -> dict[str, float]:
        """Return how many prompts the last draw could choose from."""
        retired, band = self._retired_and_band(self._step - 1)
        unseen = np.isnan(self._rate)
        return {
            "selection/band": float((band & ~unseen).sum()),
            "selection/new": float(unseen.sum()),
            "selection/retired": float(retired.sum()),
        }

    def _rows_of(self, draw: int) -> list[int]:
        if draw not in self._drawn:
            step = self._step + draw - self._draw
            self._add_records_up_to(step - 1 - self._staleness)
            # The results of these draws are not known yet.
            recent = range(draw - self._staleness, draw)
            drawn_recently = {row for each in recent for row in self._drawn.get(each, ())}
            self._drawn[draw] = self._choose(draw, 0, drawn_recently, step)
        return self._drawn[draw]

    def _add_records_up_to(self, limit: int) -> None:
        """Add the records up to step `limit` to the figures. `limit` must not be smaller than in
        the last call."""
        while self._waiting and self._waiting[0]["step"] <= limit:
            record = self._waiting.popleft()
            name = record["prompt"]
            figures = self._figures[name]
            figures.add(record)
            rows = self._rows.get(name, [])
            self._last_step[rows] = figures.last_step
            self._rate[rows] = figures.last_rate
            self._in_a_row[rows] = figures.in_a_row

    def _retired_and_band(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which prompts are retired at a step, and which are in the band of pass rates,
        [prompts] bool each. New prompts, and prompts to be revived, are also in the band."""
        section, size = self.section, len(self._prompts)
        solved = np.zeros(size, bool)
        if section.retire_after is not None:
            solved = self._in_a_row >= section.retire_after
        revived = np.zeros(size, bool)
        if section.revive_after is not None:
            revived = solved & (step - self._last_step >= section.revive_after)
        retired = solved & ~revived
        inside = (self._rate >= section.low) & (self._rate <= section.high)
        return retired, ~retired & (inside | revived | np.isnan(self._rate))

    def _choose(
        self, draw: int, request: int, avoided: set[int], step: int | None = None
    ) -> list[int]:
        """Choose the prompts of one request of a step; `request` is its number, from 0.

        Prompts are taken in this order until there are enough: first a share at random, without
        retired prompts; then the prompts of the band, beginning with those that were drawn longest
        ago; then the other prompts at random; then the retired prompts. The rows in `avoided` are
        taken only if all other rows are too few. If a step needs more prompts than there are rows,
        rows are taken several times.
        """
        words = [self._seed % 2**32, self._seed // 2**32, draw, request]
        # RandomState is used because its streams are the same in all versions of NumPy.
        order = np.random.RandomState(words).permutation(len(self._prompts))
        retired, band = self._retired_and_band(self._step - 1 if step is None else step)
        by_age = order[np.argsort(self._last_step[order], kind="stable")]
        at_random = order[~retired[order]]
        chosen: dict[int, None] = {}

        def take(rows: np.ndarray, count: int, left_out: set[int]) -> None:
            for row in map(int, rows):
                if len(chosen) >= count:
                    return
                if row not in left_out:
                    chosen[row] = None

        needed = self._prompts_per_step
        take(at_random, 0 if request else self.explored(draw), avoided)
        for left_out in (avoided, set[int]()):
            for rows in (by_age[band[by_age]], at_random, by_age):
                take(rows, needed, left_out)
        rows = [*chosen]
        return [rows[number % len(rows)] for number in range(needed)]
