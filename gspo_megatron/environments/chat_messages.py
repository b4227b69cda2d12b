"""Converts messages between OpenAI's chat completions and chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gspo_megatron.data.chat import text_of
from gspo_megatron.errors import EpisodeError
from gspo_megatron.files import WRONG_VALUES, parse_json

# A tool call in the format of Qwen's chat templates (github.com/QwenLM/Qwen-Agent, "hermes").
_CALL, _CALL_END = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), "</tool_call>"
_ROLES = ("system", "developer", "user", "assistant", "tool")


def calls_in(text: str) -> tuple[list[str], str]:
    """Return the contents of the tool calls in a text, and the text without the calls.

    Only the text up to the last end of a call is searched. In text without an end, each beginning
    would be searched to the end of the text, which takes minutes if a policy writes nothing else.
    """
    before, end, after = text.rpartition(_CALL_END)
    return _CALL.findall(before + end), _CALL.sub("", before + end) + after


def assistant_message(text: str, has_tools: bool, turn: int) -> dict[str, Any]:
    """Return the policy's text as a message.

    With tools, calls in Qwen's format become `tool_calls`. If a call is malformed, the message
    contains the whole text instead. The number `turn` makes the ids of calls unique."""
    calls, (found_calls, rest) = [], calls_in(text)
    for number, found in enumerate(found_calls if has_tools else ()):
        try:
            call = parse_json(found)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            if not isinstance(call["name"], str):
                raise TypeError("the name of a function is no text")
        except WRONG_VALUES:
            return {"role": "assistant", "content": text}
        identity = f"call_{turn}_{number}"
        calls.append({"id": identity, "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": rest.strip() or None, "tool_calls": calls}


def plain_messages(given: Any) -> list[dict[str, Any]]:
    """Reduce the messages of a request to a normal form.

    Requests with the same conversation become equal. Raises EpisodeError for invalid messages."""
    if not isinstance(given, list) or not given:
        raise EpisodeError("messages: a list of messages is wanted")
    return [_plain(message) for message in given]


def _plain(message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise EpisodeError(f"a message of the role {role!r}; allowed: {', '.join(_ROLES)}")
    plain = {"role": role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            plain[key] = message[key]
    return plain


def _text(content: Any) -> str:
    if (text := text_of(content)) is None:
        raise EpisodeError("the content of a message is a text, or parts of the type text")
    return text


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        return {
            "id": call["id"],
            "type": "function",
            "function": {"name": function["name"], "arguments": parse_json(function["arguments"])},
        }
    except WRONG_VALUES as error:
        raise EpisodeError(f"a tool call that is not as it was sent: {error}") from error
