"""The first program in a sandbox: sets limits, then runs a solution, calls it, or tests it.

It runs in a bare Python, with the standard library only and nothing of this package.
`process.sandbox` sends this file into the sandbox as text.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

SOLUTION, REQUEST = "/solution.py", "/request.json"  # in the sandbox
READY = b"ready\n"
LOST = "RuntimeError: the solution has ended"

# What LeetCode imports before it runs a solution.
_PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
"""


def encode(value: Any, other: Callable[[Any], int] | None = None) -> Any:
    """Convert a plain value to JSON that keeps its type. An instance of a subclass becomes an
    instance of the base class. A value of NumPy becomes what its `tolist` returns. Any other value
    becomes the number that `other` returns for it. Raises TypeError if there is no `other`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": int.__format__(value, "x")}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in pairs]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, other) for item in kind.__iter__(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is not type(value):  # a longdouble's tolist returns a longdouble
            return encode(plain, other)
    if other is None:
        raise TypeError(f"a {type(value).__name__} is no plain value")
    return {"object": other(value)}


def decode(encoded: Any, other: Callable[[int], Any] | None = None) -> Any:
    """Invert `encode`. Raises ValueError, KeyError or TypeError for JSON that `encode` does not
    write."""
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    if name == "object" and other is not None:
        return other(content)
    if name == "dict":
        return {decode(key, other): decode(item, other) for key, item in content}
    if name in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, name)(decode(item, other) for item in content)
    return _PLAIN[name](content)


_PLAIN = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda pair: complex(*map(float.fromhex, pair)),
    "bytes": bytes.fromhex,
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    _limit(settings)
    sys.argv = [SOLUTION]
    if hasattr(sys, "set_int_max_str_digits"):  # since 3.10.7
        sys.set_int_max_str_digits(0)
    status = settings["status"]
    os.write(status, READY)
    role = settings["role"]
    if role == "run":
        os.close(status)
        _load()
    elif role == "call":
        request = _request()
        function = _find(_load(_PRELUDE, "solution"), request["name"])
        value = function(*decode(request["arguments"]))
        _write(status, json.dumps(encode(value)).encode())
        _end(0)
    elif role == "serve":
        _serve(socket.socket(fileno=settings["channel"]))
    elif role == "judge":
        _judge(socket.socket(fileno=settings["channel"]), _request())
        _write(status, b"passed")


def _limit(settings: dict[str, Any]) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    if settings["drops_root"]:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, so that the program owns its /dev/stdin
    # Leave the run's keyring and join a new one. A kernel without keyrings refuses this, without
    # harm.
    join = [ctypes.c_long(number) for number in (settings["keyctl"], 1, 0, 0, 0, 0)]
    libc.syscall(*join)
    for name, limits in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)


def _request() -> Any:
    with open(REQUEST, encoding="utf-8") as file:
        return json.load(file)


def _load(prelude: str = "", name: str = "__main__") -> dict[str, Any]:
    """Run the solution and return its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(prelude, module.__dict__)
    with open(SOLUTION, encoding="utf-8") as file:
        text = file.read()
    exec(compile(text, SOLUTION, "exec"), module.__dict__)
    return module.__dict__


def _find(names: dict[str, Any], name: str) -> Any:
    return names[name] if name in names else getattr(names["Solution"](), name)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)  # threads of the solution may still run


# Tests with asserts run in one sandbox, and the solution runs in another. The solution gets names
# and arguments, and returns plain values. It sees no test, and its code does not run in the sandbox
# of the tests.


def _serve(channel: socket.socket) -> None:
    """Answer the judge's requests for names, attributes and calls of the solution."""
    names = _load(name="solution")
    objects: list[Any] = []  # values that are not plain; the judge gets their indices

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    stream = channel.makefile("rw", encoding="utf-8")
    for line in stream:
        request = json.loads(line)
        try:
            if "name" in request:
                value = names[request["name"]]
            elif "set" in request:
                attribute = decode(request["value"], objects.__getitem__)
                value = setattr(objects[request["object"]], request["set"], attribute)
            elif "attribute" in request:
                value = getattr(objects[request["object"]], request["attribute"])
            else:
                arguments, keywords = decode(request["arguments"], objects.__getitem__)
                value = objects[request["object"]](*arguments, **keywords)
            answer = {"value": encode(value, number_of)}
        except Exception as error:  # noqa: BLE001 (the solution may raise anything)
            answer = {"error": type(error).__name__, "text": str(error)}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    _end(0)


class _Names(dict):
    """The names that the tests use. The names `candidates` come from the solution. Without
    candidates, all names that are not defined elsewhere come from the solution."""

    def __init__(self, ask: Any, candidates: list[str]) -> None:
        self._ask, self._candidates = ask, candidates

    def __missing__(self, name: str) -> Any:
        if name not in self._candidates:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            if self._candidates:
                raise KeyError(name)
        return self._ask({"name": name})


def _judge(channel: socket.socket, request: dict[str, Any]) -> None:
    stream = channel.makefile("rw", encoding="utf-8")

    class Remote:
        """An object of the solution. It is equal only to itself, and the solution cannot define
        another equality."""

        def __init__(self, number: int) -> None:
            self._number = number

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            call = encode((arguments, keywords), lambda value: value._number)
            return ask({"object": self._number, "arguments": call})

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                object.__setattr__(self, name, value)
            else:
                attribute = encode(value, lambda other: other._number)
                ask({"object": self._number, "set": name, "value": attribute})

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return ask({"object": self._number, "attribute": name})

    def ask(question: dict[str, Any]) -> Any:
        try:
            stream.write(json.dumps(question) + "\n")
            stream.flush()
            line = stream.readline()
        except OSError:
            line = ""
        if not line:
            raise RuntimeError(LOST.partition(": ")[2])
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            # These errors of a solution would end loops of a test, or look like errors of the test.
            reserved = (AssertionError, StopIteration, StopAsyncIteration)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise (RuntimeError if issubclass(kind, reserved) else kind)(str(answer.get("text")))
        return decode(answer["value"], Remote)

    names = _Names(ask, request["candidates"])
    for text in request["setup"]:
        exec(compile(text, "<setup>", "exec"), names)
    for name in request["candidates"]:  # use the solution's name, even if the setup defines it
        names.pop(name, None)
    for text in request["tests"]:
        exec(compile(text, "<test>", "exec"), names)


if __name__ == "__main__":
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (the solution may raise anything)
        traceback.print_exception(None, error, error.__traceback__, limit=-20)
        sys.stderr.flush()
        _end(1)
