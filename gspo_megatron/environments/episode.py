"""Episodes of several turns: what an environment of your own is given, and what it returns.

    class Guess:
        async def rollout(self, client, task):
            turn = await client.generate()                                # the policy's first turn
            hint = {"role": "user", "content": "lower"}
            turn = await client.generate([hint])                          # and its next one
            return Trajectory(reward=float(turn.text == task.answer))

An episode becomes one sequence of tokens: the prompt, then the response, which holds the turns of
the policy and between them what the environment and the chat template wrote. Only the first are
learnt from (`mask`). Tokens of earlier turns stay as they were sampled: they are never decoded and
tokenised again.

Where the history is rewritten, by the chat template or by the environment, a branch begins: another
prompt, which holds the history as it now is, and behind it the turns from there on. Every turn is
of one branch, so that it is learnt from once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from gspo_megatron.errors import EpisodeError, RolloutError, UnplayableError
from gspo_megatron.plugins import origin, own_copy, own_record
from gspo_megatron.rewards.values import checked
from gspo_megatron.types import Message, Prompt, TurnRewards

if TYPE_CHECKING:
    from gspo_megatron.data.chat import Rendered
    from gspo_megatron.data.tokenizers import Tokenizer


_MARKS = range(0xE000, 0xF900)  # of the private use area: a conversation lacks most of them


class LimitReached(Exception):  # noqa: N818 (not a fault: episodes end so)
    """The episode has no turn or no token left.

    An environment may let it pass where the reward function scores its episodes. One that gives the
    rewards itself catches it, because only it knows what the turns so far are worth."""


@dataclass(frozen=True)
class Trajectory:
    """What an environment says of an episode. Without rewards the reward function of the
    configuration scores it; its `Sample.response` is the text of the last turn."""

    reward: float | None = None
    turn_rewards: Sequence[float] | None = None  # of each `client.generate`, instead of `reward`


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in a turn."""

    text: str  # without the end-of-sequence token
    token_ids: tuple[int, ...]  # with it
    truncated: bool  # cut off by the limit of tokens


class Environment(Protocol):
    """A class that `environment.import_path` names; `environment.options` are its keyword
    arguments. One object serves all episodes of a process."""

    # Functions that the chat template describes in the prompt, as JSON schemas; may be left out.
    tools: Sequence[dict[str, Any]]
    # Every trajectory has rewards, so the reward function is never asked; False if left out.
    gives_rewards: bool
    # What it says between turns are messages, so the prompts have to be messages, too; False: it
    # does without. If left out, `check` reads its code.
    needs_messages: bool

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        """One episode of the task."""
        ...


def gives_rewards(environment: Environment | None) -> bool:
    """Whether the reward function is never asked. None: of single turns."""
    return bool(getattr(environment, "gives_rewards", False))


@dataclass(frozen=True)
class Limits:
    """The limits of an episode."""

    turns: int
    response_tokens: int  # of all turns, with what stands between them
    prompt_tokens: int = sys.maxsize


@dataclass(frozen=True)
class Asked:
    """A turn that the policy is to write."""

    token_ids: tuple[int, ...]  # what stands before it
    turn: int  # of the episode, from 0
    max_tokens: int


@dataclass(frozen=True)
class Written:
    """The turn that an engine drew."""

    token_ids: Sequence[int]  # with the one that ended it
    truncated: bool
    source: Any = None  # of the engine: where the other figures of these tokens are


@dataclass(frozen=True)
class Branch:
    """Turns that extend each other, and what stands before them."""

    prompt: tuple[int, ...]
    turns: range  # their numbers


@dataclass(frozen=True)
class Position:
    """A point of an episode between two turns."""

    turns: int
    prompts: dict[int, tuple[int, ...]]
    openings: dict[int, str]
    messages: list[Message]
    new: list[Message]
    tools: Sequence[dict[str, Any]]
    is_cut: bool


_T = TypeVar("_T")
Rows = TypeVar("Rows", bound=Any)  # an array or tensor

Write = Callable[[Asked], Awaitable[Written]]


