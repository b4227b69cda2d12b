"""Chat templates (Jinja, as in transformers), and conversations as token ids with a mask of the
assistant's tokens."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_megatron.data.quoting import Controls, Rendered, Span, syntax_tree, trace
from gspo_megatron.data.rows import json_type, text_fault
from gspo_megatron.errors import DataError, problem, suggest
from gspo_megatron.files import WRONG_VALUES, parse_json
from gspo_megatron.types import Message

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer

ASSISTANT, USER = "assistant", "user"
TEMPLATE_FILE = "chat_template.jinja"
# A turn begins with one symbol and ends with another, which is the end-of-sequence token. The
# `generation` marks enclose what the assistant writes: the assistant's text and the end-of-sequence
# token.
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
# Variables that every template gets, so they are not options. (Special tokens, which come from the
# tokenizer, are not options either.)
_NOT_OPTIONS = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
_SYMBOL = re.compile(r"<\|[^|<>\s]+\|>")
_WIDE_SYMBOL = re.compile(r"<｜[^｜<>\s]+｜>")  # DeepSeek's templates have such symbols


@dataclass(frozen=True)
class Encoded:
    """Token ids, each with its range of characters [start, end).

    If several byte tokens spell one character, either all these tokens have the range of this
    character, or only the last one has it.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]


def read_template(folder: Path) -> str | None:
    """Return a tokenizer folder's chat template, from chat_template.jinja or tokenizer_config.json.

    Returns None without a template. Raises DataError if an existing file cannot be read.
    """
    try:
        file = folder / TEMPLATE_FILE
        if file.is_file():
            return file.read_text(encoding="utf-8-sig")
        file = folder / "tokenizer_config.json"
        if file.is_file():
            template = parse_json(file.read_bytes()).get("chat_template")
            return template if isinstance(template, str) else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    return None


def written_symbols(template: str) -> list[str]:
    """Return the symbols of the form <|name|> in the template, each once."""
    return list(dict.fromkeys(_SYMBOL.findall(template)))


def written_marks(template: str | None) -> set[str]:
    """Return the symbols <|name|> in the template, also those with wide bars.

    These symbols mark turns even if they are not special tokens. Symbols of another form
    ("<think>") are text that a model writes."""
    text = template or ""
    return {*_SYMBOL.findall(text), *_WIDE_SYMBOL.findall(text)}


def template_fault(template: str) -> str | None:
    """Return the line and the cause of an error if a template is not valid Jinja for transformers,
    else None."""
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
    """Apply a template to messages.

    symbols: template variables such as eos_token.
    name: the tokenizer's name, for errors.
    controls: control tokens; text of the messages must not become one of them.

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

    def traced(given: Sequence[Message]) -> Rendered:
        return trace(apply, given, symbols.get("tools") or (), template, controls)

    with contextlib.suppress(DataError):
        return traced([*map(_with_arguments, messages)])
    return traced(messages)  # some templates, such as DeepSeek's, need the arguments as text


def check_template(tokenizer: Tokenizer, prompt: Sequence[Message] | None = None) -> None:
    """Raise DataError if the tokenizer's chat template is missing or unusable.

    A template is unusable if it is not valid Jinja, writes a symbol that the tokenizer lacks, or
    ignores one of the options. With `prompt`, the template must also open an answer to these
    messages. Then only the symbols in the rendered prompt are checked.
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
            return  # `encode_prompts` reports all prompts that the template refuses
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
            "does not have as one token; make it with these as control symbols, or change the "
            "template"
        )


