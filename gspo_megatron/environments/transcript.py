"""The transcript of an episode: its turns and what stands between them, as tokens.

The response is one sequence of tokens: the turns of the policy, and between them what the
environment and the chat template wrote. Tokens of earlier turns stay as they were sampled. Where
the history is rewritten, a branch begins: another prompt, and behind it the turns from there on.

    branch  prompt  turn 0  between  turn 1
    branch  prompt  turn 2  between  turn 3     every turn is of one branch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

Rows = TypeVar("Rows", bound=Any)  # an array or tensor


@dataclass(frozen=True)
class Written:
    """A turn as an engine generated it."""

    token_ids: Sequence[int]  # with the one that ended it
    truncated: bool
    source: Any = None  # of the engine: where the other figures of these tokens are


@dataclass(frozen=True)
class Branch:
    """Turns that extend each other, and what stands before them."""

    prompt: tuple[int, ...]
    turns: range  # their numbers


@dataclass
class Transcript:
    """Prompts, turns and what stands between, in the order in which they were written."""

    prompts: dict[int, tuple[int, ...]]  # of branches, by the number of their first turn
    turns: list[Written] = field(default_factory=list)
    between: list[tuple[int, ...]] = field(default_factory=list)  # tokens before each turn

    # Writing

    def begin_branch(self, prompt: tuple[int, ...]) -> None:
        """The next turn answers this prompt."""
        self.prompts[len(self.turns)] = prompt

    def add(self, between: tuple[int, ...], turn: Written) -> None:
        """One more turn, and the tokens since the last one of its branch."""
        self.between.append(between)
        self.turns.append(turn)

    def copy(self) -> Transcript:
        """The same turns, to go on with in another way."""
        return replace(
            self, prompts=dict(self.prompts), turns=[*self.turns], between=[*self.between]
        )

    # Reading

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt of the first branch."""
        return self.prompts[0]

    @property
    def last_start(self) -> int:
        """The number of the first turn of the last branch, which may have none yet."""
        return max(self.prompts)

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens of the last branch so far."""
        start = self.last_start
        pairs = zip(self.between[start:], self.turns[start:], strict=True)
        response = (n for between, turn in pairs for n in (*between, *turn.token_ids))
        return (*self.prompts[start], *response)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all turns and of what stands between them."""
        return sum(map(len, self.between)) + sum(len(turn.token_ids) for turn in self.turns)

    def branches(self) -> list[Branch]:
        """Those that have turns."""
        starts = [turn for turn in sorted(self.prompts) if turn < len(self.turns)]
        return [
            Branch(self.prompts[start], range(start, end))
            for start, end in itertools.pairwise([*starts, len(self.turns)])
        ]

    def turn_ends(self) -> np.ndarray:
        """[turns]: the response token after each turn."""
        pairs = zip(self.between, self.turns, strict=True)
        return np.cumsum([len(between) + len(turn.token_ids) for between, turn in pairs])

    @property
    def response(self) -> np.ndarray:
        """[response tokens] int32"""
        parts = zip(self.between, self.turns, strict=True)
        ids = [np.asarray(part, np.int32) for b, turn in parts for part in (b, turn.token_ids)]
        return np.concatenate(ids)

    @property
    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """[tokens] int32, of each branch its prompt and its part of the response; and [tokens]
        bool, those of the response."""
        response, ends = self.response, self.turn_ends()
        ids, kinds, start = [], [], 0
        for branch in self.branches():
            end = int(ends[branch.turns[-1]])
            ids += [np.asarray(branch.prompt, np.int32), response[start:end]]
            kinds += [np.zeros(len(branch.prompt), bool), np.ones(end - start, bool)]
            start = end
        return np.concatenate(ids), np.concatenate(kinds)

    def column(
        self, of_turn: Callable[[Written], np.ndarray], filler: float | None = None
    ) -> np.ndarray:
        """[response tokens]: `of_turn` [tokens of the turn] for each turn; before it `filler`, or
        the turn's first value."""
        parts = []
        for between, turn in zip(self.between, self.turns, strict=True):
            values = of_turn(turn)
            assert len(values) == len(turn.token_ids) > 0
            before = values[0] if filler is None else filler
            parts += [np.full(len(between), before, dtype=values.dtype), values]
        return np.concatenate(parts)

    def mask(self, *, learnt: bool = True) -> np.ndarray:
        """[response tokens] bool: what the policy wrote; without `learnt`, nothing."""
        return self.column(lambda turn: np.full(len(turn.token_ids), learnt), filler=False)


def joined_routes(turns: Sequence[Rows]) -> list[Rows]:
    """The experts of a branch's tokens, in pieces to be put end to end. turns: [tokens up to the
    end of a turn, layers, k] each, whose last row is void, because that token was not fed yet.

    Each token has the experts of the turn in which it was first fed: with these the tokens after it
    were sampled. A later turn may have fed it again, with newer weights."""
    pieces, known = [], 0
    for routes in turns:
        pieces.append(routes[known:-1])
        known = len(routes) - 1
    return [*pieces, turns[-1][known:]]
