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
        sampled: ArrayLike | None = None,
        in_response: ArrayLike | None = None,
    ) -> list[Sample]:
        """One sample for each response, in order, of the columns of a `RolloutBatch` on the CPU.

        tokens: [sum(prompt_lengths + response_lengths)], each sequence a prompt and its response;
        prompt_lengths, response_lengths, truncated, group_index: [num_sequences].

        Response i belongs to `prompts[group_index[i] - first]`. Its text is decoded without the
        end-of-sequence token, which `num_tokens` counts.

        sampled: [sum(response_lengths)] bool, of episodes of several turns what the policy wrote;
        in_response: [tokens] bool, of episodes too; the response is the last turn then, and the
        prompt that of the first branch.
        """
        tokens = np.asarray(tokens)
        columns = (prompt_lengths, response_lengths, truncated, group_index)
        rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
        samples, end, responses_end = [], 0, 0
        for prompt_length, length, was_truncated, group in rows:
            start, end = end, end + prompt_length + length
            ids, transcript = tokens[start + prompt_length : end], ""
            if sampled is not None:
                kinds = np.asarray(in_response, dtype=bool)[start:end]
                prompt_length = int(np.argmax(kinds))
                transcript = self._decode(tokens[start + prompt_length : end])
                responses_end += length
                others = np.flatnonzero(~kinds)[-1] + 1  # the last branch's prompt ends there
                last = np.asarray(sampled)[responses_end - (end - start - others) : responses_end]
                ids = tokens[end - len(last) : end][_last_turn(last) :]
            prompt = prompts[group - first]
            samples.append(
                Sample(
                    prompt=prompt.text,
                    answer=prompt.answer,
                    response=self._decode(ids),
                    truncated=was_truncated,
                    fields=prompt.fields,
                    num_tokens=length,
                    messages=prompt.messages,
                    row_id=prompt.row_id,
                    num_prompt_tokens=prompt_length,
                    transcript=transcript,
                )
            )
        assert end == len(tokens)
        return samples

    def _decode(self, token_ids: np.ndarray) -> str:
        ids = token_ids.tolist()
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return self.tokenizer.decode(ids)


def _last_turn(written: np.ndarray) -> int:
    """Where the last turn begins, of [response tokens of a branch] bool: what the policy wrote. It
    ends with the response."""
    others = np.flatnonzero(~written)
    return int(others[-1]) + 1 if len(others) else 0
