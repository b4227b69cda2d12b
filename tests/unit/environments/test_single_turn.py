"""Responses as samples for the reward function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.data.toy import train_toy_tokenizer
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.types import Prompt, Sample

MESSAGES = ({"role": "user", "content": "ab>"},)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_toy_tokenizer(tmp_path_factory.mktemp("toy") / "tokenizer"))


@pytest.mark.parametrize("kind", [list, np.array])
def test_responses_become_samples(tokenizer: Tokenizer, kind: Callable) -> None:
    eos = tokenizer.eos_id
    prompts = [
        Prompt("ab>", "ba", "p:1", {"task": "reversal"}, (), MESSAGES, "p:1"),
        Prompt("1+1=", "2", "p:2"),
        Prompt("abc>", "cba", "p:3"),
    ]
    # Of the second prompt no response is on this rank.
    texts = [("ab>", [*tokenizer.encode("ba"), eos]), ("ab>", [eos]), ("abc>", [])]
    texts.append(("abc>", tokenizer.encode("cbab")))
    ids = [(tokenizer.encode(text), response) for text, response in texts]
    samples = SingleTurn(tokenizer).samples(
        tokens=kind([n for prompt, response in ids for n in prompt + response]),
        prompt_lengths=kind([len(prompt) for prompt, _ in ids]),
        response_lengths=kind([len(response) for _, response in ids]),
        truncated=kind([False, False, True, True]),
        group_index=kind([7, 7, 9, 9]),
        prompts=prompts,
        first=7,
    )
    fields = {"task": "reversal"}
    assert samples == [
        Sample("ab>", "ba", "ba", False, fields, 3, MESSAGES, "p:1", 3),
        Sample("ab>", "ba", "", False, fields, 1, MESSAGES, "p:1", 3),
        Sample("abc>", "cba", "", True, {}, 0, num_prompt_tokens=4),
        Sample("abc>", "cba", "cbab", True, {}, 4, num_prompt_tokens=4),
    ]
    assert [type(sample.truncated) for sample in samples] == [bool] * 4
    assert SingleTurn(tokenizer).samples([], [], [], [], [], []) == []


def test_of_an_episode_the_last_turn_is_scored() -> None:
    class Shown:
        eos_ids = (0,)

        def decode(self, token_ids: list[int]) -> str:
            return "".join(map(chr, token_ids))

    environment, prompts = SingleTurn(Shown()), [Prompt("p", "a", "s")]  # type: ignore[arg-type]
    # capitals: what the policy wrote; digits: what is no response
    texts = ["12AB", "12ABcdEF", "1AB234CdEF", "1AB23CD", "1A"]
    kinds = [np.array([not each.isdigit() for each in text]) for text in texts]
    found = environment.samples(
        [ord(each.upper()) for text in texts for each in text],
        [int((~kind).sum()) for kind in kinds],
        [int(kind.sum()) for kind in kinds],
        [False] * len(texts),
        [0] * len(texts),
        prompts,
        sampled=[each.isupper() for text in texts for each in text if not each.isdigit()],
        in_response=np.concatenate(kinds),
    )
    assert [sample.response for sample in found] == ["AB", "EF", "EF", "CD", "A"]
    assert [sample.transcript for sample in found] == ["AB", "ABCDEF", "AB234CDEF", "AB23CD", "A"]
    assert [sample.num_tokens for sample in found] == [2, 6, 6, 4, 1]
    assert [sample.num_prompt_tokens for sample in found] == [2, 2, 1, 1, 1]


def test_only_the_last_end_of_sequence_token_is_removed() -> None:
    class Shown:
        eos_ids = (2, 9)

        def decode(self, token_ids: list[int]) -> str:
            return str(token_ids)

    environment, prompts = SingleTurn(Shown()), [Prompt("p", "a", "s")]  # type: ignore[arg-type]
    for last in (2, 9):
        (sample,) = environment.samples([5, 2, 7, 2, last], [1], [4], [False], [0], prompts)
        assert sample.response == "[2, 7, 2]" and sample.num_tokens == 4
