"""Examples for supervised fine-tuning: token ids, and a mask of the tokens to learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_megatron.config.stages import FineTuningDataSection
from gspo_megatron.data.chat import (
    ASSISTANT,
    check_template,
    encode_conversation,
    message_fault,
    plain_message,
    tools_of,
)
from gspo_megatron.data.formats import FieldMap, with_system
from gspo_megatron.data.prompts import (
    IDLE_OPTIONS,
    OddTexts,
    encode_text,
    read_prompts,
)
from gspo_megatron.data.rows import Problems, find_field, read_rows, text_fault
from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.types import Message

MESSAGES_SETTING = "data.messages_field"


@dataclass(frozen=True)
class Example:
    """A conversation, or a prompt with its answer."""

    token_ids: np.ndarray  # [length] int32
    loss_mask: np.ndarray  # [length] bool: True on the tokens to learn
    source: str  # "file:line"


_Read = tuple[Example, str, bool]  # the example, its text, whether the chat template rendered it


@dataclass
class Counts:
    """The numbers of rows that are too long, and the texts that need a warning. Dropped rows count
    only as too long."""

    dropped: int = 0
    truncated: int = 0
    odd: OddTexts = field(default_factory=OddTexts)


class FlatArrays:
    """Arrays of different lengths by number, end to end in one array to save memory."""

    def __init__(self, arrays: Sequence[np.ndarray], dtype: type) -> None:
        self.values = np.concatenate([np.empty(0, dtype), *arrays])
        self.ends = np.cumsum([0, *map(len, arrays)])  # [arrays + 1] int64, beginning with 0

    def __getitem__(self, number: int) -> np.ndarray:
        return self.values[self.ends[number] : self.ends[number + 1]]


class SupervisedData:
    """All examples of a file by number."""

    def __init__(self, examples: Iterator[Example], counts: Counts) -> None:
        listed = list(examples)
        self.counts = counts
        self._tokens = FlatArrays([each.token_ids for each in listed], np.int32)
        self._masks = FlatArrays([each.loss_mask for each in listed], bool)
        self._sources = [each.source for each in listed]

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, number: int) -> Example:
        return Example(self._tokens[number], self._masks[number], self._sources[number])

    @property
    def lengths(self) -> np.ndarray:  # [examples] int64, in tokens
        return np.diff(self._tokens.ends)

    def notes(self) -> list[str]:
        """Return how many examples are left out or cut, one text each."""
        counts = ((self.counts.dropped, "left out"), (self.counts.truncated, "cut"))
        return [f"examples that are too long: {count} {what}" for count, what in counts if count]


def load_supervised(
    path: str | Path, tokenizer: Tokenizer, form: FineTuningDataSection
) -> SupervisedData:
    """Load the examples of a JSON Lines or Parquet file in its order.

    `form` is the configuration; its `max_tokens` must be set. The chat template renders a
    conversation, and the model learns the assistant's messages. A prompt is encoded as for a
    rollout, and the model learns its answer and the end-of-sequence token. With `chat_template`,
    prompt and answer become two messages.

    Raises DataError with file and line of bad rows. Also raises it if the tokenizer's chat template
    is missing or unusable, or if no example is left.
    """
    if form.messages_field is not None or form.chat_template:
        check_template(tokenizer)
    problems, counts = Problems(), Counts()
    read = _from_prompts if form.messages_field is None else _from_messages
    examples = read(Path(path), tokenizer, form, problems)
    data = SupervisedData(_fitting(examples, tokenizer, form, problems, counts), counts)
    problems.raise_if_any()
    if not len(data):
        left_out = f" that fit {form.max_tokens} tokens" if counts.dropped else ""
        raise DataError(f"{path}: holds no examples{left_out}")
    return data


def _from_prompts(
    path: Path, tokenizer: Tokenizer, form: FineTuningDataSection, problems: Problems
) -> Iterator[_Read]:
    fields = FieldMap(
        form.prompt_field,
        form.answer_field,
        id=None,
        template=form.template,
        system=form.system_prompt,
    )
    is_checked = form.chat_template
    for prompt in read_prompts(path, fields, problems, form.chat_template):
        if prompt.messages and not is_checked:
            check_template(tokenizer)
            is_checked = True
        if (fault := text_fault(prompt.answer)) is not None:
            problems.add(prompt.source, f"field {form.answer_field!r} {fault}")
            continue
        if prompt.messages:
            messages = [*prompt.messages, {"role": ASSISTANT, "content": prompt.answer}]
            yield from _conversation(prompt.source, prompt.fields, messages, tokenizer, problems)
            continue
        question = encode_text(prompt.text, tokenizer)
        answer = [*tokenizer.encode(prompt.answer), tokenizer.eos_id]
        mask = np.arange(len(question) + len(answer)) >= len(question)
        example = Example(np.array(question + answer, np.int32), mask, prompt.source)
        yield example, prompt.text + prompt.answer, False
    if form.chat_template_options and not is_checked:
        problems.add(*IDLE_OPTIONS)


def _from_messages(
    path: Path, tokenizer: Tokenizer, form: FineTuningDataSection, problems: Problems
) -> Iterator[_Read]:
    name = form.messages_field
    assert name is not None
    for where, row in read_rows(path, [(MESSAGES_SETTING, name)], problems):
        messages, fault = find_field(row, name, MESSAGES_SETTING)
        if fault is None and (wrong := message_fault(messages)):
            fault = f"field {name!r}: {wrong}"
        elif fault is None and all(message["role"] != ASSISTANT for message in messages):
            fault = f"field {name!r}: no message has the role {ASSISTANT!r}, so there is nothing "
            fault += "to learn"
        if fault is not None:
            problems.add(where, fault)
        else:
            conversation = with_system([*map(plain_message, messages)], form.system_prompt)
            yield from _conversation(where, row, conversation, tokenizer, problems)


def _conversation(
    where: str,
    row: Mapping[str, Any],
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    problems: Problems,
) -> Iterator[_Read]:
    """Yield one example, or add a problem."""
    try:
        tools = tools_of(row, tokenizer.chat_template)
        token_ids, mask = encode_conversation(messages, tokenizer, tools)
    except DataError as error:
        problems.add(where, str(error))
        return
    if not mask.any():
        problems.add(where, "the chat template marks no text of the assistant to learn")
    elif not np.isin(token_ids[mask], tokenizer.eos_ids).any():
        problems.add(
            where,
            "the chat template ends no answer with the end-of-sequence token "
            f"(id {' or '.join(map(str, tokenizer.eos_ids))}): the model would not learn to stop",
        )
    else:
        text = "".join(message["content"] for message in messages)
        yield Example(token_ids, mask, where), text, True


def _fitting(
    examples: Iterator[_Read],
    tokenizer: Tokenizer,
    form: FineTuningDataSection,
    problems: Problems,
    counts: Counts,
) -> Iterator[Example]:
    """Yield the examples of at most `max_tokens` tokens. `form.too_long` decides whether longer
    examples become problems, or are cut or dropped, and counted."""
    most = form.max_tokens
    assert most is not None
    for example, text, is_conversation in examples:
        length = len(example.token_ids)
        if length > most:
            if form.too_long == "error":
                fault = f"the example has {length} tokens; at most {most} are allowed"
                problems.add(example.source, fault)
                continue
            if form.too_long == "drop" or not example.loss_mask[:most].any():
                counts.dropped += 1
                continue
            counts.truncated += 1
            example = Example(example.token_ids[:most], example.loss_mask[:most], example.source)
        ids = example.token_ids
        counts.odd.add(tokenizer, example.source, ids, text, of_messages=is_conversation)
        yield example
