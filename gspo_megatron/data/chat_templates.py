"""Chat templates: Jinja as transformers has it, for both kinds of tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
# Turns between two symbols, the second of which ends a sequence. The marks say what the assistant
# writes: its text and that end.
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
_SYMBOL = re.compile(r"<\|[^|<>\s]+\|>")


@dataclass(frozen=True)
class Rendered:
    """A conversation as a chat template wrote it."""

    text: str
    # [start, end) in characters of what the assistant wrote; None where the template has no
    # {% generation %} marks.
    answers: list[tuple[int, int]] | None


def read_template(folder: Path) -> str | None:
    """The chat template of a tokenizer folder: a file of its own, or in tokenizer_config.json.

    Raises DataError where a file that is there cannot be read.
    """
    try:
        file = folder / TEMPLATE_FILE
        if file.is_file():
            return file.read_text(encoding="utf-8")
        file = folder / "tokenizer_config.json"
        if file.is_file():
            template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
            return template if isinstance(template, str) else None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    return None


def has_generation_marks(template: str) -> bool:
    """Whether the template says which part of its text the assistant writes."""
    return _GENERATION_MARK.search(template) is not None


def written_symbols(template: str) -> list[str]:
    """The symbols of the form <|name|> that the template writes, each once."""
    return list(dict.fromkeys(_SYMBOL.findall(template)))


def template_fault(template: str) -> str | None:
    """What keeps a template from being Jinja as transformers has it, after its line; None: it is.

    None as well without transformers and jinja2, which nothing but a chat template needs.
    """
    try:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
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
    messages: Sequence[Mapping[str, Any]],
    open_answer: bool,
    symbols: Mapping[str, Any],
) -> Rendered:
    """Applies a template; `symbols`: eos_token and the like, `name`: for messages.

    Raises DataError where the template is no valid Jinja or refuses the messages.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise DataError(f"{name}: a chat template needs transformers and jinja2") from error
    marked = has_generation_marks(template)
    try:
        texts, spans = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=template,
            add_generation_prompt=open_answer,
            return_assistant_tokens_mask=marked,
            **symbols,
        )
    except Exception as error:  # the template is the folder's own program: any error is its
        raise DataError(f"{name}: the chat template failed: {error}") from error
    return Rendered(texts[0], [(start, end) for start, end in spans[0]] if marked else None)
