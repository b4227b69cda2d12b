"""Makes the part of a faulty configuration that can still be checked.

All mistakes are reported at once. A value that is not allowed must neither hide another mistake,
such as a missing file, nor cause a second error. So the configuration is made without this value,
and a check that reads the value is skipped. Rules, files and modules that do not need this value
are checked as usual.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from gspo_megatron.config.section import NAME, key_above, keys_of, value_below
from gspo_megatron.errors import nearest

_Place = tuple[Any, ...]  # the names that lead to a value: section, key, ...
_REQUIRED = "-"  # replaces a missing required value, and is removed afterwards
_SUITES, _PHASES = ("evaluation", "suites"), ("training", "phases")
_KEY = re.compile(r"(?:override ['\"])?([\w-]+(?:\.[\w-]+)+)")


def known_part(
    raw: Mapping[str, Any], schema: type[BaseModel], errors: Iterable[Any], lines: Sequence[str]
) -> Any:
    """Make a configuration of `schema` without the wrong values. Reading a wrong value raises
    UnknownValueError. Returns None if the remaining values do not make a configuration.

    raw: the plain values. errors: pydantic's errors. lines: problems that begin with their key.
    """
    pruned: Any = copy.deepcopy(dict(raw))
    keys = keys_of(schema)
    unknown: set[_Place] = set()
    for error in errors:
        place = tuple(error["loc"])
        if error["type"] == "extra_forbidden" and place[:2] != _PHASES:
            _remove(pruned, place)
            given = value_below(raw, place)
            for meant in _meant(place, schema, keys):
                if value_below(pruned, meant) in (None, {}, []):
                    # a section under a wrong name hides only the values that it has
                    is_section = isinstance(given, dict) and ".".join(meant) not in keys
                    names = given if is_section else ()
                    unknown.update([(*meant, str(name)) for name in names] or [meant])
        elif place[3:] == ("[key]",):
            _remove(pruned, place[:3])
        else:
            unknown.add(_place_of_key(place, keys))
    for line in lines:
        if match := _KEY.match(line):
            unknown.add(_place_of_key(tuple(match[1].split(".")), keys))
    if ("parallel", "layout") in unknown:  # the layout sets the other keys of the section
        unknown.add(("parallel",))
    for place in unknown:
        _remove(pruned, place)
    config = _validated(pruned, schema)
    if config is not None:
        # A run with wrong phases is checked as a run without phases.
        for place in unknown - {_PHASES}:
            _forget(config, place)
    return config


def _place_of_key(place: _Place, keys: Mapping[str, Any]) -> _Place:
    """Return the place of the key that a value belongs to, such as the list of a wrong item."""
    names = [*map(str, place)]
    if place[:2] == _SUITES and len(place) > 2:
        names[2] = NAME
    above = key_above(".".join(names), keys)
    if above is None or above == ".".join(_SUITES):
        return place[:3]
    return place[: above.count(".") + 1]


def _meant(place: _Place, schema: type[BaseModel], keys: Mapping[str, Any]) -> Iterator[_Place]:
    """Yield the keys or sections that the user may have meant by an unknown name."""
    *above, name = map(str, place)
    if not above:
        yield from ((section,) for section in nearest(name, schema.model_fields))
        return
    if place[:2] == _SUITES and len(above) > 2:
        above[2] = NAME
    section = ".".join(above) + "."
    inner = {key.removeprefix(section).split(".")[0] for key in keys if key.startswith(section)}
    yield from ((*place[:-1], each) for each in nearest(name, inner))
    yield from (tuple(key.split(".")) for key in keys if key.endswith(f".{name}"))


def _remove(raw: Any, place: _Place) -> None:
    above = value_below(raw, place[:-1])
    if isinstance(above, dict):
        above.pop(place[-1], None)
        if place[:-1] == _SUITES:  # keep the suite's name
            above[place[-1]] = {}


def _validated(raw: dict[str, Any], schema: type[BaseModel]) -> Any:
    """Return the configuration, with `_REQUIRED` for missing required values. Returns None if the
    other values do not make a configuration."""
    for _ in range(4):  # each try fills one level: section, its keys, suite, its keys
        try:
            return schema.model_validate(raw)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                *above, name = item["loc"]
                parent = value_below(raw, tuple(above))
                if item["type"] != "missing" or not isinstance(parent, dict):
                    return None
                parent[name] = _REQUIRED if above else {}
    return None


def _forget(config: Any, place: _Place) -> None:
    """Remove a value, or all values of a suite, so that reading them raises."""
    node, above = config, place[:-1]
    for part in place if place[:2] == _SUITES and len(place) == 3 else above:
        values = node if isinstance(node, dict) else vars(node)
        if part not in values:
            return
        node = values[part]
    if isinstance(node, dict) or node is None:
        return
    if above == _SUITES:
        vars(node).clear()
    else:
        vars(node).pop(place[-1], None)
