"""Finds which characters of a rendered conversation are data, and which come from its template.

A user, a tool or a response may quote the marks of a chat template ("<|im_end|>"). Such a quotation
is text: only marks that the template itself writes become control tokens. To tell them apart, the
conversation is rendered a second time with the data's characters replaced by private-use ones.
Private-use characters in the output are data.
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
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import DataError

if TYPE_CHECKING:
    from jinja2 import nodes

Span = tuple[int, int]  # [start, end) of characters
# Renders messages and tools. Returns the text, and the spans of the answers if the template marks
# them.
Render = Callable[[Sequence[Any], Sequence[Any]], tuple[str, "list[Span] | None"]]
Replace = Callable[[str], str]

# The private-use planes of Unicode. No template and hardly any data has such characters.
_PRIVATE = range(0xF0000, 0x110000)
_PRIVATE_RUNS = re.compile("[\U000f0000-\U0010ffff]+")
_FILLER = "\U000f0000"  # stands for a quoted character; no control token contains it
_GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # they read no variable
# Characters that `tojson` changes (templates also trim spaces and control characters).
_ESCAPED = '"\\'


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered by a chat template."""

    text: str
    # What the assistant writes; None if the template has no {% generation %} marks.
    answers: list[Span] | None
    # What comes from the messages: at least the spans that matter for control tokens.
    quoted: Sequence[Span] = ()

    def part(self, start: int) -> Rendered:
        """Return the characters from `start` on, without `answers`."""
        inside = ((max(a, start) - start, b - start) for a, b in self.quoted)
        return Rendered(self.text[start:], None, [(a, b) for a, b in inside if a < b])


