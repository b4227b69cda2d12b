"""YAML as people mean it: the scalar types of YAML 1.2 on PyYAML, and no duplicate keys.

PyYAML follows YAML 1.1, where `off` is false, `1e-6` is a string, `12:30` is a number and the
second of two equal keys wins silently. Each of these has turned a typing slip into a different run.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_SCALARS: tuple[tuple[str, str, list[str | None]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", None]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class YamlError(Exception):
    """The text is not the YAML we accept; `problems` has one line a problem, places included."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[yaml.Mark, str, yaml.Mark]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in first_seen:
                mark = first_seen[key_node.value]
                self.duplicates.append((key_node.start_mark, key_node.value, mark))
            first_seen.setdefault(key_node.value, key_node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    # Keeps PyYAML's own scalar types beside ours: what either reading would take for another type
    # is quoted, so that any YAML reader gets the strings right.
    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list used twice is written twice: `&id001` helps no reader


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first
        )


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds, None for empty text.

    Raises YamlError with `source:line:column` for syntax errors and for duplicate keys.
    """
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        what = ": ".join(part for part in (error.context, error.problem) if part)
        raise YamlError([f"{_place(source, error.problem_mark)}: not valid YAML: {what}"]) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow: no mark
        what = " ".join(str(error).split())
        raise YamlError([f"{source}: not valid YAML: {what}"]) from None
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        # What PyYAML lets through: `!!int abc`, a number of 5,000 digits, a thousand brackets.
        what = f"a value that cannot be read: {error}"
        raise YamlError([f"{source}: not valid YAML: {what}"]) from None
    if loader.duplicates:
        raise YamlError(
            [
                f"{_place(source, mark)}: {key} appears twice, first on line {first.line + 1}"
                for mark, key, first in loader.duplicates
            ]
        )
    return value


def dump_yaml(value: Any) -> str:
    """Text that `parse_yaml` turns back into `value`, keys in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _place(source: str, mark: yaml.Mark | None) -> str:
    return source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"
