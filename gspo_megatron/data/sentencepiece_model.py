"""Unigram models of sentencepiece whose sums of scores are exact.

A unigram tokenizer takes the path of pieces with the greatest sum of scores. In a run of one
character ("-----" of "--" and "---") many paths have the same, and rounding decides between them:
sentencepiece adds in float32, transformers in float64, and a text gets other ids. Scores that are
whole multiples of 1/64 add up without rounding in both, and equal paths are told apart by order.

The file is a protocol buffer; only its list of pieces is written anew.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator

STEP = 64  # scores are multiples of 1 / STEP: float32 is exact up to a sum of 2**24 / STEP
# sentencepiece's own bonus for user symbols is no such multiple, and too small where a piece holds
# the symbol's beginning. This one beats every other path.
SYMBOL_SCORE = 64.0
_PIECES, _PIECE, _SCORE, _TYPE = 1, 1, 2, 3  # field numbers
_NORMAL = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def with_exact_scores(model: bytes, user_symbols: Collection[str]) -> bytes:
    """The model with rounded scores, in which `user_symbols` are pieces that always win."""
    parts = []
    for number, start, value_start, end in _fields(model):
        if number == _PIECES:
            piece = _with_exact_score(model[value_start:end], user_symbols)
            parts.append(_tag(_PIECES, _BYTES) + _varint(len(piece)) + piece)
        else:
            parts.append(model[start:end])
    return b"".join(parts)


def _with_exact_score(piece: bytes, user_symbols: Collection[str]) -> bytes:
    text, score, kind = "", 0.0, _NORMAL
    for number, _, value_start, end in _fields(piece):
        value = piece[value_start:end]
        if number == _PIECE:
            text = value.decode()
        elif number == _SCORE:
            (score,) = struct.unpack("<f", value)
        elif number == _TYPE:
            kind = _read_varint(value, 0)[0]
    if text in user_symbols:
        score, kind = SYMBOL_SCORE, _NORMAL
    spelled = text.encode()
    return (
        _tag(_PIECE, _BYTES)
        + (_varint(len(spelled)) + spelled)
        + (_tag(_SCORE, _FIXED32) + struct.pack("<f", round(score * STEP) / STEP))
        + (_tag(_TYPE, _VARINT) + _varint(kind))
    )


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Field number, where the field starts, where its value starts and where it ends."""
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        wire_type = key & 7
        value_start = at
        if wire_type == _VARINT:
            _, at = _read_varint(message, at)
        elif wire_type == _BYTES:
            length, value_start = _read_varint(message, at)
            at = value_start + length
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[wire_type]
        yield key >> 3, start, value_start, at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)
