"""Decides, for each name in assert tests, whether the solution or the tester defines it.

If a solution could define the names by which the tests judge it (`math`, a comparison helper), it
could pass with any result. So the solution may define only the names that the row of the prompt
file asks for. All other names come from the tests, from the row's own code, or from Python's
library.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Published tests use names from these modules without importing them.
_MODULES = (
    *("math", "cmath", "collections", "itertools", "functools", "operator", "heapq", "bisect"),
    *("typing", "datetime", "decimal", "fractions", "copy", "re", "string", "statistics", "random"),
)
_ACTIVE = ("antigravity", "this", "idlelib")  # they open a browser, print, or start a program
_ALIASES = {"np": "import numpy as np", "numpy": "import numpy", "pd": "import pandas as pd"}


class NamesError(ValueError):
    """Raised if the solution itself would decide whether it is right."""


@dataclass(frozen=True)
class Names:
    setup: tuple[str, ...]  # code that runs before the setup of the tests themselves
    asked: tuple[str, ...]  # names that the solution must define


def resolve(
    setup: Sequence[str],
    tests: Sequence[str],
    reference: str = "",
    entry: str | None = None,
) -> Names:
    """Decide where the names in the tests come from.

    reference: a right solution or other code of the row, if the row has such code.
    entry: the name that the solution must define, if the row gives it.

    Raises NamesError.
    """
    trees, of_row = _parsed([*setup, *tests]), _Reference(reference)
    if trees is None:  # The code is invalid. Running the tests will report the error.
        return Names((), () if entry is None else (entry,))
    free = _free(trees)
    if entry is not None:
        free.setdefault(entry, [])
    first_lines: dict[str, None] = {}  # ordered set of code lines
    asked, rest, helpers = [], [], []
    for name, uses in free.items():
        if name == entry or (entry is None and name in of_row.defined):
            asked.append(name)
        elif name in of_row.defined:
            # a helper of the row, even if a library function has the same name
            helpers.append(name)
        elif hasattr(builtins, name):
            continue
        elif (line := of_row.imports.get(name) or _module_import(name, uses)) is not None:
            first_lines[line] = None
        else:
            rest.append(name)
    known = [name for name in rest if name in _library()]
    others = [*helpers, *(name for name in rest if name not in known)]
    if entry is None:
        asked += others
        others = []
        # the row may ask for a function with the name of a library function, such as gcd
        if not asked:
            asked = _innermost(trees, known)
    first_lines.update((_library()[name], None) for name in known if name not in asked)
    judges = [name for name in _judges(trees[len(setup) :], asked) if name != entry]
    if wrong := [name for name in (*others, *judges) if name not in of_row.defined]:
        raise NamesError(
            f"its tests judge the solution by {', '.join(dict.fromkeys(wrong))}, which would be "
            "the solution's own; define it in the row's test_setup_code or test"
        )
    if judges or others:
        first_lines[reference] = None
    return Names(tuple(first_lines), tuple(name for name in asked if name not in judges))


def names_in(text: str) -> set[str]:
    """Return the names that the code of a row defines and imports. Returns an empty set if the text
    is not valid code."""
    of_row = _Reference(text)
    return of_row.defined | of_row.imports.keys()


class _Reference:
    """The names that a row's own code defines and imports."""

    def __init__(self, text: str) -> None:
        self.defined: set[str] = set()
        self.imports: dict[str, str] = {}
        for node in _nodes(_parsed([text]) or []):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.imports[name] = ast.unparse(node)
        for tree in _parsed([text]) or []:
            for statement in tree.body:
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    self.defined.add(statement.name)
                elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    stored = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
                    self.defined |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}


