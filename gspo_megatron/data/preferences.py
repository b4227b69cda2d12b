"""Preferences between responses, and ratings of responses, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.config.stages import PreferenceDataSection
from gspo_megatron.data.chat import check_template, tools_of
from gspo_megatron.data.examples import FlatArrays
from gspo_megatron.data.preference_rows import (
    PreferenceFields,
    Texts,
    Whole,
    fields_of,
    read_preference,
)
from gspo_megatron.data.prompts import IDLE_OPTIONS, OddTexts, encode_whole
from gspo_megatron.data.rows import Problems, read_rows
from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.errors import DataError

MOST_SOURCES = 64  # each gets metrics of its own in every evaluation


@dataclass(frozen=True)
class Preference:
    """A chosen response with the rejected ones, or one rated response. Each branch is a prompt with
    a response; the first branch has the chosen response."""

    token_ids: np.ndarray  # [tokens of all branches] int32, end to end
    lengths: np.ndarray  # [branches] int64
    values: np.ndarray  # [rejected] float64: margins; [1] for a rated response: its rating
    source: int  # the number of its source, see PreferenceData.sources


@dataclass
class PreferenceCounts:
    """The numbers of pairs (or ratings) that were left out, and of texts that need a warning."""

    too_long: int = 0
    ties: int = 0
    ends_in_padding: int = 0  # sequences whose last token is the padding token
    odd: OddTexts = field(default_factory=OddTexts)


class PreferenceData:
    """All preferences of a file by number."""

    def __init__(self, found: Iterator[tuple[Preference, str]], counts: PreferenceCounts) -> None:
        """found: each preference with the name of its source."""
        sources: dict[str, int] = {}
        preferences = []
        for each, name in found:
            number = sources.setdefault(name, len(sources))
            preferences.append(replace(each, source=number))
        self.counts, self.sources = counts, [*sources]
        self.source_numbers = np.array([each.source for each in preferences], np.int64)
        self._tokens = FlatArrays([each.token_ids for each in preferences], np.int32)
        self._lengths = FlatArrays([each.lengths for each in preferences], np.int64)
        self._values = FlatArrays([each.values for each in preferences], float)
        self.lengths, self.branch_ends = self._lengths.values, self._lengths.ends
        self.values = self._values.values

    def __len__(self) -> int:
        return len(self.source_numbers)

    def __getitem__(self, number: int) -> Preference:
        source = int(self.source_numbers[number])
        return Preference(self._tokens[number], self._lengths[number], self._values[number], source)

    @property
    def pairs(self) -> int:
        """The number of pairs, or of ratings."""
        return len(self.values)

    def left_out(self) -> list[str]:
        """Return how many pairs are left out, one text for each reason."""
        counts = ((self.counts.too_long, "too long"), (self.counts.ties, "a tie"))
        return [f"{count:,}, {why}" for count, why in counts if count]

    def notes(self) -> list[str]:
        """Return how many pairs are left out, for the output of a run."""
        return [f"pairs left out: {line}" for line in self.left_out()]


def load_preferences(
    path: str | Path, tokenizer: Tokenizer, form: PreferenceDataSection, *, regression: bool
) -> PreferenceData:
    """Load the preferences of a JSON Lines or Parquet file in its order.

    `form` is the configuration; its `max_tokens` must be set. Messages go through the chat
    template. A text is encoded as for a rollout, and the end-of-sequence token is added at its end.
    With `regression` the rows are rated responses.

    A pair is left out and counted if one side has more than `max_tokens` tokens. Ties are left out
    and counted, too: responses with the same tokens, and rows that call neither response better.
    Raises DataError with file and line of bad rows, if the chat template is missing or unusable,
    and if no preference is left.
    """
    problems, counts = Problems(), PreferenceCounts()
    fields = fields_of(form, regression=regression)
    reader = _Reader(tokenizer, form, fields, problems, counts)
    data = PreferenceData(reader.read(Path(path)), counts)
    problems.raise_if_any()
    if not len(data):
        left_out = [(counts.too_long, f"too long for {form.max_tokens} tokens")]
        left_out.append((counts.ties, "ties"))
        why = ", ".join(f"{count} left out: {what}" for count, what in left_out if count)
        raise DataError(f"{path}: holds no preferences{f' ({why})' if why else ''}")
    if len(data.sources) > MOST_SOURCES:
        raise DataError(
            f"{path}: field {fields.source!r} has {len(data.sources)} values; allowed: at most "
            f"{MOST_SOURCES} (data.source_field chooses one)"
        )
    return data


@dataclass
class _Reader:
    tokenizer: Tokenizer
    form: PreferenceDataSection
    fields: PreferenceFields
    problems: Problems
    counts: PreferenceCounts
    checked: bool = False  # whether the chat template was checked

    def read(self, path: Path) -> Iterator[tuple[Preference, str]]:
        """Yield the preferences, each with the name of its source."""
        if self.form.chat_template:
            self._check_template()
        for where, row in read_rows(path, self.fields.settings(), self.problems):
            preference = self._of_row(where, row)
            if preference is not None:
                yield preference
        if self.form.chat_template_options and not self.checked:
            self.problems.add(*IDLE_OPTIONS)

    def _check_template(self) -> None:
        if not self.checked:
            check_template(self.tokenizer)
        self.checked = True

    def _of_row(self, where: str, row: Mapping[str, Any]) -> tuple[Preference, str] | None:
        """Return the preference of a row; None if the row is faulty or left out."""
        try:
            read = read_preference(row, self.fields, self.form)
        except ValueError as fault:
            self.problems.add(where, str(fault))
            return None
        if read is None:
            self.counts.ties += 1
            return None
        try:
            branches = [self._encode(where, row, whole) for whole in read.responses]
        except DataError as error:
            self.problems.add(where, str(error))
            return None
        most = self.form.max_tokens
        assert most is not None
        first, *rejected = branches
        if len(first) > most:
            self.counts.too_long += len(read.values)
            return None
        kept, values = [first], []
        if self.fields.rating is not None:
            values = read.values
        else:
            for branch, margin in zip(rejected, read.values, strict=True):
                if len(branch) > most:
                    self.counts.too_long += 1
                elif np.array_equal(branch, first):
                    self.counts.ties += 1
                else:
                    kept.append(branch)
                    values = [*values, margin]
        if not values:
            return None
        lengths = np.array([len(branch) for branch in kept], np.int64)
        self.counts.ends_in_padding += sum(b[-1] == self.tokenizer.pad_id for b in kept)
        preference = Preference(np.concatenate(kept), lengths, np.array(values, np.float64), 0)
        return preference, read.source

    def _encode(self, where: str, row: Mapping[str, Any], whole: Whole) -> np.ndarray:
        """Return the token ids of a prompt with a response. Raises DataError."""
        if isinstance(whole, Texts):
            ids = encode_whole(whole.prompt, whole.response, self.tokenizer)
            text = whole.prompt + whole.response
        else:
            self._check_template()
            tools = tools_of(row, self.tokenizer.chat_template)
            rendered = self.tokenizer.render(whole, tools=tools)
            ids = self.tokenizer.encode_rendered(rendered.text, rendered.quoted).ids
            text = "".join(message["content"] for message in whole)
        found = np.array(ids, np.int32)
        of_messages = not isinstance(whole, Texts)
        self.counts.odd.add(self.tokenizer, where, found, text, of_messages=of_messages)
        return found