def _option_faults(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return one line for each option that the template never reads."""
    read = _read_by(template) - _NOT_OPTIONS
    options = sorted(name for name in read if not name.endswith("_token"))
    lines = []
    for name, value in tokenizer.template_options.items():
        if name not in options:
            hint = suggest(name, options) if options else "it reads none"
            wrong = f"the chat template of {tokenizer.name} never reads it; {hint}"
            lines.append(problem(f"data.chat_template_options.{name}", value, wrong))
    return lines


def message_fault(messages: object) -> str | None:
    """Return why a value is not a conversation, or None. In Parquet, absent keys are None."""
    if not isinstance(messages, list):
        return f"{json_type(messages)}; an array of messages is wanted"
    if not messages:
        return "holds no message"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {json_type(message)}; an object is wanted"
        if "from" in message and "role" not in message:
            return (
                f"message {number} has ShareGPT's keys; rename 'from' to 'role' and 'value' to "
                "'content', and the roles 'human' and 'gpt' to 'user' and 'assistant'"
            )
        for key in ("role", "content"):
            value = message.get(key)
            if key == "content" and (isinstance(value, list) or message.get("tool_calls")):
                value = text_of(value)
                if value is None:
                    return f"{key!r} of message {number} is neither a string nor an array of texts"
            elif key not in message:
                return f"{key!r} of message {number} is missing; a string is wanted"
            fault = text_fault(value)
            if fault is not None:
                return f"{key!r} of message {number} {fault}"
        for key, value in message.items():  # others, such as tool_calls
            if (fault := _fault_of_texts(value)) is not None:
                return f"{key!r} of message {number} {fault}"
    return None


def text_of(content: Any) -> str | None:
    """Return the content of a message in OpenAI's format as one text. It may be null, because a
    message with tool calls needs no text, or an array of parts. Returns None if a part is not of
    the type text, such as an image."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        if all(part["type"] == "text" for part in content):
            return "".join(part["text"] for part in content)
    except (LookupError, TypeError):
        pass
    return None


def tools_of(row: Mapping[str, Any], template: str | None) -> list[Any]:
    """Return what `tools_in` returns, or no tools if the chat template does not read them."""
    tools = tools_in(row)
    return tools if template is not None and "tools" in _read_by(template) else []


def tools_in(row: Mapping[str, Any]) -> list[Any]:
    """Return the descriptions of tools in a row's field `tools`, a list of objects or such a list
    as JSON text. Other values belong to a field of another meaning. Raises DataError if a text in
    the list is not valid Unicode."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError:
            return []
    if not (tools and isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return []  # no tools, or a field of another meaning
    if fault := _fault_of_texts(tools):
        raise DataError(f"field 'tools' {fault}")
    return tools


def tools_of_prompt(fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[Any]:
    """Return the tools in the fields of a prompt of RL, see `tools_of`. If the template has tools
    among its options, mostly those of the environment, only they are described."""
    if "tools" in tokenizer.template_options:
        return []
    return tools_of(fields, tokenizer.chat_template)


@functools.lru_cache(maxsize=4)
def _read_by(template: str) -> set[str]:
    """Return the names of the variables that a template reads."""
    from jinja2 import meta

    return meta.find_undeclared_variables(syntax_tree(template))


def _fault_of_texts(value: object) -> str | None:
    """Return why a text in a nested value is not valid Unicode, or None."""
    if isinstance(value, str):
        return text_fault(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_fault_of_texts, inner)), None)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text, and without keys whose value is None: Parquet
    writes None for absent keys."""
    present = {key: value for key, value in message.items() if value is not None}
    return {**present, "content": text_of(message.get("content"))}


def _with_arguments(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as JSON values. In OpenAI's format they
    are JSON text, which most templates would write as a quoted string."""
    with contextlib.suppress(*WRONG_VALUES):  # there are no calls, or they have values already
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            function = {**function, "arguments": parse_json(function["arguments"])}
            calls.append({**call, "function": function})
        if _fault_of_texts(calls) is None:
            return {**message, "tool_calls": calls}
    return message


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids [length] int32 and a mask [length] bool, True on the assistant's tokens. The
    chat template describes `tools`.

    If the chat template has {% generation %} marks, they define the mask. Otherwise the
    conversation up to each answer is rendered twice: without the answer, and with it. The
    difference, up to its last end-of-sequence token, is the answer. The template must then render
    the first messages in the same way when more messages follow.

    Raises DataError if the template renders the first messages differently, or refuses the
    messages.
    """
    render = functools.partial(tokenizer.render, tools=tools)
    rendered = render(messages)
    encoded = tokenizer.encode_rendered(rendered.text, rendered.quoted)
    if rendered.answers is None:
        mask = _mask_by_prefixes(messages, tokenizer, render, rendered.text, encoded.ids)
    else:
        mask = _mask_by_marks(encoded, rendered.answers)
    return np.array(encoded.ids, np.int32), mask


def _mask_by_marks(encoded: Encoded, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a mask that is True on tokens with at least one character of an answer."""
    starts, ends = np.array(encoded.starts, np.int64), np.array(encoded.ends, np.int64)
    # If several byte tokens spell one character, some of these tokens have an empty range of
    # characters.
    ends = np.maximum(ends, starts + 1)
    mask = np.zeros(len(encoded.ids), bool)
    for start, end in answers:
        if start < end:
            mask |= (starts < end) & (ends > start)
    return mask


def _mask_by_prefixes(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    render: Callable[..., Rendered],
    text: str,
    ids: list[int],
) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        opened = render(messages[:number], open_answer=True)
        answered = render(messages[: number + 1])
        start = _prefix_tokens(opened, text, ids, tokenizer, number)
        end = _prefix_tokens(answered, text, ids, tokenizer, number)
        # The template may write text after the token that ends a response. The model never writes
        # this text.
        last = [n for n in range(start, end) if ids[n] in tokenizer.eos_ids][-1:]
        mask[start : last[0] + 1 if last else end] = True
    return mask


def _prefix_tokens(
    part: Rendered, text: str, ids: list[int], tokenizer: Tokenizer, number: int
) -> int:
    """Return the number of tokens in `part`. Raises DataError if `ids` do not begin with these
    tokens."""
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
