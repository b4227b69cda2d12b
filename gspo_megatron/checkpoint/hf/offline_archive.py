"""The archives that torch.save writes, one to a block of a tensor, around bytes that come from
elsewhere."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib

from gspo_megatron.checkpoint.hf.files_header import TensorSpec
from gspo_megatron.checkpoint.hf.offline_pickle import Call, Name, Outside, Record, dump, load

_DATA = "archive/data/0"
_VERSION = 20  # of the zip format that is needed: nothing of it
_DAY = (1 << 5) | 1  # files of an archive have the format's first day, January 1, 1980

# torch names the bytes of a tensor by its dtype
_STORAGES = {"F64": "Double", "F32": "Float", "F16": "Half", "BF16": "BFloat16"}
_DTYPES = {f"{name}Storage": dtype for dtype, name in _STORAGES.items()}


def around_tensor(spec: TensorSpec, crc32: int) -> tuple[bytes, bytes]:
    """What comes before and after the bytes of a tensor; the lengths depend on `spec` alone."""
    numel = math.prod(spec.shape)
    storage = Name("torch", f"{_STORAGES[spec.dtype]}Storage")
    reference = Outside(("storage", storage, "0", "cpu", numel))
    strides = tuple(math.prod(spec.shape[at + 1 :]) for at in range(len(spec.shape)))
    hooks = Call(Name("collections", "OrderedDict"), ())
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    tensor = Call(rebuild, (reference, 0, tuple(spec.shape), strides, False, hooks))
    return _around({"archive/data.pkl": dump(tensor)}, (spec.bytes, crc32))


def empty_archive() -> bytes:
    """What torch.save writes for an empty dict."""
    return b"".join(_around({"archive/data.pkl": dump({})}, None))


def _around(files: dict[str, bytes], data: tuple[int, int] | None) -> tuple[bytes, bytes]:
    files = files | {"archive/byteorder": b"little", "archive/version": b"3\n"}
    entries = [(name, len(each), zlib.crc32(each)) for name, each in files.items()]
    before, directory = b"", b""
    for name, size, crc32 in [*entries, *([(_DATA, *data)] if data else [])]:
        known = struct.pack("<HHHHHLLLHH", _VERSION, 0, 0, 0, _DAY, crc32, size, size, len(name), 0)
        directory += b"PK\x01\x02" + struct.pack("<H", _VERSION) + known
        directory += struct.pack("<HHHLL", 0, 0, 0, 0, len(before)) + name.encode()
        before += b"PK\x03\x04" + known + name.encode() + files.get(name, b"")
    start, count = len(before) + (data[0] if data else 0), len(entries) + (data is not None)
    end = struct.pack("<HHHHLLH", 0, 0, count, count, len(directory), start, 0)
    return before, directory + b"PK\x05\x06" + end


def find_bytes(archive: io.RawIOBase, spec: TensorSpec) -> int:
    """Where the bytes of the tensor of an archive begin, -1 where they are not those of `spec` in
    its order. Raises zipfile.BadZipFile, or whatever a damaged pickle brings about."""
    with zipfile.ZipFile(archive) as opened:  # type: ignore[arg-type]
        files = {info.filename.partition("/")[2]: info for info in opened.infolist()}
    described = files["data.pkl"]
    archive.seek(_begin(archive, described))
    tensor = load(archive.read(described.file_size))
    if not isinstance(tensor, Record) or type(tensor).__name__ != "_rebuild_tensor_v2":
        return -1
    stored, first, size, strides, *_ = tensor.arguments
    _, storage, name, _, _ = stored.reference
    expected = tuple(math.prod(spec.shape[at + 1 :]) for at in range(len(spec.shape)))
    plain = _DTYPES.get(storage.__name__) == spec.dtype and first == 0 and size == spec.shape
    in_order = (s == e or n <= 1 for s, e, n in zip(strides, expected, size, strict=True))
    data = files[f"data/{name}"]
    stored_plainly = data.compress_type == described.compress_type == zipfile.ZIP_STORED
    if not (plain and all(in_order) and stored_plainly and data.file_size >= spec.bytes):
        return -1
    return _begin(archive, data)


def _begin(archive: io.RawIOBase, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a file of the archive are: a local header has 30 bytes, the lengths of
    name and extra field in the last four."""
    archive.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", archive.read(4))
    return info.header_offset + 30 + name + extra
