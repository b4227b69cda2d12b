"""A text stream that cannot bring the run down."""

from __future__ import annotations

import contextlib
import io
from typing import Any, TextIO


class SafeStream(io.TextIOBase):
    """Writes to another stream and falls silent when that one is closed, full or gone.

    Characters that the stream's encoding lacks are replaced. rich writes from a thread of its own,
    where an exception could not be caught by the training loop.
    """

    def __init__(self, stream: TextIO | Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                known = text.encode(self.encoding, errors="replace").decode(self.encoding)
                self._stream.write(known)
        except (OSError, ValueError, AttributeError):
            pass  # a closed pipe or terminal: what is shown is lost, the run is not
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def close(self) -> None:
        """Leave the wrapped stream open: it belongs to whoever opened it."""
