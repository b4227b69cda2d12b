"""The safetensors file format: headers read and checked, headers made, bytes moved.

A file is 8 bytes (the header's length, little endian), a JSON header (name -> dtype, shape, offsets
into what follows) and the tensors' bytes, one after the other. Read with plain `pread`, so that
memory use is what was asked for and no mapped file counts as ours.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # bytes, as in the reference implementation
_ALIGNMENT = 8  # of the first tensor: the header is filled up with spaces

_SHORT_RUN = 64 * 1024  # bytes: shorter pieces cost less when read with what lies between them
_BLOCK = 4 * 1024 * 1024  # bytes read at once then


class Dtype(NamedTuple):
    """Its name in torch, and the bytes of an element."""

    name: str
    bytes: int


# By the names of the format, by which they go in this package: files are converted without torch.
DTYPES = {
    "BOOL": Dtype("bool", 1),
    "U8": Dtype("uint8", 1),
    "I8": Dtype("int8", 1),
    "I16": Dtype("int16", 2),
    "I32": Dtype("int32", 4),
    "I64": Dtype("int64", 8),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "F32": Dtype("float32", 4),
    "F64": Dtype("float64", 8),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
}
DTYPE_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """What the format calls a dtype of torch. Raises KeyError for one that it lacks."""
    return DTYPE_NAMES[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch that the format calls so."""
    import torch

    return getattr(torch, DTYPES[name].name)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    dtype: str  # one of DTYPES
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor of a file; `offset` is the place of its first byte in the file."""

    file: Path
    offset: int


def read_header(file: Path, problems: list[str]) -> dict[str, TensorEntry]:
    """All tensors of one file by name; what is wrong with it goes to `problems`, a line each."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(LENGTH_BYTES)
            length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else 0
            if not 0 < length <= min(size - LENGTH_BYTES, _LONGEST_HEADER):
                problems.append(f"{file}: not a safetensors file, or cut off in its header")
                return {}
            header = json.loads(stream.read(length))
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return {}
    except ValueError:
        problems.append(f"{file}: not a safetensors file (its header is not JSON)")
        return {}
    if not isinstance(header, dict):
        problems.append(f"{file}: not a safetensors file (its header is not an object)")
        return {}
    header.pop("__metadata__", None)
    return _entries(file, header, LENGTH_BYTES + length, size, problems)


def _entries(
    file: Path, header: Mapping[str, Any], start: int, size: int, problems: list[str]
) -> dict[str, TensorEntry]:
    entries = {}
    end = start
    for name, described in header.items():
        try:
            shape = tuple(int(extent) for extent in described["shape"])
            first, last = (int(offset) for offset in described["data_offsets"])
            dtype = str(described["dtype"])
        except (KeyError, TypeError, ValueError):
            problems.append(f"{file}: {name}: its entry in the header cannot be read")
            continue
        if dtype not in DTYPES:
            problems.append(f"{file}: {name}: dtype {dtype}; known: {', '.join(DTYPES)}")
            continue
        entry = TensorEntry(dtype, shape, file, start + first)
        if min(shape, default=0) < 0 or first < 0 or last - first != entry.bytes:
            problems.append(
                f"{file}: {name}: {last - first} bytes for {dtype} {list(shape)},"
                f" which takes {entry.bytes}"
            )
            continue
        entries[name] = entry
        end = max(end, start + last)
    if end > size:
        problems.append(f"{file}: truncated: {size} bytes, its header says {end}")
    elif end < size and len(entries) == len(header):
        problems.append(f"{file}: {size} bytes, its header says {end}")
    return entries


def make_header(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, in this order, and where each one starts."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets = {}
    end = 0
    for name, spec in tensors.items():
        offsets[name] = end
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.bytes],
        }
        end += spec.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    start = LENGTH_BYTES + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + at for name, at in offsets.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; writing to them writes to the tensor."""
    import torch

    assert tensor.is_contiguous() and tensor.device.type == "cpu", "not plain memory"
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def read_into(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from that place of the file. Raises EOFError where the file ends before."""
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise EOFError(f"the file ends {len(buffer)} bytes too early")
        buffer, offset = buffer[count:], offset + count


def write_from(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` to that place of the file."""
    while buffer:
        count = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[count:], offset + count


def bounds(shape: Sequence[int], slices: Sequence[slice] | None) -> list[tuple[int, int]]:
    """First index and size of a part of a tensor, for each dimension; None is all of it."""
    wanted = [*(slices or ()), *[slice(None)] * (len(shape) - len(slices or ()))]
    result = []
    for extent, part in zip(shape, wanted, strict=True):
        start, stop, step = part.indices(extent)
        assert step == 1, "a slice with steps"
        result.append((start, max(0, stop - start)))
    return result


def run_at(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> int | None:
    """The first element of a block of a tensor that is one run of elements; None where it is
    several."""
    outer = 0
    while outer < len(size) and size[outer] == 1:
        outer += 1
    if list(size[outer + 1 :]) != list(shape[outer + 1 :]):
        return None
    place = 0
    for extent, at in zip(shape, start, strict=True):
        place = place * extent + at
    return place


def read_part(
    descriptor: int,
    offset: int,
    spec: TensorSpec,
    part: Sequence[tuple[int, int]],
    out: memoryview,
) -> None:
    """Fill `out` with the bytes of a part, as `bounds` has it, of a tensor that starts at `offset`
    of the file."""
    if not out:
        return
    shape = spec.shape
    width = math.prod(shape[1:]) * spec.item_bytes  # bytes of one index of the first dimension
    if all(size == extent for (_, size), extent in zip(part[1:], shape[1:])):
        read_into(descriptor, out, offset + (part[0][0] * width if part else 0))
        return
    first, count = part[0]
    run = len(out) // count
    if len(shape) > 2 or run >= _SHORT_RUN:
        inner = TensorSpec(spec.dtype, shape[1:])
        for index in range(count):
            place = offset + (first + index) * width
            one = out[index * run : (index + 1) * run]
            read_part(descriptor, place, inner, part[1:], one)
        return
    import numpy as np

    target = np.frombuffer(out, np.uint8).reshape(count, run)
    left = part[1][0] * spec.item_bytes
    rows_at_once = max(1, _BLOCK // width)
    block = np.empty((min(rows_at_once, count), width), np.uint8)
    for start in range(0, count, rows_at_once):
        rows = block[: min(rows_at_once, count - start)]
        read_into(descriptor, memoryview(rows).cast("B"), offset + (first + start) * width)
        target[start : start + len(rows)] = rows[:, left : left + run]
