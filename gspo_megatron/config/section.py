"""The base of every configuration section: strict values, and keys with a resume class."""

from __future__ import annotations

import contextlib
import datetime
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from gspo_megatron.errors import UnknownValueError, format_value
from gspo_megatron.hub import written

Text = Annotated[str, Field(min_length=1)]
# A path. If the path was downloaded from the Hub, it is written as its name in the Hub
# (config/hub.py).
HubPath = Annotated[str, Field(min_length=1), PlainSerializer(written)]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
# The longest time limit. A socket takes at most 2**31 milliseconds, which is about 24 days.
MOST_SECONDS = 2_000_000
# A seed is below 2**31, because Megatron-Core adds rank numbers to it, and numpy accepts only seeds
# of 32 bits.
Seed = Annotated[int, Field(ge=0, lt=2**31)]
# One or several texts, always stored as a list. In files, a single text has no brackets.
_AS_LIST = BeforeValidator(lambda given: given if isinstance(given, list) else [given])
Texts = Annotated[
    list[Text], _AS_LIST, PlainSerializer(lambda texts: texts[0] if len(texts) == 1 else texts)
]
HubPaths = Annotated[
    list[Text],
    _AS_LIST,
    PlainSerializer(lambda paths: written(paths[0]) if len(paths) == 1 else [*map(written, paths)]),
]
Weights = list[Annotated[float, Field(gt=0)]]


def _date(value: Any) -> str:
    """Return a day, month or year as text.

    In YAML a year without quotes is a number. Some YAML readers turn a day without quotes into a
    date.
    """
    if isinstance(value, datetime.date):
        value = value.strftime("%Y-%m-%d")
    text = str(value) if type(value) is int else value
    if isinstance(text, str):
        for form, size in (("%Y-%m-%d", 10), ("%Y-%m", 7), ("%Y", 4)):
            with contextlib.suppress(ValueError):
                if len(text) == size and datetime.datetime.strptime(text, form):
                    return text
    raise PydanticCustomError("date", "not a date; allowed: 2025-01-31, 2025-01 or 2025")


Date = Annotated[str, BeforeValidator(_date)]
# A suite's name is a part of the names of metrics, files and keys.
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]

# The help texts of keys that several sections have.
TOKENIZER = "a sentencepiece .model file, a Hugging Face folder, or ORG/NAME[@REVISION] of the Hub"
FORMAT = "the published dataset that the rows come from; replaces prompt_field and answer_field"
TEMPLATE = (
    "the prompt, in which {field} stands for a field of the row, and {{ for a brace before a "
    "name; null: prompt_field is the prompt"
)
SHARE_PROMPTS = (
    "compute a prompt once in each micro-batch, not once for each of its responses; null: if the "
    "model and the layout allow it"
)
SYSTEM_PROMPT = (
    "text of a system message before conversations that do not begin with one; null: none"
)

NAME = "NAME"  # in keys: a name that the user gives

# Resume class of a key -> whether the key may change when a run is resumed, in words.
RESUME = {
    # If this key changed, the second half of the run would be a different experiment.
    "shapes": "no",
    # The key changes only where and how fast the run computes, or what is logged.
    "harmless": "yes",
    # The key is a path. The path may change; the contents of the file may not.
    "contents": "with the same contents",
    # The key is a path. The contents of the file may change, too, because the policy does not learn
    # from them.
    "shown": "yes",
    # The key is the number of steps. It may change only if the learning rate does not decay,
    # because a decay ends at the last step.
    "steps": "without decay",
    # The key names a function. The name may not change. Changed code of the function gives a
    # warning.
    "code": "no; its code may",
}


class Section(BaseModel):
    # Strict: "5" for 5 and true for 1 are mistakes, and a run must not start with a mistake.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    if not typing.TYPE_CHECKING:  # otherwise a type checker would accept any name as a key

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnknownValueError
            return super().__getattr__(name)

    def known(self, name: str) -> Any:
        """Return the value of a key, or None if the user's value is not allowed."""
        return vars(self).get(name)

    def unread(self, names: Iterable[str], why: str) -> Iterator[tuple[str, str]]:
        """Yield each key in `names` that is set although nothing reads it, with the problem."""
        for name in names:
            usual = type(self).model_fields[name].default
            if getattr(self, name) != usual:
                allowed = usual if isinstance(usual, str) else format_value(usual)
                yield name, f"{why}; allowed: {allowed}"

    def require_whole(self) -> None:
        """Raise UnknownValueError if a value is unknown, here or in a nested section."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, Section):
                    each.require_whole()


def key(resume: str, default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a key of a section. resume: a key of RESUME; default: `...` makes it required."""
    return Field(default, description=meaning, json_schema_extra={"resume": resume}, **limits)


def resume_of(info: FieldInfo) -> str:
    """The resume class of a key."""
    extra: Any = info.json_schema_extra
    return extra["resume"]


shapes = partial(key, "shapes")
harmless = partial(key, "harmless")


def sections_of(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a configuration by name."""
    found: dict[str, Any] = {name: info.annotation for name, info in schema.model_fields.items()}
    return found


def keys_of(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return every key of a configuration, as section.key, with default, description and limits.

    Keys of a nested section are section.inner.key. If the user gives the nested sections names, as
    for suites, keys are section.inner.NAME.key.
    """
    return {
        f"{name}.{key}": info
        for name, section in sections_of(schema).items()
        for key, info in _keys_of_section(section)
    }


def _keys_of_section(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        inner, is_named = info.annotation, typing.get_origin(info.annotation) is dict
        if is_named:
            yield name, info
            inner = typing.get_args(inner)[1]
            name = f"{name}.{NAME}"
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from ((f"{name}.{key}", below) for key, below in _keys_of_section(inner))
        elif not is_named:
            yield name, info


def value_below(values: Any, names: Iterable[Any]) -> Any:
    """Return the value to which the names lead in nested mappings, or None."""
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def key_above(place: str, keys: Mapping[str, FieldInfo]) -> str | None:
    """Return the key that equals `place` or contains it, or None if there is none.

    For example, model.megatron contains model.megatron.num_layers.
    """
    parts = place.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((name for name in above if name in keys), None)
