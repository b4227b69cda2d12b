"""Reads rows of preferences and ratings, also in the formats of published datasets."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.config.stages import PreferenceDataSection
from gspo_megatron.data.chat import ASSISTANT, USER, message_fault, plain_message
from gspo_megatron.data.formats import with_system
from gspo_megatron.data.rows import find_field, json_type, text_fault
from gspo_megatron.types import Message


@dataclass(frozen=True)
class Texts:
    """A prompt and a response without messages."""

    prompt: str  # empty if the response contains the prompt
    response: str


Whole = Sequence[Message] | Texts  # a prompt with a response


@dataclass(frozen=True)
class PreferenceFields:
    """The fields of a row. A name with dots, as in a.b, is field b of the object a."""

    prompt: str | None = None  # None: each response is a whole text or conversation
    chosen: str = "chosen"
    rejected: str = "rejected"
    # The field with a number that says which response is better. If it is negative, the response in
    # the field `chosen` is better; if it is positive, the response in the field `rejected`; 0 is a
    # tie. None: the response in the field `chosen` is better.
    strength: str | None = None
    # The fields with the scores of the two responses. Equal scores are a tie.
    scores: tuple[str, str] | None = None
    response: str = "response"
    rating: str | None = None  # if set, a row has one response with a rating, not a pair
    margin: str | None = None
    source: str | None = None
    transcripts: bool = False  # responses are transcripts of "Human:" and "Assistant:" turns
    format: str | None = None  # a key of FORMATS

    def settings(self) -> list[tuple[str, str]]:
        """Return (setting, field) for each field that is read."""
        named = [("data.prompt_field", self.prompt)]
        if self.rating is None:
            named += [("data.chosen_field", self.chosen), ("data.rejected_field", self.rejected)]
        else:
            named += [("data.response_field", self.response), ("data.rating_field", self.rating)]
        if self.format is not None:
            names = [*(name for _, name in named), self.strength, *(self.scores or ())]
            named = [(f"data.format = {self.format}", name) for name in names]
        named += [("data.margin_field", self.margin), ("data.source_field", self.source)]
        return [(setting, name) for setting, name in named if name is not None]

    def setting_of(self, name: str) -> str:
        """Return the setting that chooses a field."""
        return next(setting for setting, each in self.settings() if each == name)


FORMATS = {
    "hh_rlhf": PreferenceFields(transcripts=True),
    "ultrafeedback": PreferenceFields(scores=("score_chosen", "score_rejected")),
    "helpsteer": PreferenceFields("prompt", rating="helpfulness"),
    "helpsteer2": PreferenceFields(
        "prompt", "response_1", "response_2", strength="preference_strength"
    ),
    "helpsteer3": PreferenceFields(
        "context", "response1", "response2", strength="overall_preference"
    ),
    "skywork": PreferenceFields(source="source"),
}


def fields_of(data: PreferenceDataSection, *, regression: bool) -> PreferenceFields:
    """Return the fields that the configuration chooses. With `regression` rows have ratings."""
    if data.format is not None:
        fields = replace(FORMATS[data.format], format=data.format)
    else:
        fields = PreferenceFields(
            data.prompt_field,
            data.chosen_field,
            data.rejected_field,
            response=data.response_field,
            rating=data.rating_field if regression else None,
        )
    return replace(fields, margin=data.margin_field, source=data.source_field or fields.source)


@dataclass(frozen=True)
class Read:
    """The contents of a row."""

    responses: list[Whole]  # the chosen response, then the rejected ones; or the rated one
    values: list[float]  # a margin for each rejected response; or the rating
    source: str  # empty if data.source_field is not set


def read_preference(
    row: Mapping[str, Any], fields: PreferenceFields, data: PreferenceDataSection
) -> Read | None:
    """Read a row; None: a tie. Raises ValueError with the fault of a bad row."""
    prompt = None if fields.prompt is None else _get(row, fields.prompt, fields)
    source = _source(row, fields)
    if fields.rating is not None:
        rating = _number(_get(row, fields.rating, fields), fields.rating)
        response = _get(row, fields.response, fields)
        return Read([_whole(prompt, response, fields.response, fields, data)], [rating], source)
    better, worse = fields.chosen, fields.rejected
    if fields.strength is not None:
        strength = _number(_get(row, fields.strength, fields), fields.strength)
        if strength == 0:
            return None
        better, worse = (better, worse) if strength < 0 else (worse, better)
    if fields.scores is not None:
        first, second = (_number(_get(row, name, fields), name) for name in fields.scores)
        if first == second:
            return None
    rejected = _several(_get(row, worse, fields))
    if not rejected:
        raise ValueError(f"field {worse!r} holds no response")
    chosen = _whole(prompt, _get(row, better, fields), better, fields, data)
    others = [_whole(prompt, each, worse, fields, data) for each in rejected]
    return Read([chosen, *others], _margins(row, fields, len(others)), source)


def _get(row: Mapping[str, Any], name: str, fields: PreferenceFields) -> Any:
    value, fault = find_field(row, name, fields.setting_of(name))
    if fault is not None:
        raise ValueError(fault)
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    what = value if isinstance(value, float) else json_type(value)
    raise ValueError(f"field {name!r} is {what}; a finite number is wanted")


def _source(row: Mapping[str, Any], fields: PreferenceFields) -> str:
    if fields.source is None:
        return ""
    value = _get(row, fields.source, fields)
    if (fault := text_fault(value)) is not None:
        raise ValueError(f"field {fields.source!r} {fault}")
    # The source becomes a part of the names of metrics.
    return re.sub(r"[^\w.-]+", "_", value).strip("_") or "_"


def _several(value: Any) -> list[Any]:
    """Return the rejected responses as a list. `value` may be one response or an array of several.
    An array of objects is one response, given as messages."""
    is_array = isinstance(value, list) and not any(isinstance(each, dict) for each in value)
    return value if is_array else [value]


def _margins(row: Mapping[str, Any], fields: PreferenceFields, count: int) -> list[float]:
    if fields.margin is None:
        return [0.0] * count
    name = fields.margin
    value = _get(row, name, fields)
    listed = value if isinstance(value, list) else [value] * count
    if len(listed) != count:
        raise ValueError(f"field {name!r} has {len(listed)} margins for {count} rejected responses")
    margins = [_number(each, name) for each in listed]
    if name == fields.strength:  # its sign says which response is better
        return [abs(each) for each in margins]
    if min(margins) < 0:
        raise ValueError(f"field {name!r} is {min(margins):g}; a margin is a number from 0")
    return margins


def _whole(
    prompt: Any, response: Any, name: str, fields: PreferenceFields, data: PreferenceDataSection
) -> Whole:
    """Join a prompt and a response. `name`: the field of the response."""
    before, text = _prompt(prompt, fields), ""
    if isinstance(response, list):
        messages = _messages(response, name)
        if messages[-1]["role"] != ASSISTANT:
            raise ValueError(f"field {name!r}: the last message is not the {ASSISTANT}'s")
    else:
        if (fault := text_fault(response)) is not None:
            raise ValueError(f"field {name!r} {fault}, or an array of messages")
        text, messages = response, []
    if fields.transcripts and data.chat_template:
        if messages:
            raise ValueError(f"field {name!r} is an array; a transcript is a string")
        messages = transcript(text, name)
    elif not messages and (isinstance(before, list) or data.chat_template):
        if prompt is None:
            raise ValueError(
                f"field {name!r} is a text without messages; data.chat_template needs "
                "data.prompt_field"
            )
        messages = [{"role": ASSISTANT, "content": text}]
    if not messages:
        if data.system_prompt is not None:
            raise ValueError(
                f"field {name!r} is a string: data.system_prompt needs messages, or "
                "data.chat_template = true for strings"
            )
        return Texts(before if isinstance(before, str) else "", text)
    if isinstance(before, str):
        before = [{"role": USER, "content": before}]
    return with_system([*(before or ()), *messages], data.system_prompt)


def _prompt(prompt: Any, fields: PreferenceFields) -> str | list[Message] | None:
    if prompt is None:
        if fields.prompt is not None:
            raise ValueError(f"field {fields.prompt!r} is null; a string or messages are wanted")
        return None
    if isinstance(prompt, list):
        return _messages(prompt, fields.prompt)
    if (fault := text_fault(prompt)) is not None:
        raise ValueError(f"field {fields.prompt!r} {fault}, or an array of messages")
    if not prompt:
        raise ValueError(f"field {fields.prompt!r} is empty")
    return prompt


def _messages(value: Any, name: str | None) -> list[Message]:
    if (fault := message_fault(value)) is not None:
        raise ValueError(f"field {name!r}: {fault}")
    return [*map(plain_message, value)]


_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": USER, "Assistant": ASSISTANT}


def transcript(text: str, name: str) -> list[Message]:
    r"""Split a transcript of Anthropic's hh-rlhf, turns after "\n\nHuman: " and "\n\nAssistant: ",
    into messages. Consecutive turns of one speaker become one message. Raises ValueError."""
    start, *parts = _TURN.split(text)
    if start.strip() or not parts or parts[0] != "Human":
        raise ValueError(rf"field {name!r} does not begin with '\n\nHuman: '")
    messages: list[dict[str, Any]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role = _ROLES[speaker]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})
    if messages[-1]["role"] != ASSISTANT:
        raise ValueError(f"field {name!r}: the last turn of the transcript is not the assistant's")
    return [*messages]
