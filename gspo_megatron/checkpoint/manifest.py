"""Writes and checks manifest.json, which holds the size and CRC-32 of every file of a checkpoint.

The manifest is written last. It shows which files are cut short, altered, missing or foreign.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo_megatron.errors import DataError
from gspo_megatron.files import WRONG_VALUES, fault_of_name, parse_json
from gspo_megatron.process.heartbeat import heartbeat

MANIFEST = "manifest.json"
FORMAT = "gspo-megatron checkpoint"
VERSION = 1

_BLOCK = 1 << 22  # bytes read at a time
_LINES_SHOWN = 8  # the most lines of damage in a message about one checkpoint


@dataclass(frozen=True)
class FileRecord:
    """One file in a manifest."""

    bytes: int
    crc32: str  # 8 hexadecimal digits


Files = dict[str, FileRecord]  # keys: paths inside the checkpoint, with / between folders


def record_of(path: Path) -> FileRecord:
    """Read a file and return its size and checksum."""
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
            heartbeat()
    return FileRecord(size, f"{checksum:08x}")


def files_below(folder: Path) -> list[str]:
    """List the paths of all files inside a checkpoint except its manifest, sorted."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for p in found if (name := p.relative_to(folder).as_posix()) != MANIFEST)


def dump_manifest(files: Mapping[str, FileRecord]) -> bytes:
    """Return the contents of manifest.json."""
    table = {name: asdict(record) for name, record in sorted(files.items())}
    whole = {"format": FORMAT, "version": VERSION, "files": table}
    return (json.dumps(whole, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Files:
    """Return the files that a checkpoint's manifest lists. Raises DataError; its message leaves out
    the folder's path."""
    try:
        content = parse_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{MANIFEST}: missing") from None
    except OSError as error:
        raise DataError(f"{MANIFEST}: cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise DataError(f"{MANIFEST}: damaged, it is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{MANIFEST}: not the manifest of a {FORMAT}")
    if (version := content.get("version")) != VERSION:
        text = f"has version {version!r}; this program reads version {VERSION}"
        raise DataError(f"{MANIFEST}: {text}")
    try:
        files = {
            str(name): FileRecord(int(record["bytes"]), str(record["crc32"]))
            for name, record in content["files"].items()
        }
    except WRONG_VALUES:
        raise DataError(f"{MANIFEST}: damaged, its list of files is malformed") from None
    for name in files:
        if (fault := fault_of_name(name)) is not None:
            raise DataError(f"{MANIFEST}: damaged, {name!r:.80} {fault}")
    return files


def find_damage(
    folder: Path,
    *,
    share: tuple[int, int] = (0, 1),
    contents: bool = True,
    only: Callable[[str], bool] = lambda _: True,
) -> list[str]:
    """List what is wrong with a checkpoint, one line per file. An undamaged checkpoint has no
    lines.

    share: (rank, size): check only every size-th file, so that ranks share the work; contents:
    compare the checksums of all files, and not only of the small ones at the top, which are read
    to decide how the run goes on; only: a function that says whether to check the file of a given
    name.
    """
    rank, size = share
    try:
        files = read_manifest(folder)
    except DataError as error:
        return [str(error)] if rank == 0 else []
    damage = []
    for name in sorted(filter(only, files))[rank::size]:
        wrong = _damage_of(folder / name, files[name], contents=contents or "/" not in name)
        damage += [] if wrong is None else [f"{name}: {wrong}"]
    if rank == 0:
        foreign = [name for name in files_below(folder) if name not in files and only(name)]
        damage += [f"{name}: foreign, the manifest does not list it" for name in foreign]
    return damage


def first_whole(
    checkpoints: Iterable[Path], damage_of: Callable[[Path], list[str]]
) -> tuple[Path | None, dict[Path, list[str]]]:
    """Return the first checkpoint without damage, or None, and the damage of the checkpoints before
    it."""
    damage = {}
    for checkpoint in checkpoints:
        if not (lines := damage_of(checkpoint)):
            return checkpoint, damage
        damage[checkpoint] = lines
    return None, damage


def damage_notes(damage: Mapping[Path, Sequence[str]]) -> list[str]:
    """Return the messages about damaged checkpoints that are skipped."""
    shown = []
    for checkpoint, lines in damage.items():
        name = f"checkpoint {checkpoint.name}"
        shown += [f"{name} is damaged and not used: {line}" for line in lines[:_LINES_SHOWN]]
        if len(lines) > _LINES_SHOWN:
            shown.append(f"{name}: {len(lines) - _LINES_SHOWN} more files are damaged")
    return shown


def _damage_of(path: Path, record: FileRecord, *, contents: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            manner = "cut short" if size < record.bytes else "too long"
            return f"{manner}, it has {size:,} of {record.bytes:,} bytes"
        if contents and record_of(path).crc32 != record.crc32:
            return "altered, its checksum differs from the manifest's"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None
