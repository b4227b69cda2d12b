"""The pickles of torch's files, written and read without torch.

Reading one imports nothing and runs nothing: whatever class or function it names becomes an inert
`Record` of that name, with what was given to it.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A class or function that the reader of the pickle is to find."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Call:
        return Call(self, arguments)

    def having(self, **state: Any) -> Made:
        return Made(self, state)


@dataclass(frozen=True)
class Call:
    """What the reader gets by calling it."""

    function: Name
    arguments: tuple


@dataclass(frozen=True, eq=False)
class Made:
    """An instance that the reader makes without calling __init__, and gives this state."""

    cls: Name
    state: Any


@dataclass(frozen=True)
class Outside:
    """What a pickle only refers to, as torch.save does to the bytes of tensors."""

    reference: tuple


def dump(value: Any) -> bytes:
    """A pickle of None, booleans, integers, strings, tuples, lists, dicts and the above, with the
    few opcodes that torch's reader of weights knows."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(_opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_opcodes, value)) + b"e"
        case dict():
            items = (_opcodes(key) + _opcodes(item) for key, item in value.items())
            return b"}(" + b"".join(items) + b"u"
        case Name():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return _opcodes(value.function) + _opcodes(value.arguments) + b"R"
        case Made():
            return _opcodes(value.cls) + b")\x81" + _opcodes(value.state) + b"b"
        case Outside():
            return _opcodes(value.reference) + b"Q"
    raise TypeError(type(value))


class Record:
    """An object of a pickle: of a class or by a function that `type(record)` is called like.
    `arguments` is what it was made with; its state lies in its attributes, where that has names."""

    def __new__(cls, *arguments: Any) -> Record:
        record = super().__new__(cls)
        record.arguments = arguments  # type: ignore[attr-defined]
        return record

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state


_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type] = dict(_PLAIN)

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self._classes:
            self._classes[module, name] = type(name, (Record,), {"__module__": module})
        return self._classes[module, name]

    def persistent_load(self, reference: Any) -> Outside:
        return Outside(reference)


def load(data: bytes) -> Any:
    """The contents of a pickle. Raises just about anything where it is damaged."""
    return _Unpickler(data).load()
