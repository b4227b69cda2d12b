"""Makes a wheel with CUDA kernels for one kind of GPU only: `thin.py WHEEL FOLDER [ARCH]`.

Transformer Engine's wheel has kernels for eight kinds of GPU, 276 MB. The kernels for Hopper
(sm_90, ARCH 90) are a tenth of these bytes. CUDA finds a kernel by the header of its entry. So the
contents of all other entries can be replaced by zeros, which a wheel stores in almost no space. The
layout of the entries is not published. The tool fails if the wheel has no entry for ARCH, or no
entry for any other kind of GPU.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # begins a fat binary
HEADER_BYTES = 16  # magic, version, size of the header, size of what follows
PTX, ELF = 1, 2  # kinds of an entry
SMALLEST = 2**20  # bytes; smaller files of a wheel are not searched for kernels


def remove_other_kernels(content: bytearray, arch: int) -> tuple[int, int]:
    """Overwrite the kernels that are not for `arch` with zeros. Returns the bytes (kept,
    removed)."""
    kept = removed = 0
    place = content.find(MAGIC)
    while place != -1:
        version, header, size = struct.unpack_from("<HHQ", content, place + 4)
        entry, end = place + header, place + header + size
        if version != 1 or header != HEADER_BYTES or end > len(content):
            place = content.find(MAGIC, place + 4)
            continue
        while entry < end:
            kind, _, entry_header, length = struct.unpack_from("<HHIQ", content, entry)
            if kind not in (PTX, ELF) or entry + entry_header + length > end:
                break
            (its_arch,) = struct.unpack_from("<I", content, entry + 28)
            first = entry + entry_header
            if (kind, its_arch) == (ELF, arch):
                kept += length
            else:
                content[first : first + length] = bytes(length)
                removed += length
            entry = first + length
        place = content.find(MAGIC, end)
    return kept, removed


def thin(wheel: Path, folder: Path, arch: int) -> Path:
    """Write the smaller wheel, with the same name, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    target, kept, removed = folder / wheel.name, 0, 0
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as out:
        for item in source.infolist():
            content = bytearray(source.read(item))
            if item.file_size >= SMALLEST and item.filename.endswith(".so"):
                counts = remove_other_kernels(content, arch)
                kept, removed = kept + counts[0], removed + counts[1]
            out.writestr(item, bytes(content), zipfile.ZIP_DEFLATED, compresslevel=6)
    if not kept or not removed:
        target.unlink()
        raise SystemExit(
            f"{wheel}: {kept} bytes of kernels for sm_{arch}, {removed} bytes for others"
        )
    print(
        f"{target}: {target.stat().st_size / 1e6:.0f} MB, {removed / 1e6:.0f} MB of kernels removed"
    )
    return target


if __name__ == "__main__":
    thin(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 90)
