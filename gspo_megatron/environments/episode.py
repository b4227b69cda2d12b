"""Episodes of several turns: what an environment of your own is given, and what it returns.

    class Guess:
        async def rollout(self, client, task):
            turn = await client.generate()                                # the policy's first turn
            hint = {"role": "user", "content": "lower"}
            turn = await client.generate([hint])                          # and its next one
            return Trajectory(reward=float(turn.text == task.answer))

`Client` asks the engine for turns, within the limits of the episode. What was written is in its
`transcript` (tokens) and `conversation` (messages). Only what the policy wrote is learnt from, and
every turn once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from gspo_megatron.environments.conversation import Conversation
from gspo_megatron.environments.transcript import Transcript, Written
from gspo_megatron.errors import EpisodeError, RolloutError, UnplayableError
from gspo_megatron.plugins import origin, own_copy, own_record
from gspo_megatron.rewards.values import checked
from gspo_megatron.types import Message, Prompt, TurnRewards

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer


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
class EpisodeLimits:
    """The limits of an episode."""

    turns: int
    response_tokens: int  # of all turns, with what stands between them
    prompt_tokens: int = sys.maxsize


@dataclass(frozen=True)
class TurnRequest:
    """A turn that the policy is to write."""

    token_ids: tuple[int, ...]  # what stands before it
    turn: int  # of the episode, from 0
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
    """An episode's way to the policy, within the limits of the episode."""

    task: Prompt
    limits: EpisodeLimits
    tokenizer: Tokenizer
    write: Write = field(repr=False)
    transcript: Transcript = field(init=False)
    conversation: Conversation = field(init=False)
    is_cut: bool = False  # a limit ended it
    _asked: float | None = None  # since when the policy is asked for a turn
    _waited: float = 0.0  # seconds for its earlier turns

    def __post_init__(self) -> None:
        # The environment has the task, too: what it changes there is not the episode's.
        self.conversation = Conversation(self.tokenizer, own_copy([*self.task.messages]))
        self.transcript = Transcript({0: self.task.token_ids})

    @property
    def messages(self) -> list[Message]:
        """The conversation so far: a copy."""
        return own_copy(self.conversation.messages)

    @property
    def tokens_left(self) -> int:
        """Response tokens that the episode may still have."""
        return self._room(self.transcript.context)

    @property
    def turns_left(self) -> int:
        return self.limits.turns - len(self.transcript.turns)

    @property
    def seconds_waited(self) -> float:
        """While the policy wrote its turns, or a server had no place for them yet."""
        return self._waited + (0.0 if self._asked is None else time.monotonic() - self._asked)

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """The next turn answers these messages, with `tools` for the chat template: before the
        first turn instead of the task's, later as a new branch. Raises EpisodeError for a first
        prompt that is too long."""
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
        finally:
            self._waited, self._asked = self.seconds_waited, None
        if opening is not None:
            transcript.begin_branch(opening.token_ids)
            self.conversation.opened(number, opening)
        transcript.add(between, written)
        self.is_cut = written.truncated and (max_tokens is None or max_tokens >= room)
        told = self.conversation.text_of(written)
        self.conversation.add(messages, following, told)
        return Turn(told, tuple(written.token_ids), written.truncated)

    # Turns that nobody has read

    def position(self) -> EpisodePosition:
        """Where the episode is, for `go_back`."""
        return EpisodePosition(self.transcript.copy(), self.conversation.copy(), self.is_cut)

    def go_back(self, position: EpisodePosition) -> None:
        """Take back what was said since: it was generated, and it is no part of the episode."""
        self.transcript, self.conversation = (
            position.transcript.copy(),
            position.conversation.copy(),
        )
        self.is_cut = position.is_cut

    def _room(self, before: Sequence[int], between: int = 0) -> int:
        """Tokens of a turn after all of `before`, of which `between` are new in the response. A
        branch is never longer than an episode that has one only."""
        limit = self.limits.response_tokens
        longest = len(self.transcript.prompt) + limit
        left = limit - self.transcript.num_response_tokens - between
        return min(longest - len(before), left)


@dataclass(frozen=True)
class Episode:
    """An episode that has ended."""

    client: Client
    given: float | TurnRewards | None  # what the environment gave; None: the reward function scores
    error: EpisodeError | None = None  # it failed

    @property
    def transcript(self) -> Transcript:
        return self.client.transcript

    @property
    def mask(self) -> np.ndarray:
        """[response tokens] bool: what the policy wrote. Of a failed episode nothing counts."""
        return self.transcript.mask(learnt=self.error is None)


def given_reward(
    trajectory: Trajectory | None, transcript: Transcript
) -> float | TurnRewards | None:
    """What the environment gave for the episode, in the form of a reward function's value. Raises
    EpisodeError for what is no trajectory or does not fit the turns."""
    if trajectory is None:
        return None
    if not isinstance(trajectory, Trajectory):
        kind = type(trajectory).__name__
        raise EpisodeError(f"rollout returned a {kind}; legal: a Trajectory, or None")
    given: Any = trajectory.reward
    count = len(transcript.turns)
    if trajectory.turn_rewards is not None:
        if given is not None:
            raise EpisodeError("a trajectory has a reward or rewards of turns, not both")
        rewards = list(trajectory.turn_rewards)
        if len(rewards) != count:
            raise EpisodeError(f"{len(rewards)} turn_rewards for {count} turns")
        given = TurnRewards(rewards, transcript.turn_ends())
    if given is not None and count:
        checked(given, transcript.num_response_tokens, _refuse)
    return given


def _refuse(returned: str) -> NoReturn:
    raise EpisodeError(f"rollout gave as reward {returned}")


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of an environment."""

    environment: Environment
    tokenizer: Tokenizer
    limits: EpisodeLimits

    async def run(self, task: Prompt, write: Write) -> Episode:
        """One episode. What the environment raises is in the result; an error of the engine, and an
        UnplayableError, is raised here. An episode without a turn has failed, and gets one of a
        single token."""
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
            what = str(found) if isinstance(found, EpisodeError) else _named(found)
            name = type(self.environment).__name__
            error = EpisodeError(f"environment {name}: {what}; {task.source}")
            error.__cause__ = found
        if not client.transcript.turns:
            client.transcript.add((), Written((self.tokenizer.eos_id,), truncated=True))
            client.conversation.added.append(client.messages)
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
