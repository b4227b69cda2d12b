"""Conversations to token ids, and which of them the assistant writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_megatron.data.chat_templates import template_fault, written_symbols
from gspo_megatron.data.rows import json_type
from gspo_megatron.data.tokenizers import Encoded, Tokenizer
from gspo_megatron.errors import DataError

Message = Mapping[str, Any]
ASSISTANT = "assistant"


def check_template(tokenizer: Tokenizer) -> None:
    """Raises DataError where the tokenizer has no template or one that is no valid Jinja, or lacks
    a symbol that it writes."""
    template = tokenizer.chat_template
    if template is None:
        tokenizer.render([{"role": "user", "content": ""}])  # raises, with advice
    fault = template_fault(template or "")
    if fault is not None:
        raise DataError(f"{tokenizer.name}: its chat template is no valid Jinja: {fault}")
    missing = [
        symbol for symbol in written_symbols(template or "") if tokenizer.symbol_id(symbol) is None
    ]
    if missing:
        raise DataError(
            f"{tokenizer.name}: its chat template writes {', '.join(missing)}, which the tokenizer "
            "does not have as one token; train it with --control-symbols or change the template"
        )


def message_fault(messages: object) -> str | None:
    """What keeps a value from being a conversation with an answer in it."""
    if not isinstance(messages, list):
        return f"{json_type(messages)}; an array of messages is wanted"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {json_type(message)}; an object is wanted"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = json_type(message[key]) if key in message else "missing"
                return f"{key!r} of message {number} is {found}; a string is wanted"
            try:
                message[key].encode("utf-8")
            except UnicodeEncodeError as error:
                at = error.start + 1
                return f"{key!r} of message {number} holds half a surrogate pair at character {at}"
    if not any(message["role"] == ASSISTANT for message in messages):
        return f"no message of the role {ASSISTANT!r}, and so nothing to learn"
    return None


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [length] int32, and mask [length] bool: True on what the assistant writes.

    The chat template's {% generation %} marks say what that is. Without them it is what each answer
    adds to the conversation opened for it, up to its last end-of-sequence token; that needs a
    template that leaves alone what it wrote before.

    Raises DataError where it does not, and where the template refuses the messages.
    """
    rendered = tokenizer.render(messages)
    encoded = tokenizer.encode_rendered(rendered.text)
    if rendered.answers is None:
        mask = _mask_by_prefixes(messages, tokenizer, rendered.text, encoded.ids)
    else:
        mask = _mask_by_marks(encoded, rendered.answers)
    return np.array(encoded.ids, np.int32), mask


def _mask_by_marks(encoded: Encoded, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Tokens that hold a character of an answer."""
    starts, ends = np.array(encoded.starts, np.int64), np.array(encoded.ends, np.int64)
    # The bytes that spell a character may be given none of it; they count where they stand.
    ends = np.maximum(ends, starts + 1)
    mask = np.zeros(len(encoded.ids), bool)
    for start, end in answers:
        if start < end:
            mask |= (starts < end) & (ends > start)
    return mask


def _mask_by_prefixes(
    messages: Sequence[Message], tokenizer: Tokenizer, text: str, ids: list[int]
) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        opened = tokenizer.render(messages[:number], open_answer=True).text
        answered = tokenizer.render(messages[: number + 1]).text
        start = _prefix_tokens(opened, text, ids, tokenizer, number)
        end = _prefix_tokens(answered, text, ids, tokenizer, number)
        # What the template writes after the end of the sequence, nobody samples.
        last = [n for n in range(start, end) if ids[n] == tokenizer.eos_id][-1:]
        mask[start : last[0] + 1 if last else end] = True
    return mask


def _prefix_tokens(part: str, text: str, ids: list[int], tokenizer: Tokenizer, number: int) -> int:
    """How many tokens of the whole the part makes up."""
    part_ids = tokenizer.encode_rendered(part).ids
    if not text.startswith(part):
        fault = "the chat template changes what it wrote before when messages follow"
    elif ids[: len(part_ids)] != part_ids:
        fault = "the tokenizer joins the end of what came before with what follows"
    else:
        return len(part_ids)
    raise DataError(
        f"message {number + 1}: where the answer begins or ends cannot be told: {fault}; mark what "
        "the assistant writes in the template with {% generation %} and {% endgeneration %}"
    )
