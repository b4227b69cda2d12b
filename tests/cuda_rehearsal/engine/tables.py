"""The recorded signatures of Transformer Engine.

The entry of a function, a class or a method is "(parameters)", without self. The entry of any other
object is "module" or "value". The entry is null if the name does not exist.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.programs import ROOT

FOLDER = ROOT / "tests/unit/platform/transformer_engine"
TABLES = {path.stem: path for path in FOLDER.glob("*.json")}
SITE = Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))


class Table:
    """The entries of all dotted names in one version."""

    def __init__(self, version: str) -> None:
        content = json.loads(TABLES[version].read_text())
        assert content["version"] == version
        self.names: dict[str, str | None] = content["names"]

    def __call__(self, path: str) -> str | None:
        assert path in self.names, f"not in the table: make it again, for {path}"
        return self.names[path]


def versions() -> list[str]:
    """The versions that have a table: the version that is installed with this Megatron-Core, and
    later versions."""
    found = importlib.metadata.version("megatron-core")
    pins = (ROOT / "requirements" / f"gpu-megatron-{found}.txt").read_text().splitlines()
    (pin,) = (line.partition("==")[2] for line in pins if line.startswith("transformer-engine=="))
    assert pin in TABLES
    return sorted((v for v in TABLES if Version(v) >= Version(pin)), key=Version)


def signature_of(
    text: str, default: Callable[[ast.expr], Any] = lambda node: None
) -> inspect.Signature:
    """Parse "(parameters)" in Python's notation, without annotations, into a signature. `default`:
    a function that makes a default from a syntax node."""
    (function,) = ast.parse(f"def f{text}: pass").body
    assert isinstance(function, ast.FunctionDef)
    given, kinds = function.args, inspect.Parameter
    plain = [(a, kinds.POSITIONAL_ONLY) for a in given.posonlyargs]
    plain += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in given.args]
    defaults = [kinds.empty] * (len(plain) - len(given.defaults))
    defaults += [default(node) for node in given.defaults]
    found = [kinds(a.arg, kind, default=d) for (a, kind), d in zip(plain, defaults, strict=True)]
    if given.vararg:
        found.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for a, node in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        value = kinds.empty if node is None else default(node)
        found.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=value))
    if given.kwarg:
        found.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


class Unknown:
    """Stands for a default that is not a literal."""


def literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unknown


def with_defaults(text: str) -> inspect.Signature:
    return signature_of(text, literal)


__all__ = ["SITE", "TABLES", "Table", "Unknown", "signature_of", "versions", "with_defaults"]
