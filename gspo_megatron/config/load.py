"""From a YAML file and dotted overrides to a Config, with all that is wrong in one error."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gspo_megatron.config.megatron_fields import megatron_problems
from gspo_megatron.config.parallel import expand_layout
from gspo_megatron.config.problems import did_you_mean, problem, suggest
from gspo_megatron.config.schema import Config
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.config.yaml_text import YamlError, dump_yaml, parse_yaml
from gspo_megatron.errors import ConfigError

C = TypeVar("C", Config, StageConfig)  # what a file is read as

_MEGATRON_KEYS = (("model", "megatron"), ("optimizer", "megatron"), ("parallel", "ddp"))


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[C] = Config) -> C:
    """Read `path`, apply `section.key=value` overrides in order, validate as `schema`.

    `logging.dir` left open becomes runs/<name of the file>. Raises ConfigError with every problem
    of file, overrides and schema; what several keys must satisfy together is `check_config`'s.
    """
    path = Path(path)
    values, problems = read_mapping(path)
    if values is None:
        raise ConfigError(problems + apply_overrides({}, overrides)[1])
    return parse_config(values, overrides, path.stem, schema)


def parse_config(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    name: str = "config",
    schema: type[C] = Config,
) -> C:
    """The same for values that are already in memory; `name` becomes runs/<name>.

    Raises ConfigError.
    """
    raw, problems = apply_overrides(values, overrides)
    problems += _fill(raw, schema)
    config: C | None = None
    try:
        config = schema.model_validate(raw)
    except ValidationError as error:
        problems += [_describe(item, schema) for item in error.errors(include_url=False)]
    for section, key in _MEGATRON_KEYS:
        fields = raw[section].get(key) if isinstance(raw[section], dict) else None
        if isinstance(fields, dict):
            problems += megatron_problems(f"{section}.{key}", fields)
    if problems:
        raise ConfigError(problems)
    assert config is not None, "neither a problem nor a configuration"
    if config.logging.dir is None:
        logging = config.logging.model_copy(update={"dir": f"runs/{name}"})
        config = config.model_copy(update={"logging": logging})
    return config


def to_yaml(config: Config | StageConfig) -> str:
    """Every key of a configuration as YAML that `load_config` reads back to an equal one."""
    return dump_yaml(config.model_dump())


def apply_overrides(
    values: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """A copy of `values` with the overrides applied in order, and what is wrong with them.

    An override is split at its first "=", its value is YAML: `training.warm_start.steps=10`,
    `parallel.layout=tp=2,pp=2`, `rollout.stop=["a", "b"]`; nothing after "=" is null.
    """
    result = copy.deepcopy(dict(values))
    problems: list[str] = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            problems.append(f"override {override!r}: not of the form section.key=value")
            continue
        try:
            value = parse_yaml(text, f"override {override!r}")
        except YamlError as error:
            problems += error.problems
            continue
        wrong = _set(result, parts, value)
        if wrong is not None:
            problems.append(f"override {override!r}: {wrong}")
    return result, problems


def _set(values: dict[str, Any], parts: Sequence[str], value: Any) -> str | None:
    node = values
    for depth, part in enumerate(parts[:-1], start=1):
        child = node.get(part)
        if child is None:  # absent, or a section whose keys are all commented out
            child = node[part] = {}
        if not isinstance(child, dict):
            return f"{'.'.join(parts[:depth])} is {child!r}, which has no keys below it"
        node = child
    node[parts[-1]] = value
    return None


def read_mapping(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The sections of a YAML file, or None and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None, [f"{path}: no such configuration file"]
    except UnicodeDecodeError as error:
        return None, [f"{path}: not a text file: {error}"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        values = parse_yaml(text, str(path))
    except YamlError as error:
        return None, error.problems
    if values is None:
        return None, [f"{path}: empty; a configuration needs at least data.tokenizer"]
    if not isinstance(values, dict):
        return None, [f"{path}: must be a mapping of sections, as in `model:`, not {values!r:.60}"]
    return values, []


def _fill(raw: dict[str, Any], schema: type[BaseModel]) -> list[str]:
    """Turn absent and empty sections into {} and expand the layout, in place."""
    for section in schema.model_fields:
        if raw.get(section) is None:
            raw[section] = {}
    if not isinstance(raw["parallel"], dict):
        return []
    filled, problems = expand_layout(raw["parallel"])
    if problems:
        # Reported here; without it the schema can still look at the rest of the section.
        filled.pop("layout")
    raw["parallel"] = filled
    return problems


def _describe(error: Any, schema: type[BaseModel]) -> str:
    """One line for one error of pydantic."""
    location: tuple[Any, ...] = error["loc"]
    key = _dotted(location)
    value = error["input"]
    kind = error["type"]
    if kind == "extra_forbidden":
        if len(location) == 1:
            return f"{key}: unknown section; {suggest(key, list(schema.model_fields))}"
        return problem(key, value, f"unknown key; {_key_hint(location, schema)}")
    if kind == "invalid_key":
        return f"{key}: a key must be text"
    if kind == "missing":
        return f"{key}: required and missing; {_description(location, schema)}"
    if kind in ("model_type", "dict_type"):
        return problem(key, value, "must be a mapping of keys, as in `key: value`")
    if kind == "literal_error":
        legal = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return problem(key, value, f"unknown value; {_choice_hint(value, legal)}")
    if kind == "string_pattern_mismatch":
        return problem(key, value, f"malformed; {_description(location, schema)}")
    return problem(key, value, re.sub(r"^\w+ should", "must", error["msg"]))


def _choice_hint(value: Any, legal: Sequence[str]) -> str:
    hint = suggest(str(value), legal)
    listing = "legal: " + ", ".join(legal)
    return hint if hint == listing else f"{hint} {listing}"


def _dotted(location: Sequence[Any]) -> str:
    text = str(location[0])
    for part in location[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text


def _section_class(location: Sequence[Any], schema: type[BaseModel]) -> type[BaseModel]:
    found = schema
    for part in location:
        annotation = found.model_fields[part].annotation
        assert isinstance(annotation, type), "the parent of a key is a section"
        assert issubclass(annotation, BaseModel), "the parent of a key is a section"
        found = annotation
    return found


def _description(location: Sequence[Any], schema: type[BaseModel]) -> str:
    field = _section_class(location[:-1], schema).model_fields[location[-1]]
    return field.description or "a section"


def _key_hint(location: Sequence[Any], schema: type[BaseModel]) -> str:
    """Where an unknown key may have been meant to go: another section has it, or a near name."""
    *section, key = location
    elsewhere = [
        f"{place}.{key}" for place, model in _sections(schema, "") if key in model.model_fields
    ]
    if elsewhere:
        return did_you_mean(elsewhere[:3])
    return suggest(str(key), list(_section_class(section, schema).model_fields))


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            place = f"{prefix}{name}"
            yield place, field.annotation
            yield from _sections(field.annotation, f"{place}.")
