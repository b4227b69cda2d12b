"""The default environment: a prompt and one response, which the reward function scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gspo_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gspo_megatron.data.tokenizers import Tokenizer


class SingleTurn:
    """Turns the token ids of responses into samples for the reward function."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def samples(
        self,
        tokens: ArrayLike,
        prompt_lengths: ArrayLike,
        response_lengths: ArrayLike,
        truncated: ArrayLike,
        group_index: ArrayLike,
        prompts: Sequence[Prompt],
        first: int = 0,
    ) -> list[Sample]:
        """One sample for each response, in order, of the columns of a `RolloutBatch` on the CPU.

        tokens: [sum(prompt_lengths + response_lengths)], each sequence a prompt and its response;
        prompt_lengths, response_lengths, truncated, group_index: [num_sequences].

        Response i belongs to `prompts[group_index[i] - first]`. Its text is decoded without the
        end-of-sequence token, which `num_tokens` counts.
        """
        tokens = np.asarray(tokens)
        columns = (prompt_lengths, response_lengths, truncated, group_index)
        rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
        samples, end = [], 0
        for prompt_length, length, was_truncated, group in rows:
            start = end + prompt_length
            end = start + length
            ids = tokens[start:end].tolist()
            if ids and ids[-1] in self.tokenizer.eos_ids:
                ids.pop()
            prompt = prompts[group - first]
            samples.append(
                Sample(
                    prompt=prompt.text,
                    answer=prompt.answer,
                    response=self.tokenizer.decode(ids),
                    truncated=was_truncated,
                    fields=prompt.fields,
                    num_tokens=length,
                    messages=prompt.messages,
                    row_id=prompt.row_id,
                    num_prompt_tokens=prompt_length,
                )
            )
        assert end == len(tokens)
        return samples
