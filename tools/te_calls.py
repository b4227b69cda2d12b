"""The calls that a package makes into Transformer Engine, read from its source, and what is wrong
with them. Neither package is imported: without a GPU Transformer Engine cannot be.

Followed are imports, names that stand for something of Transformer Engine, classes derived from its
classes (`super().forward(...)`), and dictionaries that a function fills with constant keys for
`**`. Branches for other versions of Transformer Engine, and those of an import that fails, are
left out. Not seen are calls by other ways: of instances, of what another function returns.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

ENGINE = "transformer_engine"
WRAPPERS = "megatron.core.extensions.transformer_engine"
# What is asked about a dotted name: "(parameters)" of a function, a class, or a method, without
# self; "module" or "value" of what is none of them; None: there is no such name.
Look = Callable[[str], str | None]
MODULE, VALUE = "module", "value"


class MissingError(Exception):
    """An import of what is not there."""


@dataclass(frozen=True)
class Engine:
    """A name for something of Transformer Engine, or for one of several."""

    paths: tuple[str, ...]


@dataclass
class Local:
    """A class of the package; `base` is the name in Transformer Engine that it is derived from."""

    base: str
    methods: set[str]


@dataclass
class Keys:
    """A dictionary, for `**`: the keys that it may have. Not `complete`: and others."""

    names: set[str] = field(default_factory=set)
    complete: bool = True


@dataclass(frozen=True)
class Known:
    """A value that does not depend on the run: True, False, None, or a version."""

    value: Any


@dataclass
class Found:
    calls: int = 0
    names: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def check_calls(root: Path, files: Sequence[Path], version: str, look: Look) -> Found:
    """Bind all calls of the files, which lie under root (the parent of the package's folder)."""
    found = Found()
    wrappers = root / (WRAPPERS.replace(".", "/") + ".py")
    exported: dict[str, Any] = {}
    for path in sorted(files, key=lambda path: path != wrappers):  # the others import from it
        walker = _Walker(path.relative_to(root).as_posix(), version, look, found, exported)
        names = walker.module(ast.parse(path.read_text()))
        if path == wrappers:
            exported = {n: v for n, v in names.items() if isinstance(v, Engine | Local | Known)}
    return found


def signature_of(
    text: str, default: Callable[[ast.expr], Any] = lambda node: None
) -> inspect.Signature:
    """Of "(parameters)" in Python's notation, without annotations. `default`: of a node."""
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


class _Walker:
    def __init__(
        self, file: str, version: str, look: Look, found: Found, exported: dict[str, Any]
    ) -> None:
        self._file, self._look, self._found, self._exported = file, look, found, exported
        self._version = Version(version)
        self._own: Local | None = None  # the class whose body this is

    def module(self, tree: ast.Module) -> dict[str, Any]:
        names: dict[str, Any] = {"HAVE_TE": Known(True), "TYPE_CHECKING": Known(False)}
        self._block(tree.body, names)
        return names

    # ---- statements ----

    def _block(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        for statement in body:
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner = dict(names)
                self._guarded(node.body, inner)
                returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                keys = [inner.get(v.id) for v in returned if isinstance(v, ast.Name)]
                filled = [found for found in keys if isinstance(found, Keys)]
                names[node.name] = filled[0] if filled else None
            case ast.ClassDef():
                self._class(node, names)
            case ast.If():
                truth = self._value(node.test, names)
                self._calls(node.test, names)
                if not (isinstance(truth, Known) and not truth.value):
                    self._block(node.body, names)
                if not (isinstance(truth, Known) and truth.value):
                    self._block(node.orelse, names)
            case ast.Try():
                self._try(node, names)
            case ast.Assign(targets=[target]):
                self._calls(node.value, names)
                self._assign(target, node.value, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._calls(value, names)
                self._assign(target, value, names)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statement(child, names)
                    else:
                        self._calls(child, names)

    def _guarded(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        """A function's: where it imports what is missing, it ends."""
        try:
            self._block(body, names)
        except MissingError as error:
            self._found.problems.append(str(error))

    def _try(self, node: ast.Try, names: dict[str, Any]) -> None:
        types = [n for h in node.handlers if h.type is not None for n in ast.walk(h.type)]
        caught = {n.id for n in types if isinstance(n, ast.Name)}
        handled = caught & {"ImportError", "ModuleNotFoundError", "Exception"}
        handled |= {"anything" for h in node.handlers if h.type is None}
        try:
            self._block(node.body, names)
        except MissingError:
            if not handled:
                raise
            for handler in node.handlers:
                self._block(handler.body, names)
        else:
            self._block(node.orelse, names)
        self._block(node.finalbody, names)

    def _class(self, node: ast.ClassDef, names: dict[str, Any]) -> None:
        own = None
        for base in node.bases:
            value = self._value(base, names)
            if isinstance(value, Engine):
                own = Local(value.paths[0], set())
            elif isinstance(value, Local):
                own = Local(value.base, set(value.methods))
        names[node.name] = own
        outer, self._own = self._own, own
        self._block(node.body, dict(names))
        self._own = outer
        if own is not None:
            own.methods |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}

    def _import(self, node: ast.Import | ast.ImportFrom, names: dict[str, Any]) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == ENGINE:
                    self._need(alias.name, node)
                    whole = alias.name if alias.asname else ENGINE
                    names[alias.asname or ENGINE] = Engine((whole,))
            return
        for alias in node.names:
            name = alias.asname or alias.name
            if node.module is not None and node.module.partition(".")[0] == ENGINE:
                path = f"{node.module}.{alias.name}"
                self._need(path, node)
                names[name] = Engine((path,))
            elif node.module == WRAPPERS and alias.name in self._exported:
                names[name] = self._exported[alias.name]

    def _assign(self, target: ast.expr, expression: ast.expr, names: dict[str, Any]) -> None:
        value = self._value(expression, names)
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            keys = names.get(target.value.id)
            if isinstance(keys, Keys):
                self._add(keys, target.slice)
        elif isinstance(target, ast.Name):
            before = names.get(target.id)
            if isinstance(before, Engine) and isinstance(value, Engine):
                value = Engine((*before.paths, *value.paths))  # of another branch
            names[target.id] = value

    def _add(self, keys: Keys, key: ast.expr | None) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys.names.add(key.value)
        else:
            keys.complete = False

    # ---- values ----

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, bool):
                return Known(value)
            case ast.Name(id=name):
                return names.get(name)
            case ast.Attribute(value=owner, attr=attribute):
                found = self._value(owner, names)
                if isinstance(found, Engine):
                    return Engine(tuple(f"{path}.{attribute}" for path in found.paths))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = self._value(operand, names)
                return Known(not found.value) if isinstance(found, Known) else None
            case ast.BoolOp(op=op, values=values):
                decides = isinstance(op, ast.Or)
                truths = [self._value(value, names) for value in values]
                known = [bool(t.value) for t in truths if isinstance(t, Known)]
                if decides in known:
                    return Known(decides)
                return Known(not decides) if len(known) == len(truths) else None
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._compare(left, operator, right, names)
            case ast.Dict() | ast.Call(func=ast.Name(id="dict")) | ast.DictComp() | ast.IfExp():
                return self._keys(node, names)
            case ast.Call():
                return self._result(node, names)
        return None

    def _compare(
        self, left: ast.expr, operator: ast.cmpop, right: ast.expr, names: dict[str, Any]
    ) -> Known | None:
        match left, operator, right:
            case (
                ast.Constant(value=str(name)),
                ast.In() | ast.NotIn(),
                ast.Attribute(value=ast.Call(func=ast.Attribute(attr="signature"), args=[of])),
            ):
                found = self._value(of, names)
                if isinstance(found, Engine):
                    texts = [self._look(path) or "" for path in found.paths]
                    has = all(t[:1] == "(" and name in signature_of(t).parameters for t in texts)
                    return Known(has == isinstance(operator, ast.In))
                return None
        a, b = self._value(left, names), self._value(right, names)
        if isinstance(operator, ast.Is | ast.IsNot) and isinstance(b, Known) and b.value is None:
            if isinstance(a, Known | Engine | Local):
                is_none = isinstance(a, Known) and a.value is None
                return Known(is_none == isinstance(operator, ast.Is))
        elif isinstance(a, Known) and isinstance(b, Known) and isinstance(a.value, Version):
            results = {
                ast.Lt: a.value < b.value,
                ast.LtE: a.value <= b.value,
                ast.Gt: a.value > b.value,
                ast.GtE: a.value >= b.value,
                ast.Eq: a.value == b.value,
            }
            return Known(results[type(operator)])
        return None

    def _result(self, node: ast.Call, names: dict[str, Any]) -> Any:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if called == "is_te_min_version":
            least, equality = Version(str(text)), [k.value for k in node.keywords]
            strict = any(isinstance(e, ast.Constant) and not e.value for e in equality)
            return Known(self._version > least if strict else self._version >= least)
        if called == "get_te_version":
            return Known(self._version)
        if called in ("PkgVersion", "Version") and isinstance(text, str):
            return Known(Version(text))
        found = self._value(node.func, names)
        return Keys(set(found.names), found.complete) if isinstance(found, Keys) else None

    def _keys(self, node: ast.expr, names: dict[str, Any]) -> Keys:
        keys = Keys()
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                self._add(keys, key) if key is not None else self._join(keys, value, names)
        elif isinstance(node, ast.Call) and not node.args:
            for keyword in node.keywords:
                if keyword.arg is None:
                    self._join(keys, keyword.value, names)
                else:
                    keys.names.add(keyword.arg)
        elif isinstance(node, ast.IfExp):
            self._join(keys, node.body, names)
            self._join(keys, node.orelse, names)
        else:
            keys.complete = False
        return keys

    def _join(self, keys: Keys, node: ast.expr, names: dict[str, Any]) -> None:
        more = self._value(node, names)
        if isinstance(more, Keys):
            keys.names |= more.names
            keys.complete &= more.complete
        else:
            keys.complete = False

    # ---- calls ----

    def _calls(self, node: ast.AST, names: dict[str, Any]) -> None:
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                for path in self._paths(call.func, names):
                    self._bind(path, call, names)

    def _paths(self, function: ast.expr, names: dict[str, Any]) -> Iterator[str]:
        value = self._value(function, names)
        if isinstance(value, Engine):
            yield from value.paths
        elif isinstance(function, ast.Attribute) and self._own is not None:
            match function.value:
                case ast.Call(func=ast.Name(id="super")):
                    is_ours = function.attr in self._own.methods
                case ast.Name(id="self"):
                    # an attribute of an instance may be a function, and is in no class
                    path = f"{self._own.base}.{function.attr}"
                    is_ours = function.attr in self._own.methods or not self._look(path)
                case _:
                    return
            if not is_ours:
                yield f"{self._own.base}.{function.attr}"

    def _need(self, path: str, node: ast.AST) -> str:
        text = self._look(path)
        if text is None:
            raise MissingError(f"{self._where(node)}: there is no {path}")
        return text

    def _bind(self, path: str, call: ast.Call, names: dict[str, Any]) -> None:
        text = self._look(path)
        if text is None:
            self._found.problems.append(f"{self._where(call)}: there is no {path}")
        if text is None or text[0] != "(":
            return
        self._found.calls += 1
        self._found.names.add(path)
        keywords, complete = set[str](), True
        for keyword in call.keywords:
            keys = Keys({keyword.arg}) if keyword.arg else self._value(keyword.value, names)
            keywords |= keys.names if isinstance(keys, Keys) else set()
            complete &= isinstance(keys, Keys) and keys.complete
        plain = [a for a in call.args if not isinstance(a, ast.Starred)]
        complete &= len(plain) == len(call.args)
        signature = signature_of(text)
        bind = signature.bind if complete else signature.bind_partial
        try:
            bind(*plain, **dict.fromkeys(keywords))
        except TypeError as error:
            self._found.problems.append(f"{self._where(call)}: {path}{text}: {error}")

    def _where(self, node: ast.AST) -> str:
        return f"{self._file}:{node.lineno}"
