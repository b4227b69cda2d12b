"""Reads prompt files (JSON Lines or Parquet, one prompt in each row) and encodes prompts."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.data.chat import (
    ASSISTANT,
    USER,
    message_fault,
    plain_message,
    tools_of_prompt,
)
from gspo_megatron.data.formats import FieldMap, with_system
from gspo_megatron.data.rows import (
    Problems,
    find_field,
    json_fault,
    json_type,
    read_rows,
    text_fault,
)
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    import numpy as np

    from gspo_megatron.data.tokenizers import Tokenizer

DEFAULT_FIELDS = FieldMap()
IDLE_OPTIONS = (
    "data.chat_template_options",
    "nothing reads it: no prompt is a list of messages, and data.chat_template = false; allowed: "
    "{}",
)
SHOWN_CHARACTERS = 10  # unknown characters of the first text that a warning shows
SHOWN_NAMES = 5  # control tokens of the first text that a warning shows
_DATE = re.compile(r"\d{4}-\d\d(-\d\d)?")


def load_prompts(
    path: str | Path, fields: FieldMap = DEFAULT_FIELDS, chat_template: bool = False
) -> list[Prompt]:
    """Return all prompts of a file in its order; see `read_prompts`.

    Raises DataError with the first bad rows and the number of further bad rows, and with the first
    two rows that have the same id.
    """
    problems = Problems()
    prompts = list(read_prompts(path, fields, problems, chat_template))
    sources: dict[str, str] = {}
    firsts = [sources.setdefault(prompt.row_id, prompt.source) for prompt in prompts]
    twice = [pair for pair in zip(prompts, firsts) if pair[0].source != pair[1]]
    if twice:
        prompt, first = twice[0]
        others = f", and {len(twice) - 1} more like it" if len(twice) > 1 else ""
        what = (
            f"id {prompt.row_id!r:.80} is also that of {first}{others}; allowed: one id for each "
            "row, or "
        )
        problems.add(prompt.source, f"{what}{fields.section}.id_field = null")
    problems.raise_if_any()
    if not prompts and fields.window is not None and fields.window.field is not None:
        raise DataError(
            f"{path}: no row lies in the window; allowed: another {fields.section}.filter"
        )
    if not prompts:
        raise DataError(f"{path}: holds no prompts; one JSON object a line is wanted")
    return prompts


def read_prompts(
    path: str | Path, fields: FieldMap, problems: Problems, chat_template: bool = False
) -> Iterator[Prompt]:
    """Yield the prompts of a file; add bad rows to `problems`.

    A prompt is a string, which must not be empty, or a list of messages whose last one is not the
    assistant's. With `chat_template` a string becomes one user message. Messages without a system
    message get `fields.system`. The answer is any JSON value. `Prompt.fields` has all fields except
    prompt and answer. If the answer is only a part of its field, `Prompt.fields` has this field,
    too. `source` is "path:line", counted from 1 (for Parquet: the row).
    """
    settings = fields.settings()
    # `Prompt.fields` leaves out fields that are the whole prompt or the whole answer.
    whole = {
        None if fields.template else fields.prompt,
        None if fields.read_answer else fields.answer,
    }
    for where, row in read_rows(Path(path), settings, problems, what="prompt file"):
        row_values = {name: find_field(row, name, setting) for setting, name in settings}
        is_inside, fault = _in_window(fields, row_values)
        if not is_inside:
            continue
        text, prompt_fault = _read_prompt(fields, row_values)
        faults, answer = [prompt_fault, fault], None
        if fields.answer is not None:
            answer, fault = row_values[fields.answer]
            if fault is None:
                answer, fault = _read_answer(fields, answer)
            faults.append(fault)
        row_id, fault = _row_id(row, fields, where)
        if fields.system is not None and isinstance(text, str) and not chat_template:
            what = f"needs messages, or {fields.section}.chat_template = true for strings"
            faults.append(f"the prompt is a string: {fields.section}.system_prompt {what}")
        wrong = list(dict.fromkeys(filter(None, (*faults, fault))))
        for fault in wrong:
            problems.add(where, fault)
        if wrong:
            continue
        messages = ()
        if isinstance(text, list):
            messages = tuple(map(plain_message, text))
            of_user = [message for message in messages if message["role"] == USER] or messages
            text = of_user[-1]["content"]
        elif chat_template:
            messages = ({"role": USER, "content": text},)
        if messages:
            messages = with_system(messages, fields.system)
        others = {key: value for key, value in row.items() if key not in whole}
        yield Prompt(text, answer, where, others, messages=messages, row_id=row_id)


def _in_window(fields: FieldMap, row_values: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether a row's date lies in the window, and the fault of the date or None.

    `row_values` has (value, fault) by field. A row with a fault counts as inside."""
    window = fields.window
    if window is None or window.field is None:
        return True, None
    value, fault = row_values[window.field]
    if fault is not None:
        return True, fault
    date = value.isoformat() if isinstance(value, datetime.date) else value
    if not (isinstance(date, str) and _DATE.match(date)):
        what = f"{date!r:.40}" if isinstance(date, str) else json_type(date)
        return True, f"field {window.field!r} is {what}; a date as 2025-01-31 is wanted"
    first, last = window.first or "", window.last or ""
    return date[: len(first)] >= first and date[: len(last)] <= last, None


