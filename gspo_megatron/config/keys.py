"""Describes all keys in words, for `gspo-megatron check --keys` and for docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_megatron.config.load import STAGES
from gspo_megatron.config.section import NAME, RESUME, sections_of
from gspo_megatron.config.yaml12 import dump_yaml

_TYPES = {"boolean": "true or false", "string": "text", "object": "mapping"}
_LIMITS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


@dataclass(frozen=True)
class Key:
    """A description of one key."""

    name: str  # with its section: section.key
    type: str
    default: str
    meaning: str
    legal: str  # limits beyond the type; may be empty
    resume: str  # whether the key may change when a run is resumed

    def __str__(self) -> str:
        limits = f"; allowed: {self.legal}" if self.legal else ""
        default = self.default if self.default == "required" else f"default {self.default}"
        return f"{self.name} ({self.type}, {default}): {self.meaning}{limits}"


def list_keys(stage: str) -> Iterator[Key]:
    """Yield all keys of a stage's configuration, section by section. stage: a key of STAGES."""
    for section, schema in sections_of(STAGES[stage]).items():
        described = schema.model_json_schema()
        yield from _list_section(section, described, described.get("$defs", {}))


def _list_section(section: str, described: Mapping[str, Any], inner: Any) -> Iterator[Key]:
    """Yield the keys of a section. inner: the nested sections, by pydantic's names."""
    for name, node in described["properties"].items():
        if "$ref" in node:
            nested = inner[node["$ref"].rpartition("/")[2]]
            yield from _list_section(f"{section}.{name}", nested, inner)
            continue
        default = dump_yaml(node["default"], flow=None) if "default" in node else "required"
        yield Key(
            f"{section}.{name}",
            _type(node),
            default.removesuffix("...\n").strip(),
            node["description"],
            ", ".join(_limits_of(node)),
            RESUME[node["resume"]],
        )
        for named in node.get("patternProperties", {}).values():  # the user gives the names
            nested = inner[named["$ref"].rpartition("/")[2]]
            yield from _list_section(f"{section}.{name}.{NAME}", nested, inner)


def find_keys(word: str = "", stage: str | None = None) -> list[str]:
    """Return a line for each key that has `word` in its name or meaning.

    If `stage` is None, the line of a key that RL does not have names a stage that has the key.
    """
    labels: dict[Key, str] = {}
    for each in [stage] if stage else STAGES:
        for key in list_keys(each):
            labels.setdefault(key, "" if each == (stage or "rl") else f"[{each}] ")
    return [
        f"{label}{key}"
        for key, label in labels.items()
        if word.lower() in f"{key.name} {key.meaning}".lower()
    ]


def _type(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(map(_type, node["anyOf"]))
    if node.get("type") == "array":
        return f"list of {_type(node['items'])}s"
    name = node.get("type", "object" if "$ref" in node else "string")
    return _TYPES.get(name, name)


def _limits_of(node: dict[str, Any]) -> list[str]:
    """Return the values of a choice, or the limits of a number."""
    if "const" in node:
        return [node["const"]]
    limits = [str(value) for value in node.get("enum", [])]
    limits += [text.format(node[limit]) for limit, text in _LIMITS.items() if limit in node]
    if node.get("pattern", "").endswith(r":\w+$"):
        limits.append("package.module:name")
    for inner in (*node.get("anyOf", ()), *([node["items"]] if "items" in node else ())):
        limits += _limits_of(inner)
    return list(dict.fromkeys(limits))
