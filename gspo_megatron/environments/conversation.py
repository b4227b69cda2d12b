"""The messages of an episode, and the text that the chat template writes between the turns.

A template renders whole conversations. Before each turn, `Conversation.next` finds the text that
the template adds after the last turn. The tokens of the turns never change after generation.
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

_MARKS = range(0xE000, 0xF900)  # private-use characters; most do not occur in a conversation


@dataclass(frozen=True)
class Opening:
    """The prompt of a branch, rendered by the chat template."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Next:
    """The input before the next turn: tokens after the last turn, or a new prompt."""

    between: tuple[int, ...]
    text: str | None  # the chat template's text of `between`; None if the template did not write it
    opening: Opening | None = None  # the prompt, if a new branch begins here


@dataclass
class Conversation:
    """The messages so far, and the texts that the template wrote for them."""

    tokenizer: Tokenizer
    messages: list[Message]
    tools: Sequence[dict[str, Any]] = ()
    added: list[list[Message]] = field(default_factory=list)  # messages added before each turn
    new: list[Message] = field(init=False)  # the messages that no turn has answered yet
    _first: list[Message] = field(init=False)  # the messages of the task's prompt
    # The template's texts, to check whether it would write the same again. _openings: the prompt of
    # each branch; the key is the number of the branch's first turn. _texts: the text before each
    # turn, or None if the template did not write it.
    _openings: dict[int, str] = field(default_factory=dict)
    _texts: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.new = self._first = self.messages

    def copy(self) -> Conversation:
        """Return an independent copy."""
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
        """Replace all messages; return the new prompt. Pass this prompt to `opened` with the number
        of its first turn."""
        self.messages, self.tools = own_copy([*messages]), own_copy(tools)
        self.new = self.messages
        return self._opening_of(self.messages)

    def opened(self, turn: int, opening: Opening) -> None:
        """Record that a branch with this prompt begins at this turn."""
        self._openings[turn] = opening.text

    def next(self, messages: Sequence[Message], text: str, transcript: Transcript) -> Next:
        """Return the input before the next turn. Before the first turn of a branch, `messages` and
        `text` are empty. Before a later turn, exactly one of them is given. Raises EpisodeError
        otherwise."""
        if len(transcript.turns) in transcript.prompts:
            if messages or text:
                raise EpisodeError("nothing may come between the prompt and the first turn")
            return Next((), "")
        if bool(messages) == bool(text):
            raise EpisodeError("between two turns there must be either messages or a text")
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
        """Record that the policy answered the new messages and `messages` with the text `turn`."""
        self._texts.append(next_.text)
        self.added.append([*self.new, *messages])
        self.messages = [*self.messages, *messages, {"role": "assistant", "content": turn}]
        self.new = []

    def text_of(self, turn: Written) -> str:
        """Return the text of a turn, without its end-of-sequence token."""
        return self.tokenizer.decode_response(turn.token_ids)

    def _between(self, messages: Sequence[Message], transcript: Transcript) -> Next | None:
        """Return what the template writes after the last turn.

        Returns None if the template would now write a different text for the branch so far."""
        mark = _mark_for([*self.messages, *messages])
        last = {**self.messages[-1], "content": self.messages[-1]["content"] + mark}
        written = self._rendered([*self.messages[:-1], last, *messages])
        end = written.text.rfind(mark)
        if end < 0 or not self._is_branch(written.text[:end], transcript):
            return None
        start, text = end + len(mark), written.text[end + len(mark) :]
        # Skip the end-of-turn token if the policy has written it.
        if text.startswith(ending := self._ending(transcript.turns[-1])):
            start += len(ending)
        return Next(self._encoded(written.part(start)), text)

    def _is_branch(self, text: str, transcript: Transcript) -> bool:
        """Whether a template's `text` equals the branch so far, ignoring white space.

        If the template did not write all text between the turns, it is enough that `text` contains
        the turns in their order."""
        start = transcript.last_start
        turns = [self.text_of(turn) for turn in transcript.turns[start:]]
        between = self._texts[start:]
        if any(part is None for part in between):
            return _contains_in_order(text, turns)
        if start not in self._openings:  # the task's prompt
            self._openings[start] = self._rendered(self._first).text
        parts = (part for pair in zip(between, turns, strict=True) for part in pair)
        branch = self._openings[start] + "".join(filter(None, parts))
        return _without_spaces(text) == _without_spaces(branch)

    def _opening_of(self, messages: Sequence[Message]) -> Opening:
        rendered = self._rendered(messages)
        return Opening(rendered.text, self._encoded(rendered))

    def _rendered(self, messages: Sequence[Message]) -> Rendered:
        return self.tokenizer.render(messages, open_answer=True, tools=self.tools)

    def _encoded(self, rendered: Rendered) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_rendered(rendered.text, rendered.quoted).ids)

    def _ending(self, turn: Written) -> str:
        """Return the text of the turn's end-of-sequence token; empty if it has none."""
        last = turn.token_ids[-1]
        names = {number: text for text, number in self.tokenizer.special_tokens.items()}
        return names.get(last, "") if last in self.tokenizer.eos_ids else ""


def _mark_for(messages: Sequence[Message]) -> str:
    """Return a character that does not occur in the messages."""
    texts = json.dumps(messages, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, _MARKS) if mark not in texts)


def _without_spaces(text: str) -> str:
    """Return `text` without spaces and line breaks."""
    return "".join(text.split())


def _contains_in_order(text: str, parts: Iterable[str]) -> bool:
    """Whether `text` contains these parts in their order, ignoring white space."""
    text, start = _without_spaces(text), 0
    for part in map(_without_spaces, parts):
        place = text.find(part, start)
        if place < 0:
            return False
        start = place + len(part)
    return True
