"""Chat templates (Jinja, as transformers uses them), and conversations as token ids with a mask of
what the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gspo_megatron.data.quoting import Controls, Span, trace
from gspo_megatron.data.rows import json_type, text_fault
from gspo_megatron.errors import DataError, problem, suggest
from gspo_megatron.files import parse_json
from gspo_megatron.types import Message

ASSISTANT, USER = "assistant", "user"
TEMPLATE_FILE = "chat_template.jinja"
# A turn stands between two symbols; the second one is the end-of-sequence token. The `generation`
# marks enclose what the assistant writes: its text and that token.
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] ~ eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] ~ eos_token -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# Variables of a template that are no options; the special tokens are the tokenizer's.
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
_SYMBOL = re.compile(r"<\|[^|<>\s]+\|>")
_WIDE_SYMBOL = re.compile(r"<｜[^｜<>\s]+｜>")  # DeepSeek's


@dataclass(frozen=True)
class Rendered:
    """A conversation as a chat template writes it."""

    text: str
    # [start, end) of what the assistant writes, in characters; None if the template has no
    # {% generation %} marks.
    answers: list[tuple[int, int]] | None
    # [start, end) of what comes from the messages, as far as it could spell a control token.
    quoted: Sequence[tuple[int, int]] = ()

    def part(self, start: int, end: int | None = None) -> Rendered:
        """The characters from `start` to `end`, without the marks of answers."""
        end = len(self.text) if end is None else end
        inside = ((max(a, start) - start, min(b, end) - start) for a, b in self.quoted)
        return Rendered(self.text[start:end], None, [(a, b) for a, b in inside if a < b])


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the range of characters [start, end) that each stands for.

    Where a character is spelled in bytes, all its tokens may have its range, or only the last.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer here; data/tokenizers.py has them."""

    name: str
    eos_id: int
    chat_template: str | None
    template_options: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_answer: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Rendered: ...
    def encode_rendered(self, text: str, quoted: Sequence[tuple[int, int]] = ()) -> Encoded: ...
    def symbol_id(self, symbol: str) -> int | None: ...


def read_template(folder: Path) -> str | None:
    """The chat template of a tokenizer folder, from chat_template.jinja or tokenizer_config.json.

    Raises DataError if an existing file cannot be read.
    """
    try:
        file = folder / TEMPLATE_FILE
        if file.is_file():
            return file.read_text(encoding="utf-8")
        file = folder / "tokenizer_config.json"
        if file.is_file():
            template = parse_json(file.read_bytes()).get("chat_template")
            return template if isinstance(template, str) else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    return None


def written_symbols(template: str) -> list[str]:
    """The symbols of the form <|name|> that the template writes, each once."""
    return list(dict.fromkeys(_SYMBOL.findall(template)))


def written_marks(template: str | None) -> set[str]:
    """What marks turns although it may be no special token: the symbols <|name|>, also with wide
    bars, that the template names. Others that it names ("<think>") are text that a model writes."""
    text = template or ""
    return {*_SYMBOL.findall(text), *_WIDE_SYMBOL.findall(text)}


def template_fault(template: str) -> str | None:
    """The line and the cause if a template is not valid Jinja for transformers; None if it is."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[]], chat_template=template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:  # noqa: BLE001  # a template may refuse a conversation without messages
        return None
    return None


def render(
    name: str,
    template: str,
    messages: Sequence[Message],
    open_answer: bool,
    symbols: Mapping[str, Any],
    controls: Controls,
) -> Rendered:
    """Applies a template. `symbols`: eos_token and the like; `name`: the tokenizer, for errors;
    `controls`: those that text of the messages must not become.

    Raises DataError if the template is not valid Jinja or refuses the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    marked = _GENERATION_MARK.search(template) is not None

    def apply(messages: Sequence[Any], tools: Sequence[Any]) -> tuple[str, list[Span] | None]:
        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=template,
                add_generation_prompt=open_answer,
                return_assistant_tokens_mask=marked,
                **({**symbols, "tools": list(tools)} if tools else symbols),
            )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(f"{name}: the chat template failed: {error}") from error
        return texts[0], [(start, end) for start, end in spans[0]] if marked else None

    traced = trace(apply, messages, symbols.get("tools") or (), template, controls)
    return Rendered(traced.text, traced.answers, traced.quoted)


