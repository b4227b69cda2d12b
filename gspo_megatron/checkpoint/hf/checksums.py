"""CRC-32 of what is put together of ranges in any order."""

from __future__ import annotations

import functools
import threading

# Polynomials over GF(2) of degree below 32, as bits with x^0 the highest: the order of CRC-32.
_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combine(first: int, second: int, length: int) -> int:
    """The checksum of two byte strings, one after the other, from theirs; `length` is the second
    one's."""
    return _times(first, _power_of_x(8 * length)) ^ second


@functools.lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(one: int, other: int) -> int:
    """The product, modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


class Extents:
    """The checksums of ranges of one whole, from any thread."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}  # by their start: length, checksum
        self._lock = threading.Lock()

    def add(self, start: int, length: int, crc32: int) -> None:
        with self._lock:
            self._ranges[start] = (length, crc32)

    def gaps(self, length: int) -> list[tuple[int, int]]:
        """Start and length of what is missing of a whole of so many bytes."""
        found, end = [], 0
        for start, (size, _) in [*sorted(self._ranges.items()), (length, (0, 0))]:
            if start > end:
                found.append((end, start - end))
            end = max(end, start + size)
        return found

    def crc32(self, length: int) -> int | None:
        """That of the whole of so many bytes; None where ranges are missing or overlap."""
        end = whole = 0
        for start, (size, crc32) in sorted(self._ranges.items()):
            if start != end:
                return None
            whole = combine(whole, crc32, size)
            end += size
        return whole if end == length else None
