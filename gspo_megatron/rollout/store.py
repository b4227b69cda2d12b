"""The store: finished groups of responses on disk, from which the ranks read their share.

Each request has a file. Its first record is the request. Then follows a record for each finished
group, in the order in which they finished. A record is on disk before its group is announced.
After a kill, complete groups are used again. Groups whose records are cut short or damaged, and
groups whose calls failed, are generated again.

A record is a header (magic, number of the group, bytes, CRC-32) and a `RolloutGroup`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gspo_megatron.errors import DataError
from gspo_megatron.files import make_folder, os_errors, sync
from gspo_megatron.rollout.types import RolloutGroup

FOLDER = "rollouts"  # in the run folder
SUFFIX = ".groups"

# The format version of the records. Groups in another version are generated again. A new column
# that readers do not need requires no new version.
_MAGIC = b"GSP2"
_HEADER = struct.Struct("<4sqQI")
_NAME = re.compile(r"[a-z]+_[0-9]+(_|$)")  # of a request, see `step_of`
_REQUEST = -1  # the number of the request's record, in place of a group's number


class RequestFile:
    """Writes the file of one request."""

    def __init__(self, path: Path, request: Mapping[str, Any]) -> None:
        """Keep the groups that an earlier process finished for the same request; `finished` has
        their numbers. A group whose calls failed is generated again, because the calls may succeed
        now. A file of another request is replaced. Raises DataError if the file cannot be
        written."""
        self.path = path
        self.finished: set[int] = set()
        request_bytes = json.dumps(request, sort_keys=True).encode()
        with os_errors(path, "cannot be written"):
            make_folder(path.parent)
            end = 0
            if path.exists():
                damaged = set()
                for number, content, record_end in _records(path):
                    is_request = number == _REQUEST
                    group = None if is_request or content is None else _group_in(content)
                    if content is None or (group is None and not is_request):
                        damaged.add(number)
                    elif end == 0 and (number, content) != (_REQUEST, request_bytes):
                        break
                    elif group is None or not _has_failed(group):
                        end = record_end
                        self.finished.add(number)
                _tell_damaged(path, damaged - self.finished)
            self.finished.discard(_REQUEST)
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(end)
            self._file.seek(end)
            if end == 0:
                self._append(_REQUEST, request_bytes)
                sync(path.parent)

    def append(self, group: RolloutGroup) -> None:
        """Write the responses to one prompt; they are on disk when this returns.

        Raises DataError if the file cannot be written.
        """
        with os_errors(self.path, "cannot be written"):
            self._append(group.number, group.save())
        self.finished.add(group.number)

    def close(self) -> None:
        # After a failed `append`, the rest of its record is written again here and fails again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, number: int, content: bytes) -> None:
        header = _HEADER.pack(_MAGIC, number, len(content), zlib.crc32(content))
        self._file.write(header + content)
        self._file.flush()
        os.fsync(self._file.fileno())


def read_groups(path: Path, numbers: Collection[int] | None = None) -> dict[int, RolloutGroup]:
    """Read the groups with these numbers; None: all complete groups.

    All other groups are skipped without reading them. If two records have the same number, the
    later one counts: a damaged group is drawn again. Raises DataError if the file cannot be read,
    or if a group in `numbers` is missing or lacks columns.
    """
    groups: dict[int, RolloutGroup] = {}
    damaged: dict[int, DataError] = {}
    with os_errors(path, "cannot be read"):
        for number, content, _ in _records(
            path, lambda n: n != _REQUEST and (numbers is None or n in numbers)
        ):
            try:
                groups |= {number: RolloutGroup.load(content)} if content else {}
                damaged.pop(number, None)
            except DataError as error:
                damaged[number] = error
                groups.pop(number, None)
    if missing := sorted(set(numbers or ()) - groups.keys()):
        faults = [f"group {number} {error}" for number, error in damaged.items()]
        wrong = faults[0] if faults else f"groups {missing} are missing"
        raise DataError(f"{path}: damaged since it was written: {wrong}")
    return groups


def _group_in(content: bytes) -> RolloutGroup | None:
    """Return the group of a record whose checksum is right, or None if the record holds none."""
    try:
        return RolloutGroup.load(content)
    except DataError:
        return None


def _has_failed(group: RolloutGroup) -> bool:
    """Return whether a group has no reward because calls failed, with reward.on_failure =
    drop_group."""
    if not any(group.failed):
        return False
    scores = group.shaped if group.model_scores is None else group.shaped + group.model_scores
    return bool(np.isnan(scores).any())


def _tell_damaged(path: Path, numbers: Collection[int]) -> None:
    """Print the numbers of damaged records. A record that a kill cut short is not reported."""
    if _REQUEST in numbers:
        wrong = "the record of its request is damaged: all its groups are drawn again"
        print(f"{path}: {wrong}", flush=True)
    elif numbers:
        named = ", ".join(map(str, sorted(numbers)))
        print(f"{path}: damaged groups, which are drawn again: {named}", flush=True)


def step_of(name: str) -> int:
    """Return the step in a request's name, KIND_STEP, KIND_STEP_NUMBER or KIND_STEP_SUITE."""
    return int(name.split("_")[1])


def forget(folder: Path, is_needed: Callable[[str], bool]) -> None:
    """Remove the files of requests that are not needed; `is_needed` gets the request's name. Files
    with other names stay."""
    for path in folder.glob(f"*{SUFFIX}"):
        name = path.name.removesuffix(SUFFIX)
        if _NAME.match(name) and not is_needed(name):
            path.unlink(missing_ok=True)


def _records(
    path: Path, is_wanted: Callable[[int], bool] = lambda _: True
) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield number, content and end of each record, up to the first incomplete record.

    The content is empty if the record is not wanted, and None if it is damaged.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while (record := _next_record(file, size, is_wanted)) is not None:
            yield record


def _next_record(
    file: BinaryIO, size: int, is_wanted: Callable[[int], bool]
) -> tuple[int, bytes | None, int] | None:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, number, length, checksum = _HEADER.unpack(header)
    end = file.tell() + length
    if magic != _MAGIC or end > size:
        return None
    if not is_wanted(number):
        file.seek(end)
        return number, b"", end
    content = file.read(length)
    return number, content if zlib.crc32(content) == checksum else None, end
