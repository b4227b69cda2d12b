"""Runs episodes of several turns, and defines the interface of environments.

    class Guess:
        async def rollout(self, client, task):
            turn = await client.generate()                                # the policy's first turn
            hint = {"role": "user", "content": "lower"}
            turn = await client.generate([hint])                          # and its next one
            return Trajectory(reward=float(turn.text == task.answer))

`Client` asks the engine for turns, within the limits of the episode. Its `transcript` has the
tokens, and its `conversation` has the messages. Training uses only the policy's tokens, each turn
once.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from gspo_megatron.environments.conversation import Conversation
from gspo_megatron.environments.transcript import Transcript, Written
from gspo_megatron.errors import EpisodeError, RolloutError, UnplayableError
from gspo_megatron.plugins import origin, own_copy, own_record
from gspo_megatron.process.coroutines import outcome_of
from gspo_megatron.rewards.values import NoRewardError, checked
from gspo_megatron.types import Message, Prompt, TurnRewards

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer


class LimitReached(Exception):  # noqa: N818 (not an error: a normal end of an episode)
    """Raised if the episode has no turn or no token left.

    If the reward function scores the episodes, an environment need not catch it. An environment
    that gives the rewards itself must catch it, because only it can score the turns so far."""


@dataclass(frozen=True)
class Trajectory:
    """An environment's result for an episode.

    Without rewards, the configured reward function scores the episode. Its `Sample.response` is
    then the text of the last turn."""

    reward: float | None = None
    turn_rewards: Sequence[float] | None = None  # one for each `client.generate`; not with `reward`


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    text: str  # without the end-of-sequence token
    token_ids: tuple[int, ...]  # with the end-of-sequence token
    truncated: bool  # True if the limit of tokens cut the turn off


class Environment(Protocol):
    """The class that `environment.import_path` names; `environment.options` are its keyword
    arguments. One object serves all episodes of a process."""

    # Optional: JSON schemas of functions, which the chat template describes in the prompt.
    tools: Sequence[dict[str, Any]]
    # Optional, by default False. True: every trajectory has rewards, so the reward function is
    # never called.
    gives_rewards: bool
    # Optional. True: the environment sends messages between turns, so the prompts must be messages,
    # too. By default, the command `check` finds this out from the class's code.
    needs_messages: bool

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        """Run one episode of the task."""
        ...


def gives_rewards(environment: Environment | None) -> bool:
    """Whether the environment gives all rewards. False for single turns (None)."""
    return bool(getattr(environment, "gives_rewards", False))


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode."""

    turns: int
    response_tokens: int  # all turns and the tokens between them
    prompt_tokens: int = sys.maxsize


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn of the policy."""

    token_ids: tuple[int, ...]  # all tokens before the turn
    turn: int  # number of the turn in the episode, from 0
    max_tokens: int


_T = TypeVar("_T")

Write = Callable[[TurnRequest], Awaitable[Written]]


@dataclass(frozen=True)
class EpisodePosition:
    """A point of an episode between two turns."""

    transcript: Transcript
    conversation: Conversation
    is_cut: bool


@dataclass
class Client:
    """Gives an environment turns of the policy, within the limits of the episode."""

    task: Prompt
    limits: EpisodeLimits
    tokenizer: Tokenizer
    write: Write = field(repr=False)
    transcript: Transcript = field(init=False)
    conversation: Conversation = field(init=False)
    is_cut: bool = False  # a limit ended the episode
    failure: RolloutError | None = None  # the first error of the engine
    _asked: float | None = None  # start time of the current request for a turn
    _waited: float = 0.0  # seconds that earlier turns took

    def __post_init__(self) -> None:
        # Copies, because the environment has the task, too, and may change it.
        messages, tools = own_copy([*self.task.messages]), own_copy([*self.task.tools])
        self.conversation = Conversation(self.tokenizer, messages, tools)
        self.transcript = Transcript({0: self.task.token_ids})

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far."""
        return own_copy(self.conversation.messages)

    @property
    def tokens_left(self) -> int:
        """Number of response tokens that are left in the episode."""
        return self._room(self.transcript.context)

    @property
    def turns_left(self) -> int:
        return self.limits.turns - len(self.transcript.turns)

    @property
    def seconds_waited(self) -> float:
        """Seconds of the policy's turns, including the wait for a free place on a server."""
        return self._waited + (0.0 if self._asked is None else time.monotonic() - self._asked)

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Let the next turn answer these messages, with `tools` for the chat template.

        Before the first turn, these messages replace the task's messages; later they begin a new
        branch. Raises EpisodeError if the first prompt is too long."""
        if self._asked is not None:
            raise EpisodeError("begin was called before the last turn was there")
        opening, number = self.conversation.begin(messages, tools), len(self.transcript.turns)
        if not number and len(opening.token_ids) > self.limits.prompt_tokens:
            raise EpisodeError(
                f"the prompt has {len(opening.token_ids)} tokens; at most "
                f"{self.limits.prompt_tokens} are allowed (data.max_prompt_tokens)"
            )
        self.transcript.begin_branch(opening.token_ids)
        self.conversation.opened(number, opening)

    async def generate(
        self, messages: Sequence[Message] = (), *, text: str = "", max_tokens: int | None = None
    ) -> Turn:
        """Return the policy's next turn, with at most `max_tokens` tokens.

        The chat template writes `messages` between the last turn and this one. Prompts without a
        chat template use `text` instead. The first turn, and the first turn after `begin`, takes
        neither of the two: it answers the prompt. Some chat templates change earlier text when
        `messages` follow: they drop the thoughts of earlier turns, or an empty block of thoughts.
        Then all messages become the prompt of a new branch.

        Raises LimitReached if no turn or no token is left. If the environment does not catch it,
        the episode ends there and counts as cut off. Raises EpisodeError if the arguments do not
        fit.
        """
        if self._asked is not None:
            raise EpisodeError("generate was called again before its last turn was there")
        if max_tokens is not None and max_tokens < 1:
            raise EpisodeError(f"generate: max_tokens = {max_tokens}; allowed: 1 or more")
        messages = own_copy([*messages])  # the environment may change its own list later
        transcript, number = self.transcript, len(self.transcript.turns)
        following = self.conversation.next(messages, text, transcript)
        opening, between = following.opening, following.between
        before = (*(transcript.context if opening is None else opening.token_ids), *between)
        room = self._room(before, len(between))
        if self.turns_left == 0 or room <= 0:
            self.is_cut = True
            used = transcript.num_response_tokens
            raise LimitReached(f"{number} turn{'s' * (number != 1)}, {used} response tokens")
        self._asked = time.monotonic()
        try:
            written = await self.write(TurnRequest(before, number, min(room, max_tokens or room)))
        except RolloutError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._waited, self._asked = self.seconds_waited, None
        if opening is not None:
            transcript.begin_branch(opening.token_ids)
            self.conversation.opened(number, opening)
        transcript.add(between, written)
        self.is_cut = written.truncated and (max_tokens is None or max_tokens >= room)
        text = self.conversation.text_of(written)
        self.conversation.add(messages, following, text)
        return Turn(text, tuple(written.token_ids), written.truncated)

    # Removing turns

    def position(self) -> EpisodePosition:
        """Return the current position in the episode, for `go_back`."""
        return EpisodePosition(self.transcript.copy(), self.conversation.copy(), self.is_cut)

    def go_back(self, position: EpisodePosition) -> None:
        """Remove all turns since `position` from the episode."""
        self.transcript, self.conversation = (
            position.transcript.copy(),
            position.conversation.copy(),
        )
        self.is_cut = position.is_cut

    def _room(self, before: Sequence[int], between: int = 0) -> int:
        """Return how many tokens a turn may have after the tokens `before`.

        The last `between` of these tokens are not yet in the response. No branch may be longer than
        the first prompt with a full response."""
        limit = self.limits.response_tokens
        longest = len(self.transcript.prompt) + limit
        remaining = limit - self.transcript.num_response_tokens - between
        return min(longest - len(before), remaining)


@dataclass(frozen=True)
class Episode:
    """A finished episode."""

    client: Client
    given: float | TurnRewards | None  # the environment's reward; None: the reward function scores
    error: EpisodeError | None = None  # why the episode failed

    @property
    def transcript(self) -> Transcript:
        return self.client.transcript

    @property
    def mask(self) -> np.ndarray:
        """A mask [response tokens] bool: True on the policy's tokens, all False if the episode
        failed."""
        return self.transcript.mask(learnt=self.error is None)


def given_reward(
    trajectory: Trajectory | None, transcript: Transcript
) -> float | TurnRewards | None:
    """Return the environment's reward in the form of a reward function's result, or None.

    Raises EpisodeError if `trajectory` is not a Trajectory or does not fit the turns."""
    if trajectory is None:
        return None
    if not isinstance(trajectory, Trajectory):
        kind = type(trajectory).__name__
        raise EpisodeError(f"rollout returned a {kind}; allowed: a Trajectory, or None")
    reward: Any = trajectory.reward
    count = len(transcript.turns)
    if trajectory.turn_rewards is not None:
        if reward is not None:
            raise EpisodeError("a trajectory has a reward or rewards of turns, not both")
        if not isinstance(trajectory.turn_rewards, Iterable):
            kind = type(trajectory.turn_rewards).__name__
            raise EpisodeError(f"turn_rewards has type {kind}; allowed: a list of numbers")
        rewards = list(trajectory.turn_rewards)
        if len(rewards) != count:
            raise EpisodeError(f"{len(rewards)} turn_rewards for {count} turns")
        reward = TurnRewards(rewards, transcript.turn_ends())
    if reward is not None and count:
        try:
            checked(reward, transcript.num_response_tokens)
        except NoRewardError as error:
            raise EpisodeError(f"rollout gave as reward {error}") from error
    return reward


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of an environment."""

    environment: Environment
    tokenizer: Tokenizer
    limits: EpisodeLimits

    async def run(self, task: Prompt, write: Write) -> Episode:
        """Run one episode.

        Errors of the environment are in the result; UnplayableError and errors of the engine are
        raised, even if the environment catches the latter. An episode without a turn counts as
        failed, and gets a turn with a single token."""
        client = Client(own_record(task), self.limits, self.tokenizer, write)
        given, error = None, None
        try:
            given = given_reward(await self._play(client), client.transcript)
            if not client.transcript.turns:
                raise EpisodeError("the episode ended without a turn")
            if given is None and gives_rewards(self.environment):
                raise EpisodeError("gives_rewards is true, and rollout returned no reward")
        except (RolloutError, UnplayableError):
            raise
        except Exception as found:  # noqa: BLE001 (the user's code may raise anything)
            what = f"{type(found).__name__}: {found} ({origin(found)})"
            what = str(found) if isinstance(found, EpisodeError) else what
            name = type(self.environment).__name__
            error = EpisodeError(f"environment {name}: {what}; {task.source}")
            error.__cause__ = found
        if client.failure is not None:  # the environment has caught it
            raise client.failure
        if not client.transcript.turns:
            client.transcript.add((), Written((self.tokenizer.eos_id,), truncated=True))
            client.conversation.added.append(client.messages)
        return Episode(client, given, error)

    async def _play(self, client: Client) -> Trajectory | None:
        """Return the environment's result; None if a limit ended the episode and the reward
        function will score it."""
        given, error = await outcome_of(lambda: self.environment.rollout(client, client.task))
        if isinstance(error, LimitReached):
            if gives_rewards(self.environment):
                raise EpisodeError(
                    f"gives_rewards is true, and no reward was given when a limit ended the "
                    f"episode ({error}: environment.max_turns, rollout.max_response_tokens); "
                    "rollout has to catch LimitReached and to return the reward of the turns so far"
                ) from error
            return None
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise EpisodeError(f"rollout ended with {error!r}") from error
        return given


def check_seconds(seconds: float) -> None:
    """Raise ValueError if an environment's option `seconds` is no limit of time."""
    if not 0 < seconds < math.inf:
        wrong = "allowed: a finite number above 0"
        raise ValueError(f"environment.options.seconds = {seconds}: {wrong}")


async def within(seconds: float, client: Client, work: Awaitable[_T]) -> _T:
    """Return the result of an environment's work. Raises TimeoutError after `seconds`.

    The time of the policy's turns does not count, because it depends on the other episodes."""
    task, start = asyncio.ensure_future(work), time.monotonic()
    try:
        while not task.done():
            remaining = seconds - (time.monotonic() - start - client.seconds_waited)
            if remaining <= 0:
                raise asyncio.TimeoutError
            await asyncio.wait([task], timeout=max(remaining, 0.1))
        return task.result()
    finally:
        task.cancel()
