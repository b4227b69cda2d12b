"""Says which fields of a row are prompt, answer and id, also in the formats of published
datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gspo_megatron.types import Message

if TYPE_CHECKING:
    from gspo_megatron.config.schema import DataSection, SuiteSection, WindowSection


@dataclass(frozen=True)
class FieldMap:
    """The fields of a row. A name with dots, as in a.b, is field b of the object a."""

    prompt: str = "prompt"
    answer: str | None = "answer"  # None: rows have no answers
    # A row may lack "id". If the configuration names another field, every row must have this field.
    id: str | None = "id"
    # Extracts the answer from the value of its field. If there is no answer, it raises a
    # ValueError, whose text continues a message that begins with "field 'x'".
    read_answer: Callable[[Any], Any] | None = None
    format: str | None = None  # a key of FORMATS
    template: str | None = None  # makes the prompt from {field}s; then `prompt` is not used
    system: str | None = None  # the text of a system message before the prompt
    window: WindowSection | None = None  # rows with dates outside of the window are left out
    section: str = "data"  # the configuration section with these settings

    def settings(self) -> list[tuple[str, str]]:
        """Return (setting, field) for each field that is read."""
        of_prompt = f"{self.section}.{'prompt_field' if self.template is None else 'template'}"
        of_format = self.format and f"{self.section}.format = {self.format}"
        settings = [(of_prompt, name) for name in self.prompt_fields()]
        if self.answer is not None:
            settings.append((f"{self.section}.answer_field", self.answer))
        settings = [(of_format or setting, name) for setting, name in settings]
        if self.window is not None and self.window.field is not None:
            settings.append((f"{self.section}.filter.field", self.window.field))
        return settings

    def prompt_fields(self) -> list[str]:
        """Return the fields that make the prompt, each once."""
        if self.template is None:
            return [self.prompt]
        return list(dict.fromkeys(name for name in FIELD.findall(self.template) if name))

    def fill(self, texts: Mapping[str, str]) -> str:
        """Fill the texts of the fields into the template."""
        assert self.template is not None
        return FIELD.sub(lambda m: texts[m[1]] if m[1] else m[0][1:], self.template)


# Matches two things: {name}, which is a field, and "{{" before a name, which is an escaped brace.
# All other braces are text, for example in \\boxed{}.
FIELD = re.compile(r"\{\{(?=[A-Za-z_])|\{([A-Za-z_][\w.]*)\}")


def after_hashes(value: Any) -> str:
    """Return a GSM8K answer: the number after "####", without commas."""
    if not isinstance(value, str) or "####" not in value:
        raise ValueError("has no '####' before the answer")
    return value.rpartition("####")[2].replace(",", "").strip()


def last_box(value: Any) -> str:
    r"""Return a MATH answer: the content of the last \boxed{...}, \fbox{...} or \boxed 7."""
    text = value if isinstance(value, str) else ""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        raise ValueError(r"has no \boxed{...} with the answer")
    inside = text[start:].partition("box")[2].removeprefix("ed").lstrip()
    if not inside.startswith("{"):
        return inside.split("$")[0].strip()
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", inside):  # an escaped brace is text
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return inside[1 : mark.start()].strip()
    raise ValueError(r"has a \boxed{ that is not closed")


def tests_in_json(value: Any) -> Any:
    """Return APPS tests: an object with `inputs`, `outputs` and perhaps `fn_name`.

    In the row, this object is JSON text."""
    try:
        tests = json.loads(value)
    except (TypeError, ValueError, RecursionError):  # json.loads may raise all three
        tests = None
    if not (isinstance(tests, dict) and tests.get("inputs") and tests.get("outputs")):
        raise ValueError("is not JSON with tests in 'inputs' and 'outputs'; leave out such rows")
    return tests


FORMATS = {
    "gsm8k": FieldMap("question", "answer", read_answer=after_hashes, format="gsm8k"),
    "math": FieldMap("problem", "solution", read_answer=last_box, format="math"),
    "dapo": FieldMap("prompt", "reward_model.ground_truth", format="dapo"),
    "apps": FieldMap("question", "input_output", read_answer=tests_in_json, format="apps"),
}


def field_map(data: DataSection | SuiteSection, section: str = "data") -> FieldMap:
    """Return the fields that the configuration chooses. `section` is the place of the settings."""
    if data.format is None:
        chosen = FieldMap(data.prompt_field, data.answer_field, data.id_field)
    else:
        chosen = replace(FORMATS[data.format], id=data.id_field)
    window = getattr(data, "filter", None)  # only suites have a filter
    chosen = replace(chosen, template=data.template, system=data.system_prompt)
    return replace(chosen, window=window, section=section)


def with_system(messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
    """Put `system` as a system message before a conversation that has no system message."""
    has_one = bool(messages) and messages[0]["role"] in ("system", "developer")
    first = () if system is None or has_one else ({"role": "system", "content": system},)
    return (*first, *messages)
