"""Encodes text as plain text, so that quoted control tokens do not become control tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo_megatron.data.chat import Encoded
from gspo_megatron.data.quoting import Controls, Span, touches


def has_quoted(encoded: Encoded, text: str, quoted: Sequence[Span], controls: Controls) -> bool:
    """Whether a control token of `encoded` contains a character from the `quoted` data."""
    if not quoted:
        return False
    names, columns = controls.names, zip(encoded.ids, encoded.starts, encoded.ends, strict=True)
    # Check names first, which is fast: most tokens are no control tokens.
    places = (controls.place(n, text, (a, b)) for n, a, b in columns if n in names)
    return any(place is not None and touches(place, quoted) for place in places)


def spelled(
    encoded: Encoded, text: str, controls: Controls, letter: Callable[[str], list[int]]
) -> Encoded:
    """Replace each control token of `encoded` by the tokens of its single letters.

    `letter` returns the ids of one letter."""
    found = Encoded([], [], [])
    for number, start, end in zip(encoded.ids, encoded.starts, encoded.ends, strict=True):
        if controls.place(number, text, (start, end)) is None:
            parts = [(number, start, end)]
        else:
            parts = [(n, at, at + 1) for at in range(start, end) for n in letter(text[at])]
        for n, first, last in parts:
            found.ids.append(n)
            found.starts.append(first)
            found.ends.append(last)
    return found


def encode_pieces(
    text: str,
    quoted: Sequence[Span],
    controls: Controls,
    as_text: Callable[[str, bool], Encoded],
) -> Encoded:
    """Encode a chat template's output; the `quoted` spans are data, not template text.

    `as_text(part, is_first)` encodes a part that contains no control tokens."""
    found = Encoded([], [], [])
    for (start, end), number in controls.pieces(text, quoted):
        if number is None:
            part = as_text(text[start:end], start == 0)
        else:
            part = Encoded([number], [0], [end - start])
        found.ids.extend(part.ids)
        found.starts.extend(start + each for each in part.starts)
        found.ends.extend(start + each for each in part.ends)
    return found