def _parsed(texts: Sequence[str]) -> list[ast.Module] | None:
    try:
        return [ast.parse(text) for text in texts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _nodes(trees: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


def _free(trees: Sequence[ast.AST]) -> dict[str, list[ast.AST | None]]:
    """Return the names that are used but not defined in these trees. Each name has the parent nodes
    of its uses."""
    bound: set[str] = set()
    used: dict[str, list[ast.AST | None]] = {}
    parents = {child: node for node in _nodes(trees) for child in ast.iter_child_nodes(node)}
    for node in _nodes(trees):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.setdefault(node.id, []).append(parents.get(node))
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            bound |= _public(node.module or "")
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(name := getattr(node, "name", None), str):
            bound.add(name)  # functions, classes, except, match
    return {name: uses for name, uses in used.items() if name not in bound}


@functools.cache
def _public(module: str) -> frozenset[str]:
    """Return the public names of a module of Python's library. Other modules are not imported, and
    neither are those that do something on import. For them the result is empty."""
    top, *parts = module.split(".")
    is_active = top in _ACTIVE or any(part.startswith("_") for part in parts)  # __main__
    if top not in sys.stdlib_module_names or is_active:
        return frozenset()
    try:
        names = vars(importlib.import_module(module))
    except ImportError:  # there is no such module, or not on this machine
        return frozenset()
    return frozenset(name for name in names if not name.startswith("_"))


@functools.cache
def _library() -> dict[str, str]:
    """Return the import statement of each public name in `_MODULES`."""
    imports: dict[str, str] = {}
    for module in _MODULES:
        listed = getattr(importlib.import_module(module), "__all__", None) or _public(module)
        for name in sorted(listed):
            imports.setdefault(name, f"from {module} import {name}")
    return imports


def _module_import(name: str, uses: Sequence[ast.AST | None]) -> str | None:
    """Return the import statement for the module `name`. Returns None if a use of the name is not
    the access to an attribute."""
    if not all(isinstance(use, ast.Attribute) for use in uses):
        return None
    if name in _ALIASES:
        return _ALIASES[name]
    return f"import {name}" if name in sys.stdlib_module_names else None


def _called(node: ast.AST, names: Sequence[str]) -> set[str]:
    """Return those of `names` that are called in the tree below a node."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)} & set(names)


def _innermost(trees: Sequence[ast.AST], names: Sequence[str]) -> list[str]:
    """Return the functions among `names` that are called, and never with the result of another
    function among `names` as an argument. If there is no such function, return all names."""
    outer: set[str] = set()
    inner: set[str] = set()
    for node in _nodes(trees):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            inner.add(node.func.id)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(_called(argument, names) - {node.func.id} for argument in arguments):
                outer.add(node.func.id)
    return [name for name in names if name in inner - outer] or list(names)


def _judges(trees: Sequence[ast.AST], asked: Sequence[str]) -> list[str]:
    """Return the functions of the solution that would decide an assert themselves.

    An example is `is_sorted` in `assert is_sorted(f(x))`, or `g` in `assert f(x) == g(x)`, if the
    solution defines both functions of the assert."""
    # Names with a capital are classes. A class is called only to make arguments.
    functions = [name for name in asked if not name[:1].isupper()]
    found: dict[str, None] = {}
    for node in _nodes(trees):
        if isinstance(node, ast.Assert):
            found.update((name, None) for name in _deciding(node.test, functions))
    return list(found)


def _deciding(node: ast.AST, functions: Sequence[str]) -> Iterator[str]:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _deciding(value, functions)
    elif isinstance(node, ast.UnaryOp):
        yield from _deciding(node.operand, functions)
    elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        yield from _deciding(node.elt, functions)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        values = [s for s in sides if not (isinstance(s, ast.Constant) and _is_truth(s.value))]
        if len(values) < len(sides):  # `f(x) == True` means the same as `f(x)`
            for value in values:
                yield from _deciding(value, functions)
            return
        first, *others = (_called(side, functions) for side in sides)
        for other in others:
            yield from sorted(other - first if first else ())
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if node.func.id in functions:
            if any(_called(argument, functions) - {node.func.id} for argument in arguments):
                yield node.func.id
        elif node.func.id in ("all", "any", "bool"):
            for argument in arguments:
                yield from _deciding(argument, functions)


def _is_truth(value: object) -> bool:
    return value is None or isinstance(value, bool)
