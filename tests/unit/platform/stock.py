"""The source code of the installed Megatron-Core. It is read from disk, because the package changes
the imported modules."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

CORE = Path(importlib.util.find_spec("megatron.core").origin).parent


def source(file: str) -> str:
    return (CORE / file).read_text(encoding="utf-8")


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


def function(file: str, name: str) -> str:
    """The source of a function or a method."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
    raise AssertionError(f"{file} has no {name}: the substitution of it does nothing")


def calls(file: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