@dataclass
class Client:
    """An episode's way to the policy, and the record of the episode."""

    task: Prompt
    limits: Limits
    tokenizer: Tokenizer
    write: Write = field(repr=False)
    prompts: dict[int, tuple[int, ...]] = field(init=False)  # of branches, by their first turn
    tools: Sequence[dict[str, Any]] = ()  # instead of the environment's; see `begin`
    turns: list[Written] = field(default_factory=list)
    inserted: list[tuple[int, ...]] = field(default_factory=list)  # before each turn
    is_cut: bool = False  # a limit ended it
    # As the chat template wrote them, to see whether it would write them so again: the prompts of
    # branches, and what stands before each turn; None: something else wrote it.
    _openings: dict[int, str] = field(default_factory=dict)
    _written: list[str | None] = field(default_factory=list)
    added: list[list[Message]] = field(default_factory=list)  # before each turn
    _messages: list[Message] = field(init=False)
    _new: list[Message] = field(init=False)  # of `_messages`, those that no turn has answered
    _first: list[Message] = field(init=False)  # the messages of the task's prompt
    _asked: float | None = None  # since when the policy is asked for a turn
    _waited: float = 0.0  # seconds for its earlier turns

    def __post_init__(self) -> None:
        # The environment has the task, too: what it changes there is not the episode's.
        self.prompts, self._messages = {0: self.task.token_ids}, own_copy([*self.task.messages])
        self._new = self._first = self._messages

    @property
    def messages(self) -> list[Message]:
        """The conversation so far: a copy."""
        return own_copy(self._messages)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt of the first branch."""
        return self.prompts[0]

    @property
    def tokens_left(self) -> int:
        """Response tokens that the episode may still have."""
        return self._room(self.context)

    @property
    def turns_left(self) -> int:
        return self.limits.turns - len(self.turns)

    @property
    def seconds_waited(self) -> float:
        """While the policy wrote its turns, or a server had no place for them yet."""
        return self._waited + (0.0 if self._asked is None else time.monotonic() - self._asked)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that the branch has so far."""
        start = max(self.prompts)
        pairs = zip(self.inserted[start:], self.turns[start:], strict=True)
        response = (n for between, turn in pairs for n in (*between, *turn.token_ids))
        return (*self.prompts[start], *response)

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """The next turn answers these messages, with `tools` for the chat template: before the
        first turn instead of the task's, later as a new branch. Raises EpisodeError for a first
        prompt that is too long."""
        if self._asked is not None:
            raise EpisodeError("begin was called before the last turn was there")
        self._messages, self.tools = own_copy([*messages]), own_copy(tools)
        self._new = self._messages
        opening, prompt = self._prompt_of(self._messages)
        if not self.turns and len(prompt) > self.limits.prompt_tokens:
            raise EpisodeError(
                f"the prompt has {len(prompt)} tokens; at most "
                f"{self.limits.prompt_tokens} are allowed (data.max_prompt_tokens)"
            )
        self.prompts[len(self.turns)], self._openings[len(self.turns)] = prompt, opening

    async def generate(
        self, messages: Sequence[Message] = (), *, text: str = "", max_tokens: int | None = None
    ) -> Turn:
        """The policy's next turn, of at most `max_tokens` tokens.

        `messages` stand between the last turn and this one, as the chat template writes them. For
        prompts without a chat template, `text` does. The first turn answers the prompt, as the
        first after `begin` does. Where the chat template writes the branch so far otherwise when
        `messages` follow (it drops thoughts, or an empty block of them), all messages become the
        prompt of a new one.

        Raises LimitReached where no turn or no token is left (an environment may let it pass: the
        episode ends there, as one that is cut off); EpisodeError where the arguments do not fit.
        """
        if self._asked is not None:
            raise EpisodeError("generate was called again before its last turn was there")
        messages = own_copy([*messages])  # the environment may use its own again
        conversation, number = [*self._messages, *messages], len(self.turns)
        opening, prompt, written_text, between = self._next(conversation, messages, text)
        before = (*(self.context if prompt is None else prompt), *between)
        room = self._room(before, len(between))
        if self.turns_left == 0 or room <= 0:
            self.is_cut = True
            raise LimitReached(f"{number} turn{'s' * (number != 1)}, {self._used} response tokens")
        self._asked = time.monotonic()
        try:
            written = await self.write(Asked(before, number, min(room, max_tokens or room)))
        finally:
            self._waited, self._asked = self.seconds_waited, None
        if opening is not None and prompt is not None:
            self.prompts[number], self._openings[number] = prompt, opening
        self.inserted.append(between)
        self._written.append(written_text)
        self.added.append([*self._new, *messages])
        self.turns.append(written)
        self.is_cut = written.truncated and (max_tokens is None or max_tokens >= room)
        turn = Turn(self._text(written), tuple(written.token_ids), written.truncated)
        self._messages = [*conversation, {"role": "assistant", "content": turn.text}]
        self._new = []
        return turn

    # Turns that nobody has read

    def position(self) -> Position:
        """Where the episode is, for `go_back`."""
        return Position(
            len(self.turns),
            dict(self.prompts),
            dict(self._openings),
            [*self._messages],
            self._new,
            self.tools,
            self.is_cut,
        )

    def go_back(self, position: Position) -> None:
        """Take back what was said since: it was drawn, and it is no part of the episode."""
        for column in (self.turns, self.inserted, self.added, self._written):
            del column[position.turns :]
        self.prompts, self._openings = dict(position.prompts), dict(position.openings)
        self._messages, self._new = [*position.messages], position.new
        self.tools, self.is_cut = position.tools, position.is_cut

    # The response: the turns, and what stands between them

    @property
    def _used(self) -> int:
        return sum(map(len, self.inserted)) + sum(len(turn.token_ids) for turn in self.turns)

    def _room(self, before: Sequence[int], between: int = 0) -> int:
        """Tokens of a turn after all of `before`, of which `between` are new in the response. A
        branch is never longer than an episode that has one only."""
        longest = len(self.prompt_ids) + self.limits.response_tokens
        return min(longest - len(before), self.limits.response_tokens - self._used - between)

    def branches(self) -> list[Branch]:
        """Those that have turns."""
        starts = [turn for turn in sorted(self.prompts) if turn < len(self.turns)]
        return [
            Branch(self.prompts[start], range(start, end))
            for start, end in itertools.pairwise([*starts, len(self.turns)])
        ]

    def turn_ends(self) -> np.ndarray:
        """[turns]: the response token after each turn."""
        pairs = zip(self.inserted, self.turns, strict=True)
        return np.cumsum([len(between) + len(turn.token_ids) for between, turn in pairs])

    def given_reward(self, trajectory: Trajectory | None) -> float | TurnRewards | None:
        """What the environment gave for the episode, in the form of a reward function's value.
        Raises EpisodeError for what is no trajectory or does not fit the turns."""
        if trajectory is None:
            return None
        if not isinstance(trajectory, Trajectory):
            kind = type(trajectory).__name__
            raise EpisodeError(f"rollout returned a {kind}; allowed: a Trajectory, or None")
        given: Any = trajectory.reward
        if trajectory.turn_rewards is not None:
            if given is not None:
                raise EpisodeError("a trajectory has a reward or rewards of turns, not both")
            rewards = list(trajectory.turn_rewards)
            if len(rewards) != len(self.turns):
                raise EpisodeError(f"{len(rewards)} turn_rewards for {len(self.turns)} turns")
            given = TurnRewards(rewards, self.turn_ends())
        if given is not None and self.turns:
            checked(given, self._used, _refuse)
        return given

    def _text(self, written: Written) -> str:
        ids = list(written.token_ids)
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return self.tokenizer.decode(ids)

    def _next(
        self, conversation: Sequence[Message], messages: Sequence[Message], text: str
    ) -> tuple[str | None, tuple[int, ...] | None, str | None, tuple[int, ...]]:
        """Text and tokens of the prompt of a branch that begins here, if one does; and of what
        stands from the last turn to the next (its text as in `_written`)."""
        if len(self.turns) in self.prompts:
            if messages or text:
                raise EpisodeError("the first turn answers the prompt; nothing stands between")
            return None, None, "", ()
        if bool(messages) == bool(text):
            raise EpisodeError("between two turns stand messages, or a text")
        if text:
            return None, None, None, tuple(self.tokenizer.encode(text))
        if not self._messages:
            raise EpisodeError(
                "messages need a prompt of messages (data.chat_template = true makes one)"
            )
        between = self._between(messages)
        if between is None:
            return *self._prompt_of(conversation), "", ()
        return None, None, *between

    def _between(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]] | None:
        """Text and tokens that the template writes after the last turn, which itself stays as it
        was sampled. None where it would write the branch so far otherwise."""
        mark = _mark_for([*self._messages, *messages])
        last = {**self._messages[-1], "content": self._messages[-1]["content"] + mark}
        written = self._rendered([*self._messages[:-1], last, *messages])
        end = written.text.rfind(mark)
        if end < 0 or not self._is_branch(written.text[:end]):
            return None
        start, whole = end + len(mark), written.text[end + len(mark) :]
        # Without the end of the turn, where the policy wrote it.
        if whole.startswith(ending := self._ending):
            start += len(ending)
        return whole, tuple(self._encoded(written.part(start)))

    def _is_branch(self, text: str) -> bool:
        """Whether a template's `text` is the branch so far. Spaces and line breaks do not count,
        and only turns do where something else wrote what stands between them."""
        start = max(self.prompts)
        turns = [self._text(turn) for turn in self.turns[start:]]
        between = self._written[start:]
        if any(part is None for part in between):
            return _holds(text, turns)
        if start not in self._openings:  # the task's prompt
            self._openings[start] = self._rendered(self._first).text
        parts = (part for pair in zip(between, turns, strict=True) for part in pair)
        return _squeezed(text) == _squeezed(self._openings[start] + "".join(filter(None, parts)))

    def _prompt_of(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        rendered = self._rendered(messages)
        return rendered.text, tuple(self._encoded(rendered))

    def _rendered(self, messages: Sequence[Message]) -> Rendered:
        return self.tokenizer.render(messages, open_answer=True, tools=self.tools)

    def _encoded(self, rendered: Rendered) -> list[int]:
        return self.tokenizer.encode_rendered(rendered.text, rendered.quoted).ids

    @property
    def _ending(self) -> str:
        """What a template writes for the token that ended the last turn; empty if none did."""
        last = self.turns[-1].token_ids[-1]
        names = {number: text for text, number in self.tokenizer.special_tokens.items()}
        return names.get(last, "") if last in self.tokenizer.eos_ids else ""


def _mark_for(messages: Sequence[Message]) -> str:
    """A character that no text of the messages has."""
    texts = json.dumps(messages, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, _MARKS) if mark not in texts)


