"""Builds the modules of the stand-in for Transformer Engine from a table of signatures and from
implementations.

A name that is not in the table does not exist. A function without an implementation raises an error
when it is called. The arguments of every call are bound to the parameters in the table, checked by
the contract, and recorded.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from tests.cuda_rehearsal.engine.contract import contract_of
from tests.cuda_rehearsal.engine.tables import Table, Unknown, with_defaults

VERSION = "CUDA_REHEARSAL_ENGINE"  # the version of Transformer Engine whose table is used
ROOT = "transformer_engine"
ANYTHING = "(*args, **kwargs)"  # the signature of torch's own classes
reached: set[str] = set()  # names in the table that this process has called


def fill() -> None:
    """Fill the package while it is being imported."""
    from tests.cuda_rehearsal.engine.implementations import COMPILED, IMPLEMENTATIONS

    version = os.environ[VERSION]
    table = Table(version)
    package = sys.modules[ROOT]
    package.__version__ = version  # type: ignore[attr-defined]
    known = {name: text for name, text in table.names.items() if text is not None}
    for path, implementation in {**IMPLEMENTATIONS, **COMPILED}.items():
        path = f"{ROOT}.{path}"
        names = [name for name in known if name == path or name.startswith(f"{path}.")]
        if not names and path.removeprefix(f"{ROOT}.") not in COMPILED:
            continue  # this version does not have the name
        if isinstance(implementation, types.FunctionType):
            text = known.get(path, "value")  # "value": not a Python function
            own = inspect.signature(implementation)
            signature = with_defaults(text) if text.startswith("(") else own
            implementation = _call(path, signature, implementation)
        elif isinstance(implementation, type):
            for name in names:
                _wrap(name, known[name], implementation, name.removeprefix(path)[1:])
        _place(path, implementation)
    for path, text in known.items():
        owner, _, name = path.rpartition(".")
        if text == "module":
            _module(path)
        elif owner and not hasattr(_owner(owner), name):
            _place(path, _missing(path) if text.startswith("(") else object())


def _wrap(path: str, text: str, implementation: type, member: str) -> None:
    """Wrap the method `member` of the class `implementation`, which the table calls `path`."""
    if not text.startswith("(") or text == ANYTHING:
        return
    member, signature = member or "__init__", with_defaults(text)
    function = inspect.getattr_static(implementation, member, None)
    if isinstance(function, staticmethod):
        setattr(implementation, member, staticmethod(_call(path, signature, function.__func__)))
    elif isinstance(function, types.FunctionType):
        # the method may belong to a base class and be wrapped already
        function = getattr(function, "__wrapped__", function)
        setattr(implementation, member, _call(path, signature, function, is_method=True))


def _call(
    path: str,
    signature: inspect.Signature,
    function: Callable[..., Any],
    *,
    is_method: bool = False,
) -> Callable[..., Any]:
    own = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    name = path.removeprefix(f"{ROOT}.")
    check = contract_of(name, os.environ[VERSION])
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    stars = [p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL]

    @functools.wraps(function)
    def call(*given: Any, **keywords: Any) -> Any:
        reached.add(path)
        owner, arguments = (given[:1], given[1:]) if is_method else ((), given)
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        check(bound.arguments, *owner)
        values = {n: v for n, v in bound.arguments.items() if v is not Unknown}
        plain = values.pop(stars[0], ()) if stars else ()
        more = values.pop(rest[0], {}) if rest else {}
        if stars:  # the arguments before *args must be positional
            before = list(signature.parameters)[: list(signature.parameters).index(stars[0])]
            first = [values.pop(n) for n in before]
            return function(*owner, *first, *plain, **more)
        values = values if takes_all else {n: v for n, v in values.items() if n in own}
        return function(
            *owner, **values, **{n: v for n, v in more.items() if takes_all or n in own}
        )

    parameters = [*own.values()][:1] if is_method else []
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *signature.parameters.values()]
    )
    return call


def _missing(path: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the stand-in has no {path}")

    name = path.rpartition(".")[2]
    return type(name, (), {"__init__": call}) if name[:1].isupper() else call


def _module(path: str) -> types.ModuleType:
    if path not in sys.modules:
        module = sys.modules[path] = types.ModuleType(path)
        module.__path__ = []  # type: ignore[attr-defined]
        owner, _, name = path.rpartition(".")
        setattr(_module(owner), name, module)
    return sys.modules[path]


def _owner(path: str) -> Any:
    """The module or class that contains a name."""
    above, _, name = path.rpartition(".")
    if path not in sys.modules and above and name[:1].isupper():
        return getattr(_owner(above), name)
    return _module(path)


def _place(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(_owner(owner), name, value)
