"""Reads and writes YAML with the scalar types of YAML 1.2 and without duplicate keys, by PyYAML.

PyYAML itself reads YAML 1.1: `off` is false, `1e-6` is a string, `12:30` is a number, and the
second of two equal keys wins. ruamel.yaml (0.19.1) reads YAML 1.2. But it turns `2026-01-01` into a
date, stops at the first duplicate key, and writes the text "off" without quotes, which a reader of
YAML 1.1 takes for false. With ruamel.yaml this file would not be shorter.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml
from yaml import MarkedYAMLError

from gspo_megatron.errors import ConfigError

_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}


class _Loader(yaml.SafeLoader):
    # PyYAML also has it as a class attribute.
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # ty: ignore[incompatible-attribute-override]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[yaml.Mark, str, yaml.Mark]] = []

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Here, and not when the mapping is constructed: a merge key of another mapping may have
        # written merged keys into this one by then.
        node = super().compose_mapping_node(anchor)
        first_seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            first = first_seen.setdefault(key_node.value, key_node.start_mark)
            if first is not key_node.start_mark:
                self.duplicates.append((key_node.start_mark, key_node.value, first))
        return node

    def compose_document(self) -> yaml.Node:
        node = super().compose_document()
        _refuse_large_aliases(node)
        return node


MOST_VALUES = 100_000  # the most values of a document after its aliases are expanded


def _refuse_large_aliases(root: yaml.Node) -> None:
    """Raise MarkedYAMLError if aliases make a document far larger than its text, or if an alias is
    inside its own value. The check is needed because a resolved configuration has all aliases
    expanded."""
    sizes: dict[int, int] = {}  # the number of values in each finished node, aliases expanded
    own = 0  # the number of values in the text, aliases not expanded
    under_way: set[int] = set()

    def size_of(node: yaml.Node) -> int:
        nonlocal own
        if id(node) in under_way:
            raise MarkedYAMLError(None, None, "an alias inside of its own value", node.start_mark)
        if id(node) not in sizes:
            under_way.add(id(node))
            inner, size = node.value, 1
            if isinstance(node, yaml.ScalarNode):
                inner, size = (), 1 + len(node.value) // 64  # a long text counts as several values
            elif isinstance(node, yaml.MappingNode):
                inner = [part for pair in node.value for part in pair]
            own += size
            sizes[id(node)] = size + sum(map(size_of, inner))
            under_way.remove(id(node))
        return sizes[id(node)]

    total = size_of(root)
    if total > max(MOST_VALUES, own):
        wrong = f"its aliases stand for {total:,} values; allowed: {MOST_VALUES:,} at most"
        raise MarkedYAMLError(None, None, wrong, root.start_mark)


class _Dumper(yaml.SafeDumper):
    # This class knows the scalar types of YAML 1.2 and those of PyYAML (YAML 1.1). So a string that
    # either version would read as another type is quoted, and every YAML reader gets a string.
    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list used twice is written twice, without `&id001`

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Without double quotes, a reader takes these characters for line ends.
        style = '"' if _BREAKS.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_BREAKS = re.compile("[\r\x85\u2028\u2029\ufeff]")
_Dumper.add_representer(str, _Dumper.represent_str)

for _name, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _whole = re.compile(rf"^(?:{_pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _whole, None)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of `text`; None for empty text.

    Raises ConfigError with `source:line:column` for syntax errors and for duplicate keys.
    """
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except MarkedYAMLError as error:
        what = ": ".join(part for part in (error.context, error.problem) if part)
        place = _place(source, error.problem_mark)
        raise ConfigError([f"{place}: not valid YAML: {what}"]) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # Errors without a position: a character that YAML does not allow, and errors that PyYAML
        # does not wrap, such as those for `!!int abc`, a number of 5,000 digits or a thousand
        # brackets.
        what = f"a value that cannot be read: {' '.join(str(error).split())}"
        raise ConfigError([f"{source}: not valid YAML: {what}"]) from None
    twice = [
        f"{_place(source, mark)}: {key} appears twice, first on line {first.line + 1}"
        for mark, key, first in loader.duplicates
    ]
    if twice:
        raise ConfigError(twice)
    return value


def has_comment(text: str) -> bool:
    """Whether a text that `parse_yaml` reads has a comment."""
    end = 0
    for token in yaml.scan(text, Loader=_Loader):
        if "#" in text[end : token.start_mark.index]:
            return True
        end = token.end_mark.index
    return False


def dump_yaml(value: Any, *, flow: bool | None = False) -> str:
    """Return text that `parse_yaml` turns back into `value`; keys keep their order. With None as
    `flow`, an innermost list or mapping is written in brackets."""
    style: Any = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, **style)


def _place(source: str, mark: yaml.Mark | None) -> str:
    return source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"