def _squeezed(text: str) -> str:
    """`text` without spaces and line breaks."""
    return "".join(text.split())


def _refuse(returned: str) -> NoReturn:
    raise EpisodeError(f"rollout gave as reward {returned}")


def _holds(text: str, parts: Iterable[str]) -> bool:
    """Whether `text` has these parts in their order. Spaces and line breaks do not count."""
    text, start = _squeezed(text), 0
    for part in map(_squeezed, parts):
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


@dataclass(frozen=True)
class Episode:
    """An episode that has ended."""

    client: Client
    given: float | TurnRewards | None  # what the environment gave; None: the reward function scores
    error: EpisodeError | None = None  # it failed

    @property
    def mask(self) -> np.ndarray:
        """[response tokens] bool: what the policy wrote. Of a failed episode nothing counts."""
        ok = self.error is None
        return self.column(lambda turn: np.full(len(turn.token_ids), ok), filler=False)

    @property
    def tokens(self) -> np.ndarray:
        """[response tokens] int32"""
        parts = zip(self.client.inserted, self.client.turns, strict=True)
        ids = [np.asarray(part, np.int32) for b, turn in parts for part in (b, turn.token_ids)]
        return np.concatenate(ids)

    @property
    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """[tokens] int32, of each branch its prompt and its part of the response; and [tokens]
        bool, those of the response."""
        response, ends = self.tokens, self.client.turn_ends()
        ids, kinds, start = [], [], 0
        for branch in self.client.branches():
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
        for between, turn in zip(self.client.inserted, self.client.turns, strict=True):
            values = of_turn(turn)
            assert len(values) == len(turn.token_ids) > 0
            before = values[0] if filler is None else filler
            parts += [np.full(len(between), before, dtype=values.dtype), values]
        return np.concatenate(parts)