def check_template(tokenizer: ChatTokenizer, prompt: Sequence[Message] | None = None) -> None:
    """Raises DataError if the tokenizer has no template, or one that is not valid Jinja, writes a
    symbol that the tokenizer lacks or reads no variable with the name of an option.

    With the messages of a `prompt`: also if nothing opens the answer to it; symbols that the
    template writes elsewhere are no fault then.
    """
    if tokenizer.chat_template is None:
        tokenizer.render([{"role": USER, "content": ""}])  # raises, with advice
    template = tokenizer.chat_template or ""
    fault = template_fault(template)
    if fault is not None:
        raise DataError(f"{tokenizer.name}: its chat template is not valid Jinja: {fault}")
    faults = _option_faults(tokenizer, template)
    if faults:
        raise DataError("\n".join(faults))
    written = template
    if prompt is not None:
        try:
            written = tokenizer.render(prompt, open_answer=True).text
            closed = tokenizer.render(prompt).text
        except DataError:
            return  # `encode_prompts` names all prompts that the template refuses
        if written == closed:
            raise DataError(
                f"{tokenizer.name}: its chat template does not open the assistant's turn "
                "(add_generation_prompt changes nothing), so the model would not know that it is "
                "to answer; add that to the template"
            )
    missing = [
        symbol
        for symbol in written_symbols(template)
        if symbol in written and tokenizer.symbol_id(symbol) is None
    ]
    if missing:
        raise DataError(
            f"{tokenizer.name}: its chat template writes {', '.join(missing)}, which the tokenizer "
            "does not have as one token; train it with --control-symbols or change the template"
        )


def _option_faults(tokenizer: ChatTokenizer, template: str) -> list[str]:
    """One line for each option that the template never reads."""
    from jinja2 import Environment, meta

    # The environment of transformers; its {% generation %} marks read nothing.
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read = meta.find_undeclared_variables(environment.parse(_MARKS.sub("", template))) - _GIVEN
    legal = sorted(name for name in read if not name.endswith("_token"))
    lines = []
    for name, value in tokenizer.template_options.items():
        if name not in legal:
            hint = suggest(name, legal) if legal else "it reads none"
            wrong = f"the chat template of {tokenizer.name} never reads it; {hint}"
            lines.append(problem(f"data.chat_template_options.{name}", value, wrong))
    return lines


def message_fault(messages: object) -> str | None:
    """Why a value is not a conversation, or None. Parquet has None for absent keys."""
    if not isinstance(messages, list):
        return f"{json_type(messages)}; an array of messages is wanted"
    if not messages:
        return "holds no message"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {json_type(message)}; an object is wanted"
        for key in ("role", "content"):
            if key not in message:
                return f"{key!r} of message {number} is missing; a string is wanted"
            fault = text_fault(message[key])
            if fault is not None:
                return f"{key!r} of message {number} {fault}"
    return None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that it lacks, for which Parquet has None."""
    return {key: value for key, value in message.items() if value is not None}


def encode_conversation(
    messages: Sequence[Message], tokenizer: ChatTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [length] int32, and a mask [length] bool: True on what the assistant writes.

    If the chat template has {% generation %} marks, they say what that is. If not, the conversation
    is rendered up to each answer, without and with it: the answer is the difference, up to its last
    end-of-sequence token. That needs a template whose output for the first messages does not change
    when more messages follow.

    Raises DataError if it does change, or if the template refuses the messages.
    """
    rendered = tokenizer.render(messages)
    encoded = tokenizer.encode_rendered(rendered.text, rendered.quoted)
    if rendered.answers is None:
        mask = _mask_by_prefixes(messages, tokenizer, rendered.text, encoded.ids)
    else:
        mask = _mask_by_marks(encoded, rendered.answers)
    return np.array(encoded.ids, np.int32), mask


def _mask_by_marks(encoded: Encoded, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """True on tokens that hold a character of an answer."""
    starts, ends = np.array(encoded.starts, np.int64), np.array(encoded.ends, np.int64)
    # Where a character is spelled in bytes, some of its tokens have an empty range of characters.
    ends = np.maximum(ends, starts + 1)
    mask = np.zeros(len(encoded.ids), bool)
    for start, end in answers:
        if start < end:
            mask |= (starts < end) & (ends > start)
    return mask


def _mask_by_prefixes(
    messages: Sequence[Message], tokenizer: ChatTokenizer, text: str, ids: list[int]
) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        opened = tokenizer.render(messages[:number], open_answer=True)
        answered = tokenizer.render(messages[: number + 1])
        start = _prefix_tokens(opened, text, ids, tokenizer, number)
        end = _prefix_tokens(answered, text, ids, tokenizer, number)
        # The template may write more after the end of the sequence; the model never samples that.
        last = [n for n in range(start, end) if ids[n] == tokenizer.eos_id][-1:]
        mask[start : last[0] + 1 if last else end] = True
    return mask


def _prefix_tokens(
    part: Rendered, text: str, ids: list[int], tokenizer: ChatTokenizer, number: int
) -> int:
    """The number of tokens of `part`, with which `text` and its `ids` must begin."""
    part_ids = tokenizer.encode_rendered(part.text, part.quoted).ids
    if text.startswith(part.text) and ids[: len(part_ids)] == part_ids:
        return len(part_ids)
    fault = "the tokenizer joins text from before and after that place into one token"
    if not text.startswith(part.text):
        fault = "the chat template writes earlier messages differently when others follow"
    raise DataError(
        f"message {number + 1}: cannot tell where the answer begins or ends: {fault}; mark what "
        "the assistant writes in the template with {% generation %} and {% endgeneration %}"
    )
