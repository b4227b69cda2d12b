"""Texts with characters that a tokenizer does not know: it reads them all as one and the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_megatron.data.tokenizers import Tokenizer

if TYPE_CHECKING:  # the converter begins without it
    import numpy as np

SHOWN_CHARACTERS = 10  # of the first text


@dataclass
class Unknown:
    """How many texts of a file hold such characters, and which the first of them does."""

    count: int = 0
    source: str = ""  # "file:line" of the first
    characters: str = ""  # of the first, each once; empty where only longer pieces are unknown

    def note(
        self, tokenizer: Tokenizer, source: str, token_ids: Sequence[int] | np.ndarray, text: str
    ) -> None:
        """Count a text, where `token_ids` [length], which were made of it, hold the unknown one."""
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
        """One line about the file that `key` names, of `total` texts; none without such a text."""
        if not self.count:
            return []
        shown = ", ".join(map(repr, self.characters[:SHOWN_CHARACTERS]))
        more = len(self.characters) - SHOWN_CHARACTERS
        told = f": {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""
        return [
            f"{key}: {self.count:,} of {total:,} texts hold characters that the tokenizer does not "
            f"know and takes for one and the same; the first is {self.source}{told}"
        ]