def joined_routes(turns: Sequence[Rows]) -> list[Rows]:
    """The experts of a branch's tokens, in pieces to be put end to end. turns: [tokens up to the
    end of a turn, layers, k] each, whose last row is void, because that token was not fed yet.

    Each token has the experts of the turn in which it was first fed: with these the tokens after it
    were drawn. A later turn may have fed it again, with newer weights."""
    pieces, known = [], 0
    for routes in turns:
        pieces.append(routes[known:-1])
        known = len(routes) - 1
    return [*pieces, turns[-1][known:]]


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of an environment."""

    environment: Environment
    tokenizer: Tokenizer
    limits: Limits

    async def run(self, task: Prompt, write: Write) -> Episode:
        """One episode. What the environment raises is in the result; an error of the engine, and an
        UnplayableError, is raised here. An episode without a turn has failed, and gets one of a
        single token."""
        client = Client(own_record(task), self.limits, self.tokenizer, write)
        given, error = None, None
        try:
            given = client.given_reward(await self._play(client))
            if not client.turns:
                raise EpisodeError("the episode ended without a turn")
            if given is None and gives_rewards(self.environment):
                raise EpisodeError("gives_rewards is true, and rollout returned no reward")
        except (RolloutError, UnplayableError):
            raise
        except Exception as found:  # noqa: BLE001 (the user's code may raise anything)
            what = str(found) if isinstance(found, EpisodeError) else _named(found)
            name = type(self.environment).__name__
            error = EpisodeError(f"environment {name}: {what}; {task.source}")
            error.__cause__ = found
        if not client.turns:
            client.inserted.append(())
            client.added.append(client.messages)
            client.turns.append(Written((self.tokenizer.eos_id,), truncated=True))
        return Episode(client, given, error)

    async def _play(self, client: Client) -> Trajectory | None:
        """What the environment returns; None where a limit ended the episode and the reward
        function is to score it."""
        work = asyncio.ensure_future(self._rollout(client))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:  # the episode is not wanted any more
            work.cancel()
            await asyncio.wait([work])
            raise
        if work.cancelled():
            raise EpisodeError("rollout cancelled itself")
        try:
            return work.result()
        except LimitReached as reached:
            if gives_rewards(self.environment):
                raise EpisodeError(
                    f"gives_rewards is true, and no reward was given when a limit ended the "
                    f"episode ({reached}: environment.max_turns, rollout.max_response_tokens); "
                    "rollout has to catch LimitReached and to return the reward of the turns so far"
                ) from reached
            return None

    async def _rollout(self, client: Client) -> Trajectory | None:
        try:
            return await self.environment.rollout(client, client.task)
        except SystemExit as end:  # it would end the event loop with all other episodes
            raise EpisodeError(f"rollout ended with {end!r}") from end


async def within(seconds: float, client: Client, work: Awaitable[_T]) -> _T:
    """The result of an environment's work on an episode. Raises TimeoutError once it has taken
    longer, without the time for the policy's turns, which depends on the episodes beside it."""
    task, start = asyncio.ensure_future(work), time.monotonic()
    try:
        while not task.done():
            left = seconds - (time.monotonic() - start - client.seconds_waited)
            if left <= 0:
                raise asyncio.TimeoutError
            await asyncio.wait([task], timeout=max(left, 0.1))
        return task.result()
    finally:
        task.cancel()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error} ({origin(error)})"
