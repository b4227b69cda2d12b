"""Files that stay open as long as somebody reads parts of them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

_MOST = 200  # kept open; more than that are opened for each read


class OpenFiles:
    """Descriptors to read files with, from any thread; closed with the object."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _close_all, self._descriptors)

    @contextlib.contextmanager
    def descriptor(self, file: Path) -> Iterator[int]:
        """To be used within the context. Raises OSError."""
        with self._lock:
            kept = self._descriptors.get(file)
            if kept is None and len(self._descriptors) < _MOST:
                kept = self._descriptors[file] = os.open(file, os.O_RDONLY)
        if kept is not None:
            yield kept
            return
        opened = os.open(file, os.O_RDONLY)
        try:
            yield opened
        finally:
            os.close(opened)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
