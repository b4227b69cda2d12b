"""The reward: the share of a row's instructions that a response follows. Rows have the format of
IFEval.

The reward can check the instructions that make_prompts.py writes. An empty or truncated response
follows no instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gspo_megatron.types import Sample


def number_words(response: str, relation: str, num_words: int) -> bool:
    count = len(response.split())
    return count < num_words if relation == "less than" else count >= num_words


def first_word(response: str, first_word: str, **_: int) -> bool:
    return (re.findall(r"\w+", response.lower()) or [""])[0] == first_word.lower()


def keywords(response: str, keywords: list[str]) -> bool:
    return all(re.search(rf"\b{re.escape(w)}\b", response, re.IGNORECASE) for w in keywords)


def ends_with(response: str, end_phrase: str) -> bool:
    return response.strip().lower().endswith(end_phrase.lower())


CHECKS: Mapping[str, Callable[..., bool]] = {
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": first_word,
    "keywords:existence": keywords,
    "startend:end_checker": ends_with,
}


def followed(response: str, names: list[str], options: list[dict[str, Any]]) -> list[bool]:
    """Return for each instruction whether the response follows it."""
    return [CHECKS[name](response, **given) for name, given in zip(names, options, strict=True)]


def share_followed(sample: Sample) -> float:
    """Return the share of instructions that the response follows, from 0 to 1."""
    if sample.truncated or not sample.response.strip():
        return 0.0
    found = followed(sample.response, sample.fields["instruction_id_list"], sample.fields["kwargs"])
    return sum(found) / len(found)
