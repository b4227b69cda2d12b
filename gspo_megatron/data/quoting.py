"""Which characters of a rendered conversation are its data, and the control tokens that are not.

A user, a tool or a response may quote the marks of a chat template ("<|im_end|>"). Such a quotation
is text: only what the template itself writes becomes a control token. To tell one from the other,
the conversation is rendered a second time with other characters in place of the data's; what comes
out as one of these is data.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gspo_megatron.errors import DataError

Span = tuple[int, int]  # [start, end) of characters
# Renders messages and tools: the text, and the spans of the answers where the template marks them.
Render = Callable[[Sequence[Any], Sequence[Any]], tuple[str, "list[Span] | None"]]
Shade = Callable[[str], str]

# The private planes of Unicode: no template, and hardly any data, has characters of these.
_PRIVATE = range(0xF0000, 0x110000)
_SHADED = re.compile("[\U000f0000-\U0010ffff]+")
_HIDDEN = "\U000f0000"
_GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# Beside spaces and control characters, which templates trim, what `tojson` changes.
_CHANGED = '"\\'


@dataclass(frozen=True)
class Traced:
    """A conversation as a chat template writes it."""

    text: str
    answers: list[Span] | None
    quoted: list[Span]  # the data in `text`, as far as it matters for control tokens


@dataclass(frozen=True)
class Controls:
    """The control tokens of a tokenizer."""

    ids: Mapping[str, int]  # by their texts
    # Those that take the spaces before or after them into their token.
    strips_before: frozenset[str] = frozenset()
    strips_after: frozenset[str] = frozenset()
    unknown: int | None = None  # the one that stands for unknown characters, too

    @cached_property
    def names(self) -> dict[int, str]:
        return {number: name for name, number in self.ids.items()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # never

    def among(self, ids: Iterable[int]) -> bool:
        """Whether `ids` have a control token, but for unknown characters."""
        return any(each != self.unknown for each in self.names.keys() & set(ids))

    def place(self, number: int, text: str, span: Span) -> Span | None:
        """Where a token spells a control token; None where it is another one. Its span of `text`
        may hold spaces around it, or what the tokenizer takes for the same spelling."""
        if (name := self.names.get(number)) is None:
            return None
        if (at := text.find(name, *span)) >= 0:
            return at, at + len(name)
        return None if number == self.unknown else span

    def quotations(self, text: str) -> list[Span]:
        """All places of `text` that spell a control token, also where they overlap."""
        spans, start = [], 0
        while match := self._pattern.search(text, start):
            spans.append(match.span())
            start = match.start() + 1
        return spans

    def of(self, traced: Traced) -> list[str]:
        """The control tokens that the template writes."""
        found = self.pieces(traced.text, traced.quoted)
        return [self.names[number] for _, number in found if number is not None]

    def pieces(self, text: str, quoted: Sequence[Span]) -> Iterator[tuple[Span, int | None]]:
        """`text` in pieces: control tokens without a character of `quoted`, with their ids, and
        what stands between them, which is to be encoded without any, with None."""
        end, hidden = 0, text
        if quoted:
            letters = list(text)
            for start, stop in quoted:
                letters[start:stop] = _HIDDEN * (stop - start)
            hidden = "".join(letters)
        for match in self._pattern.finditer(hidden):
            (start, stop), name = match.span(), match[0]
            if name in self.strips_before:
                start = end + len(text[end:start].rstrip())
            if start > end:
                yield (end, start), None
            if name in self.strips_after:
                stop = len(text) - len(text[stop:].lstrip())
            yield (start, stop), self.ids[name]
            end = stop
        if end < len(text):
            yield (end, len(text)), None


def touches(span: Span, quoted: Sequence[Span]) -> bool:
    """Whether a span has a character of `quoted`, which are in order and apart."""
    after = bisect.bisect_left(quoted, (span[1], span[1]))  # the first that begins behind it
    return after > 0 and quoted[after - 1][1] > span[0]


def trace(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template: str,
    controls: Controls,
) -> Traced:
    """The conversation as `render` writes it, and which of its characters are data.

    Most templates only copy the data, so that the text with all its characters exchanged tells
    exactly what is data. Others look into it (trim it, search it for "</think>", write it as JSON):
    for them the characters that they may look for stay, but not where data spells a control token.
    If even that changes what the template does, it reacts to such a quotation; the result is then
    what it writes where there is none, with the quotation as text.

    Raises what `render` raises for the messages as they are.
    """
    text, answers = render(messages, tools)
    words, looked_for = _looks(template)
    texts = [*_strings(messages, words), *_strings(tools, words)]
    exchange = _Exchange(set(text).union(*texts))

    def shade_all(part: str) -> str:
        return exchange.strange(part)

    def shade_quotations(part: str) -> str:
        spans = controls.quotations(part)
        return _mixed(part, exchange.strange(part), spans) if spans else part

    def shade_most(part: str) -> str:
        kept = [match.span() for match in looked_for.finditer(part)]
        shaded, spans = exchange.strange(part, most=True), controls.quotations(part)
        shaded = _mixed(shaded, part, kept) if kept else shaded
        return _mixed(shaded, exchange.strange(part), spans) if spans else shaded

    def traced_with(shade: Shade) -> Traced:
        written, spans = render(
            [_shaded(message, shade, words, is_message=True) for message in messages],
            [_shaded(tool, shade, words) for tool in tools],
        )
        quoted = [match.span() for match in _SHADED.finditer(written)]
        return Traced(exchange.plain(written), spans, quoted)

    safe: Traced | None = None
    for shade in (shade_all, shade_most):
        with contextlib.suppress(DataError):  # it refuses the strange text
            safe = traced_with(shade)
            if (safe.text, safe.answers) == (text, answers):
                return safe
    found = traced_with(shade_quotations)
    # The rest of the data is not followed any more. Where it could have become a mark (a template
    # that writes small letters), the text without such changes is the one to take.
    of_data = set("".join(texts).casefold())
    more = Counter(controls.of(found)) - Counter(controls.of(safe) if safe is not None else ())
    if any(of_data >= set(name.casefold()) for name in more):
        if safe is None:
            raise DataError(f"the chat template makes {', '.join(more)} of the text of messages")
        return safe
    return found


class _Exchange:
    """Another character for each letter of a conversation and its data. They are in the order of
    the letters, so that sorted data stays sorted.

    Most data has letters of Latin-1 only. For them codecs do what `str.translate` does, many times
    as fast: it would take most of the time of a render.
    """

    def __init__(self, letters: set[str]) -> None:
        numbers = set(map(ord, letters))
        self._is_shifted = max(numbers, default=0) < len(_PRIVATE)
        if self._is_shifted:
            self._table = {n: _PRIVATE.start + n for n in numbers}
        else:
            free = (n for n in _PRIVATE if n not in numbers)
            self._table = dict(zip(sorted(n for n in numbers if n not in _PRIVATE), free))

    def strange(self, text: str, most: bool = False) -> str:
        """The text with all letters exchanged; most: but those that templates trim or escape."""
        if self._is_shifted:
            with contextlib.suppress(UnicodeEncodeError):
                table = _MOST_SHIFTED if most else _SHIFTED
                return codecs.charmap_decode(text.encode("latin-1"), "strict", table)[0]
        return text.translate(self._few if most else self._table)

    def plain(self, text: str) -> str:
        """The text with the letters that were exchanged."""
        if self._is_shifted:
            # U+F0041 for U+0041: only one of the four bytes of a letter differs
            content = text.encode("utf-32-le", errors="surrogatepass")
            if not any(content[1::4]) and not content[2::4].translate(None, b"\x00\x0f"):
                return content[::4].decode("latin-1")
        return text.translate(self._back)

    @cached_property
    def _few(self) -> dict[int, int]:
        return {n: other for n, other in self._table.items() if not _is_changed(chr(n))}

    @cached_property
    def _back(self) -> dict[int, int]:
        return {other: n for n, other in self._table.items()}


def _mixed(text: str, other: str, spans: Sequence[Span]) -> str:
    """`text` with the characters of `other` in these spans."""
    letters = list(text)
    for start, end in spans:
        letters[start:end] = other[start:end]
    return "".join(letters)


@lru_cache(maxsize=16)
def _looks(template: str) -> tuple[frozenset[str], re.Pattern[str]]:
    """The words of a template, among which are the keys that it reads; and the texts that it names
    and may look for in data."""
    from jinja2 import Environment, nodes

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(_GENERATION_MARKS.sub("", template))
    named = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    longest_first = sorted(filter(None, named), key=len, reverse=True)
    looked_for = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return frozenset(re.findall(r"\w+", template)), looked_for


def _is_changed(letter: str) -> bool:
    return letter < " " or letter.isspace() or letter in _CHANGED


# By the numbers of the letters of Latin-1: see _Exchange.
_SHIFTED = "".join(chr(_PRIVATE.start + n) for n in range(256))
_MOST_SHIFTED = "".join(chr(n) if _is_changed(chr(n)) else _SHIFTED[n] for n in range(256))


def _is_clear(key: object, words: frozenset[str]) -> bool:
    """Whether a template may read this key by its name."""
    return not isinstance(key, str) or key in words


def _strings(value: Any, words: frozenset[str]) -> Iterator[str]:
    """The texts of JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not _is_clear(key, words):
                yield key
            yield from _strings(each, words)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each, words)


def _shaded(value: Any, shade: Shade, words: frozenset[str], is_message: bool = False) -> Any:
    """A JSON value with its texts shaded. The role of a message stays: templates write some marks
    with its name."""
    if isinstance(value, str):
        return shade(value)
    if isinstance(value, Mapping):
        shaded = {
            key if _is_clear(key, words) else shade(key): _shaded(each, shade, words)
            for key, each in value.items()
        }
        if is_message and re.fullmatch(r"\w+", str(value.get("role"))):
            shaded["role"] = value["role"]
        return shaded
    if isinstance(value, (list, tuple)):
        return [_shaded(each, shade, words) for each in value]
    return value
