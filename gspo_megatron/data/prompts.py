"""Prompt files, JSON Lines or Parquet with one prompt a row; and prompts as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.data.rows import Problems, read_rows, string_fault
from gspo_megatron.errors import DataError
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    import numpy as np

    from gspo_megatron.data.tokenizers import Tokenizer

SHOWN_CHARACTERS = 10  # unknown ones, of the first text


def load_prompts(
    path: str | Path, prompt_field: str = "prompt", answer_field: str = "answer"
) -> list[Prompt]:
    """All prompts of a file, in its order.

    Both fields must be strings, and the prompt must not be empty. All other fields of a row are
    kept in `fields`. `source` is "path:line", counted from 1 (for Parquet: the row).

    Raises DataError that names the first bad rows and says how many more there are.
    """
    problems = Problems()
    prompts = list(read_prompts(path, prompt_field, answer_field, problems))
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"{path}: holds no prompts; one JSON object a line is wanted")
    return prompts


def read_prompts(
    path: str | Path, prompt_field: str, answer_field: str, problems: Problems
) -> Iterator[Prompt]:
    """The prompts of a file one by one, as `load_prompts` reads them; bad rows go to `problems`."""
    chosen = {"data.prompt_field": prompt_field, "data.answer_field": answer_field}
    for where, row in read_rows(Path(path), chosen, problems, what="prompt file"):
        faults = [string_fault(row, name, setting) for setting, name in chosen.items()]
        if faults[0] is None and not row[prompt_field].strip():
            faults[0] = f"field {prompt_field!r} is empty; a prompt needs some text"
        for fault in filter(None, faults):
            problems.add(where, fault)
        if not any(faults):
            others = {key: value for key, value in row.items() if key not in chosen.values()}
            yield Prompt(row[prompt_field], row[answer_field], where, others)


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    chat_template: bool = False,
) -> list[Prompt]:
    """The prompts with their `token_ids`, as `encode_text` makes them, in the same order.

    Raises DataError that names file and line of prompts without a token or with more than
    `max_prompt_tokens`, and their lengths; also if the tokenizer has no chat template.
    """
    problems = Problems()
    encoded = []
    for prompt in prompts:
        token_ids = encode_text(prompt.text, tokenizer, chat_template)
        if not prompt.text.strip() or not token_ids:
            problems.add(prompt.source, "the prompt is empty")
        elif len(token_ids) > max_prompt_tokens:
            problems.add(
                prompt.source,
                f"the prompt has {len(token_ids)} tokens; at most {max_prompt_tokens} are allowed "
                "(data.max_prompt_tokens)",
            )
        encoded.append(replace(prompt, token_ids=tuple(token_ids)))
    problems.raise_if_any()
    return encoded


def encode_text(text: str, tokenizer: Tokenizer, chat_template: bool = False) -> list[int]:
    """The token ids of one prompt.

    With `chat_template` the text becomes one user message, followed by the opening of the
    assistant's turn. Without it, the beginning-of-sequence token goes first if the tokenizer's
    models expect one; a template writes its own.
    """
    if chat_template:
        messages = [{"role": "user", "content": text}]
        return tokenizer.encode_rendered(tokenizer.render(messages, open_answer=True).text).ids
    token_ids = tokenizer.encode(text)
    return token_ids if tokenizer.bos_id is None else [tokenizer.bos_id, *token_ids]


@dataclass
class UnknownCharacters:
    """Texts of a file with characters that the tokenizer does not know: it replaces all of them by
    one and the same token."""

    count: int = 0  # texts
    source: str = ""  # "file:line" of the first
    characters: str = ""  # of the first, each once; empty where only longer pieces are unknown

    def add(
        self, tokenizer: Tokenizer, source: str, token_ids: Sequence[int] | np.ndarray, text: str
    ) -> None:
        """Counts `text` if its `token_ids` [length] hold the unknown token."""
        if tokenizer.unk_id is None or tokenizer.unk_id not in token_ids:
            return
        self.count += 1
        if self.count == 1:
            self.source = source
            different = dict.fromkeys(text)
            self.characters = "".join(
                c for c in different if tokenizer.unk_id in tokenizer.encode(c)
            )

    def warnings(self, key: str, total: int) -> list[str]:
        """One line if any of the `total` texts of the file that `key` names is affected."""
        if not self.count:
            return []
        shown = ", ".join(map(repr, self.characters[:SHOWN_CHARACTERS]))
        more = len(self.characters) - SHOWN_CHARACTERS
        characters = f": {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""
        return [
            f"{key}: {self.count:,} of {total:,} texts hold characters that the tokenizer does not "
            f"know; it replaces them all by the same token; the first is {self.source}{characters}"
        ]
