"""The conversation of an episode as messages, and the text that the chat template makes of it.

A template writes whole conversations. Before each turn, `Conversation.next` finds out what it wrote
since the last turn; the turns themselves stay as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gspo_megatron.environments.transcript import Transcript, Written
from gspo_megatron.errors import EpisodeError
from gspo_megatron.plugins import own_copy
from gspo_megatron.types import Message

if TYPE_CHECKING:
    from gspo_megatron.data.chat import Rendered
    from gspo_megatron.data.tokenizers import Tokenizer

_MARKS = range(0xE000, 0xF900)  # of the private use area: a conversation lacks most of them


@dataclass(frozen=True)
class Opening:
    """The prompt of a branch, as the chat template writes it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Next:
    """What stands before the next turn: the tokens since the last one, or a new prompt."""

    between: tuple[int, ...]
    text: str | None  # of `between`, as the chat template wrote it; None: something else wrote it
    opening: Opening | None = None  # of the branch that begins here


@dataclass
class Conversation:
    """Messages so far, and what the template has made of them. Its methods are given the turns."""

    tokenizer: Tokenizer
    messages: list[Message]
    tools: Sequence[dict[str, Any]] = ()
    added: list[list[Message]] = field(default_factory=list)  # before each turn
    new: list[Message] = field(init=False)  # of `messages`, those that no turn has answered
    _first: list[Message] = field(init=False)  # of the task's prompt
    # As the chat template wrote them, to see whether it would write them so again: the prompts of
    # branches by their first turn, and what stands before each turn; None: something else wrote it.
    _openings: dict[int, str] = field(default_factory=dict)
    _texts: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.new = self._first = self.messages

    def copy(self) -> Conversation:
        """The same conversation, to go on with in another way."""
        other = replace(
            self,
            messages=[*self.messages],
            added=[*self.added],
            _openings=dict(self._openings),
            _texts=[*self._texts],
        )
        other.new, other._first = self.new, self._first
        return other

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Opening:
        """These messages instead of all before; `opened` says of which turn they are the prompt."""
        self.messages, self.tools = own_copy([*messages]), own_copy(tools)
        self.new = self.messages
        return self._opening_of(self.messages)

    def opened(self, turn: int, opening: Opening) -> None:
        """A branch begins with this turn."""
        self._openings[turn] = opening.text

    def next(self, messages: Sequence[Message], text: str, transcript: Transcript) -> Next:
        """What these messages, or this text, become before the next turn. Raises EpisodeError where
        neither or both are given, or one that does not fit."""
        if len(transcript.turns) in transcript.prompts:
            if messages or text:
                raise EpisodeError("the first turn answers the prompt; nothing stands between")
            return Next((), "")
        if bool(messages) == bool(text):
            raise EpisodeError("between two turns stand messages, or a text")
        if text:
            return Next(tuple(self.tokenizer.encode(text)), None)
        if not self.messages:
            raise EpisodeError(
                "messages need a prompt of messages (data.chat_template = true makes one)"
            )
        between = self._between(messages, transcript)
        if between is None:
            return Next((), "", self._opening_of([*self.messages, *messages]))
        return between

    def add(self, messages: Sequence[Message], next_: Next, turn: str) -> None:
        """The policy has answered what is new, these messages with it, with the text `turn`."""
        self._texts.append(next_.text)
        self.added.append([*self.new, *messages])
        self.messages = [*self.messages, *messages, {"role": "assistant", "content": turn}]
        self.new = []

    def text_of(self, turn: Written) -> str:
        """The text of a turn, without the token that ended it."""
        ids = list(turn.token_ids)
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return self.tokenizer.decode(ids)

    def _between(self, messages: Sequence[Message], transcript: Transcript) -> Next | None:
        """What the template writes after the last turn, which itself stays as it was sampled. None
        where it would write the branch so far otherwise."""
        mark = _mark_for([*self.messages, *messages])
        last = {**self.messages[-1], "content": self.messages[-1]["content"] + mark}
        written = self._rendered([*self.messages[:-1], last, *messages])
        end = written.text.rfind(mark)
        if end < 0 or not self._is_branch(written.text[:end], transcript):
            return None
        start, whole = end + len(mark), written.text[end + len(mark) :]
        # Without the end of the turn, where the policy wrote it.
        if whole.startswith(ending := self._ending(transcript.turns[-1])):
            start += len(ending)
        return Next(self._encoded(written.part(start)), whole)

    def _is_branch(self, text: str, transcript: Transcript) -> bool:
        """Whether a template's `text` is the branch so far. Spaces and line breaks do not count,
        and only turns do where something else wrote what stands between them."""
        start = transcript.last_start
        turns = [self.text_of(turn) for turn in transcript.turns[start:]]
        between = self._texts[start:]
        if any(part is None for part in between):
            return _holds(text, turns)
        if start not in self._openings:  # the task's prompt
            self._openings[start] = self._rendered(self._first).text
        parts = (part for pair in zip(between, turns, strict=True) for part in pair)
        return _squeezed(text) == _squeezed(self._openings[start] + "".join(filter(None, parts)))

    def _opening_of(self, messages: Sequence[Message]) -> Opening:
        rendered = self._rendered(messages)
        return Opening(rendered.text, self._encoded(rendered))

    def _rendered(self, messages: Sequence[Message]) -> Rendered:
        return self.tokenizer.render(messages, open_answer=True, tools=self.tools)

    def _encoded(self, rendered: Rendered) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_rendered(rendered.text, rendered.quoted).ids)

    def _ending(self, turn: Written) -> str:
        """What a template writes for the token that ended the turn; empty if none did."""
        last = turn.token_ids[-1]
        names = {number: text for text, number in self.tokenizer.special_tokens.items()}
        return names.get(last, "") if last in self.tokenizer.eos_ids else ""


def _mark_for(messages: Sequence[Message]) -> str:
    """A character that no text of the messages has."""
    texts = json.dumps(messages, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, _MARKS) if mark not in texts)


def _squeezed(text: str) -> str:
    """`text` without spaces and line breaks."""
    return "".join(text.split())


def _holds(text: str, parts: Iterable[str]) -> bool:
    """Whether `text` has these parts in their order. Spaces and line breaks do not count."""
    text, start = _squeezed(text), 0
    for part in map(_squeezed, parts):
        place = text.find(part, start)
        if place < 0:
            return False
        start = place + len(part)
    return True
