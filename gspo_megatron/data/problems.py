"""Gathers what is wrong with an input file, so that a user sees all of it at once."""

from __future__ import annotations

from gspo_megatron.errors import DataError

LISTED = 20  # a file of the wrong kind is wrong on every line; nobody reads past the first screen


class Problems:
    """A list of problems of which only the first `LISTED` are kept, and all are counted."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0

    def add(self, where: str, what: str) -> None:
        """Notes that `where` (a file, or "file:line") has the problem `what`."""
        self._count += 1
        if len(self._lines) < LISTED:
            self._lines.append(f"{where}: {what}")

    def __bool__(self) -> bool:
        return self._count > 0

    def raise_if_any(self) -> None:
        """Raises one DataError with a line for each problem and a count of those not listed."""
        if not self._count:
            return
        hidden = self._count - len(self._lines)
        raise DataError("\n".join(self._lines + ([f"… and {hidden} more"] if hidden else [])))