def _read_prompt(fields: FieldMap, row_values: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return the prompt (text or messages), and the fault of its first bad field or None."""
    names = fields.prompt_fields()
    fault = next((row_values[name][1] for name in names if row_values[name][1]), None)
    if fault is None and fields.template is None:
        value = row_values[fields.prompt][0]
        return value, _prompt_fault(fields.prompt, value)
    texts = {}
    for name in names if fault is None else ():
        value = row_values[name][0]
        for line in value if isinstance(value, list) else [value]:
            is_number = type(line) in (int, float)
            fault = json_fault(line) if is_number else text_fault(line)  # a number may be NaN
            if fault is not None:
                wrong = fault.replace("a string is", "a string, a number or a list of these is")
                inside = "holds a value that " if line is not value else ""
                return None, f"field {name!r} {inside}{wrong}"
        texts[name] = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    if fault is not None:
        return None, fault
    text = fields.fill(texts)
    empty = f"{fields.section}.template gives an empty prompt; a prompt needs some text"
    return text, None if text.strip() else empty


def _prompt_fault(name: str, value: Any) -> str | None:
    """Return why a value is not a prompt, or None."""
    if not isinstance(value, list):
        fault = text_fault(value)
        if fault is not None:
            return f"field {name!r} {fault.replace('a string is', 'a string or messages are')}"
        empty = not value.strip()
    else:
        fault = message_fault(value)
        if fault is None and value[-1]["role"] == ASSISTANT:
            fault = f"the last message has the role {ASSISTANT!r}, but the policy writes the answer"
        if fault is not None:
            return f"field {name!r}: {fault}"
        empty = not plain_message(value[-1])["content"].strip()
    return f"field {name!r} is empty; a prompt needs some text" if empty else None


def _read_answer(fields: FieldMap, value: Any) -> tuple[Any, str | None]:
    """Return the answer, and the fault of its field or None."""
    fault = json_fault(value)
    if fault is None and fields.read_answer is not None:
        try:
            return fields.read_answer(value), None
        except ValueError as error:
            fault = f"{error} ({fields.section}.format = {fields.format})"
    return value, fault and f"field {fields.answer!r} {fault}"


def _row_id(row: Mapping[str, Any], fields: FieldMap, where: str) -> tuple[str, str | None]:
    """Return the id of a row (default: "filename:line"), and its fault or None."""
    here, name, fault, value = os.path.basename(where), fields.id, None, None
    setting = f"{fields.section}.id_field"
    if name is not None and (name in row or name != DEFAULT_FIELDS.id):
        value, fault = find_field(row, name, setting)
    if fault is None and value is not None and type(value) not in (str, int, float):
        hint = f"a string or a number is wanted ({setting} chooses one, null: none)"
        fault = f"field {name!r} is {json_type(value)}; {hint}"
    return here if value is None else str(value), fault


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    setting: str = "data.max_prompt_tokens",
) -> list[Prompt]:
    """Return the prompts with their `token_ids` and `tools`, in the same order.

    The chat template renders messages and opens the assistant's turn; `encode_text` encodes plain
    text. Raises DataError with file and line of prompts that are empty, have more than
    `max_prompt_tokens` tokens (the message names `setting`), or are refused by the chat template.
    """
    problems = Problems()
    encoded = []
    for prompt in prompts:
        tools: Sequence[dict[str, Any]] = ()
        try:
            if prompt.messages:
                tools = tools_of_prompt(prompt.fields, tokenizer)
                rendered = tokenizer.render(prompt.messages, open_answer=True, tools=tools)
                token_ids = tokenizer.encode_rendered(rendered.text, rendered.quoted).ids
            else:
                token_ids = encode_text(prompt.text, tokenizer)
        except DataError as error:
            problems.add(prompt.source, str(error))
            continue
        if not token_ids or not (prompt.text.strip() or prompt.messages):
            problems.add(prompt.source, "the prompt is empty")
        elif len(token_ids) > max_prompt_tokens:
            problems.add(
                prompt.source,
                f"the prompt has {len(token_ids)} tokens; at most {max_prompt_tokens} are allowed "
                f"({setting})",
            )
        encoded.append(replace(prompt, token_ids=tuple(token_ids), tools=tuple(tools)))
    problems.raise_if_any()
    return encoded


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt without messages.

    If the tokenizer's models expect a beginning-of-sequence token, the ids begin with this token.
    They begin with only one such token, even if the text itself begins with it, too. Other text
    that spells a control token is encoded as plain text."""
    if tokenizer.bos_id is None:
        return tokenizer.encode(text)
    return [tokenizer.bos_id, *tokenizer.encode(text.removeprefix(tokenizer.bos_text))]


def encode_whole(prompt: str, response: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt and a response without messages, and the end-of-sequence
    token, as a reward model gets them. prompt: empty if the response is the whole text."""
    return [
        *encode_text(prompt or response, tokenizer),
        *(tokenizer.encode(response) if prompt else ()),
        tokenizer.eos_id,
    ]


@dataclass
class Found:
    """The texts of a file with something of one kind."""

    count: int = 0  # number of texts
    source: str = ""  # "file:line" of the first text
    shown: tuple[str, ...] = ()  # what was found in the first text, each once

    def add(self, source: str, shown: Iterable[str] = ()) -> None:
        """Count a text. `shown` is read only for the first text."""
        if not self.count:
            self.source, self.shown = source, tuple(dict.fromkeys(shown))
        self.count += 1


@dataclass
class OddTexts:
    """Counts the texts of a file that are encoded in another way than their author may expect."""

    # Texts with characters that the tokenizer does not know. It replaces all of them by one token.
    # If only longer pieces are unknown, no characters are shown.
    unknown: Found = field(default_factory=Found)
    # Texts that spell control tokens, such as already rendered prompts.
    quoted: Found = field(default_factory=Found)
    bos: Found = field(default_factory=Found)  # prompts that begin with the text of the BOS token

    def add(
        self,
        tokenizer: Tokenizer,
        source: str,
        token_ids: Sequence[int] | np.ndarray,
        text: str,
        *,
        of_messages: bool,
    ) -> None:
        """Check a text with its `token_ids` [length].

        of_messages: a chat template rendered the text. Then quoted control tokens need no warning:
        the control tokens come from the template."""
        unk_id, bos = tokenizer.unk_id, tokenizer.bos_text
        if unk_id is not None and unk_id in token_ids:
            self.unknown.add(
                source, (c for c in dict.fromkeys(text) if unk_id in tokenizer.encode(c))
            )
        if of_messages:
            return
        if bos and text.startswith(bos):
            text = text.removeprefix(bos)
            self.bos.add(source, [bos])
        if spans := tokenizer.controls.quotations(text):
            self.quoted.add(source, (text[a:b] for a, b in spans))

    def warnings(self, key: str, total: int) -> list[str]:
        """Return one line for each kind. `total` is the number of texts, `key` the setting of their
        file."""
        unknown, quoted, bos, lines = self.unknown, self.quoted, self.bos, []
        if unknown.count:
            shown = ", ".join(map(repr, unknown.shown[:SHOWN_CHARACTERS]))
            more = len(unknown.shown) - SHOWN_CHARACTERS
            shown = f": {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""
            lines.append(
                f"{key}: {unknown.count:,} of {total:,} texts hold characters that the tokenizer "
                "does not know; it replaces them all by the same token; the first is "
                f"{unknown.source}{shown}"
            )
        if bos.count:
            lines.append(
                f"{key}: {bos.count:,} of {total:,} prompts begin with {bos.shown[0]!r}, which the "
                "tokenizer puts before every prompt: each gets it once; leave it out of the "
                f"prompts; the first is {bos.source}"
            )
        if quoted.count:
            lines.append(
                f"{key}: {quoted.count:,} of {total:,} texts spell control tokens of the "
                "tokenizer; they are encoded as plain text, because only a chat template writes "
                "control tokens: give conversations as messages, or use data.chat_template; the "
                f"first is {quoted.source}: {', '.join(quoted.shown[:SHOWN_NAMES])}"
            )
        return lines
