"""Faults in functions of the package and of Megatron-Core. Only a run on a GPU, or on the rehearsed
device, shows them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault of a function. In the function's source, `old` is replaced by `new`."""

    function: str  # module:name, or module:class.name for a method
    old: str
    new: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """A context in which the function has the fault in every module that has imported the
        function."""
        function = self._find()
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.old!r} is not one place of {self.function}"
        before = function.__code__
        function.__code__ = _code_of(source.replace(self.old, self.new), before)
        try:
            yield
        finally:
            function.__code__ = before

    def _find(self) -> FunctionType:
        module, _, path = self.function.partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return inspect.unwrap(getattr(found, "__func__", found))


def _code_of(source: str, original: CodeType) -> CodeType:
    """The code of the function, compiled from the changed source. Its line numbers are those of the
    original function."""
    lines = "from __future__ import annotations\n" + source
    names = " ".join(f"{name} = None;" for name in original.co_freevars)
    if names:  # the function uses names of an enclosing scope
        body = textwrap.indent(source, "    ")
        lines = f"from __future__ import annotations\ndef scope():\n    {names}\n{body}"
    code = compile(lines, original.co_filename, "exec")
    return next(found for found in _codes(code) if found.co_name == original.co_name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield value
            yield from _codes(value)


def with_fault(fault: Fault, task: Callable[..., Any], **arguments: Any) -> Any:
    """Run a task with the fault, on a rank."""
    with fault.planted():
        return task(**arguments)