@dataclass(frozen=True)
class Controls:
    """The control tokens of a tokenizer."""

    ids: Mapping[str, int]  # text -> id
    # Control tokens that absorb the spaces before or after them.
    strips_before: frozenset[str] = frozenset()
    strips_after: frozenset[str] = frozenset()
    unknown: int | None = None  # the control token that also replaces unknown characters

    @cached_property
    def names(self) -> dict[int, str]:
        return {number: name for name, number in self.ids.items()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # (?!) never matches

    def among(self, ids: Iterable[int]) -> bool:
        """Whether `ids` contain a control token other than `unknown`."""
        return any(each != self.unknown for each in self.names.keys() & set(ids))

    def place(self, number: int, text: str, span: Span) -> Span | None:
        """Return where token `number` is a control token in `text`, or None if it is not a control
        token.

        `span` is the token's range. It may include spaces around the control token, or a different
        spelling that the tokenizer treats as the same."""
        if (name := self.names.get(number)) is None:
            return None
        if (at := text.find(name, *span)) >= 0:
            return at, at + len(name)
        return None if number == self.unknown else span

    def quotations(self, text: str) -> list[Span]:
        """Return all spans of `text` that spell a control token, including overlapping spans."""
        spans, start = [], 0
        while match := self._pattern.search(text, start):
            spans.append(match.span())
            start = match.start() + 1
        return spans

    def of(self, rendered: Rendered) -> list[str]:
        """Return the control tokens that the template writes."""
        pieces = self.pieces(rendered.text, rendered.quoted)
        return [self.names[number] for _, number in pieces if number is not None]

    def pieces(self, text: str, quoted: Sequence[Span]) -> Iterator[tuple[Span, int | None]]:
        """Split `text` into control tokens and other text; yield (span, id or None).

        A control token that contains a character of `quoted` is other text. Other text has the id
        None and must be encoded without control tokens."""
        end, searched = 0, text
        if quoted:  # hide these characters from the search; positions stay the same
            letters = list(text)
            for start, stop in quoted:
                letters[start:stop] = _FILLER * (stop - start)
            searched = "".join(letters)
        for match in self._pattern.finditer(searched):
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
    """Whether `span` overlaps one of the `quoted` spans, which are sorted and do not touch."""
    # the first quoted span that begins after `span`
    after = bisect.bisect_left(quoted, (span[1], span[1]))
    return after > 0 and quoted[after - 1][1] > span[0]


def trace(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template: str,
    controls: Controls,
) -> Rendered:
    """Render a conversation and find which characters of the text are data.

    Most templates only copy the data. For such a template, a rendering in which all characters of
    the data are replaced shows exactly which output is data. Other templates inspect the data (trim
    it, search it for "</think>", write it as JSON). For such a template, characters that it may
    look for are not replaced, unless they belong to a quoted control token. If the output still
    differs, the template reacts to the quotation. Then the result is the output without the
    quotation's effect, in which the quotation is text.

    Raises the error of `render` if it refuses the unchanged messages.
    """
    text, answers = render(messages, tools)
    words, constants = _words_and_constants(template)
    texts = [*_strings(messages, words), *_strings(tools, words)]
    exchange = _Exchange(set(text).union(*texts))

    def replace_quotations(part: str) -> str:
        spans = controls.quotations(part)
        return _with_spans_of(part, exchange.strange(part), spans) if spans else part

    def replace_most(part: str) -> str:
        kept = [match.span() for match in constants.finditer(part)]
        replaced, spans = exchange.strange(part, most=True), controls.quotations(part)
        replaced = _with_spans_of(replaced, part, kept) if kept else replaced
        return _with_spans_of(replaced, exchange.strange(part), spans) if spans else replaced

    def rendered_with(replace: Replace) -> Rendered:
        written, spans = render(
            [_replaced(message, replace, words, is_message=True) for message in messages],
            [_replaced(tool, replace, words) for tool in tools],
        )
        quoted = [match.span() for match in _PRIVATE_RUNS.finditer(written)]
        return Rendered(exchange.plain(written), spans, quoted)

    safe: Rendered | None = None
    for replace in (exchange.strange, replace_most):
        with contextlib.suppress(DataError):  # the template refuses the replaced text
            safe = rendered_with(replace)
            if (safe.text, safe.answers) == (text, answers):
                return safe
    result = rendered_with(replace_quotations)
    # Only the quotations were replaced here. Other data could have become a mark (for example, if
    # the template turns data into lower case). If so, use the text of the safer rendering.
    of_data = set("".join(texts).casefold())
    more = Counter(controls.of(result)) - Counter(controls.of(safe) if safe is not None else ())
    if any(of_data >= set(name.casefold()) for name in more):
        if safe is None:
            raise DataError(f"the chat template turns text of messages into {', '.join(more)}")
        return safe
    return result


class _Exchange:
    """Maps each character of a conversation to a private-use character, and back.

    The map keeps the order of characters, so that sorted data stays sorted. Most data is Latin-1.
    For Latin-1, codecs do the same as `str.translate` many times faster; `translate` would take
    most of the time of a render.
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
        """Replace all characters. With `most`, keep characters that templates trim or escape."""
        if self._is_shifted:
            with contextlib.suppress(UnicodeEncodeError):
                table = _MOST_SHIFTED if most else _SHIFTED
                return codecs.charmap_decode(text.encode("latin-1"), "strict", table)[0]
        return text.translate(self._most_table if most else self._table)

    def plain(self, text: str) -> str:
        """Restore the original characters."""
        if self._is_shifted:
            # U+F0041 stands for U+0041: in UTF-32, only one of the four bytes differs.
            content = text.encode("utf-32-le", errors="surrogatepass")
            if not any(content[1::4]) and not content[2::4].translate(None, b"\x00\x0f"):
                return content[::4].decode("latin-1")
        return text.translate(self._inverse_table)

    @cached_property
    def _most_table(self) -> dict[int, int]:
        return {n: other for n, other in self._table.items() if not _is_trimmed_or_escaped(chr(n))}

    @cached_property
    def _inverse_table(self) -> dict[int, int]:
        return {other: n for n, other in self._table.items()}


def _with_spans_of(text: str, other: str, spans: Sequence[Span]) -> str:
    """Return `text` with the characters of `other` inside `spans`."""
    letters = list(text)
    for start, end in spans:
        letters[start:end] = other[start:end]
    return "".join(letters)


def syntax_tree(template: str) -> nodes.Template:
    """Parse a valid template, with the extension of Jinja that transformers uses."""
    from jinja2 import Environment

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION_MARKS.sub("", template))


@lru_cache(maxsize=16)
def _words_and_constants(template: str) -> tuple[frozenset[str], re.Pattern[str]]:
    """Return what a template may look for in its data.

    Returns the words of the template, among them all keys that it reads, and a pattern that matches
    its string constants.
    """
    from jinja2 import nodes

    found = syntax_tree(template).find_all(nodes.Const)
    texts = {node.value for node in found if isinstance(node.value, str)}
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return frozenset(re.findall(r"\w+", template)), pattern


def _is_trimmed_or_escaped(letter: str) -> bool:
    return letter < " " or letter.isspace() or letter in _ESCAPED


# Decoding tables for Latin-1 text: see _Exchange.
_SHIFTED = "".join(chr(_PRIVATE.start + n) for n in range(256))
_MOST_SHIFTED = "".join(
    chr(n) if _is_trimmed_or_escaped(chr(n)) else _SHIFTED[n] for n in range(256)
)


def _may_be_read(key: object, words: frozenset[str]) -> bool:
    """Whether a template may read this key by name, so that the key must not change."""
    return not isinstance(key, str) or key in words


def _strings(value: Any, words: frozenset[str]) -> Iterator[str]:
    """Yield the texts of a JSON value, and its keys that are not in `words`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not _may_be_read(key, words):
                yield key
            yield from _strings(each, words)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each, words)


def _replaced(value: Any, replace: Replace, words: frozenset[str], is_message: bool = False) -> Any:
    """Apply `replace` to all texts of a JSON value, except the role of a message: templates write
    some marks with the role's name."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        replaced = {
            key if _may_be_read(key, words) else replace(key): _replaced(each, replace, words)
            for key, each in value.items()
        }
        if is_message and re.fullmatch(r"\w+", str(value.get("role"))):
            replaced["role"] = value["role"]
        return replaced
    if isinstance(value, (list, tuple)):
        return [_replaced(each, replace, words) for each in value]
    return value
