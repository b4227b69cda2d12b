"""The source of Megatron-Core as installed, read from disk: what the substitutions and fixes did to
the imported modules does not matter."""

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
    """Source of a function or a method."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
    raise AssertionError(f"{file} has no {name}: the substitution of it does nothing")


def calls(file: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
