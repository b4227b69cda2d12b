"""The samples for the reward function, made from responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.data.toy import train_toy_tokenizer
from gspo_megatron.rewards.scoring import Shaping
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, Sample

MESSAGES = ({"role": "user", "content": "ab>"},)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_toy_tokenizer(tmp_path_factory.mktemp("toy") / "tokenizer"))


def samples_of(
    tokenizer: Any, prompts: list[Prompt], first: int = 0, **columns: Any
) -> list[Sample]:
    """Make samples. columns: the columns from which they are made."""
    count = len(columns["truncated"])
    responses = sum(columns["response_lengths"])
    group = RolloutGroup.of_columns(
        {
            **{name: np.asarray(values) for name, values in columns.items()},
            "rollout_logprobs": np.zeros(responses),
            "sample_index": np.arange(count),
            "rewards": np.zeros(count),
            "shaped": np.zeros(count),
            "turns": np.zeros(count, int),
            "turn_rewards": np.zeros(0),
            "turn_tokens": np.zeros(0, int),
        }
    )
    unused: Any = None
    return GroupScorer(unused, unused, tokenizer).samples(group, dict(enumerate(prompts, first)))


def test_responses_become_samples(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_id
    prompts = [
        Prompt("ab>", "ba", "p:1", {"task": "reversal"}, (), MESSAGES, "p:1"),
        Prompt("1+1=", "2", "p:2"),
        Prompt("abc>", "cba", "p:3"),
    ]
    # This rank has no response to the second prompt.
    texts = [("ab>", [*tokenizer.encode("ba"), eos]), ("ab>", [eos]), ("abc>", [])]
    texts.append(("abc>", tokenizer.encode("cbab")))
    ids = [(tokenizer.encode(text), response) for text, response in texts]
    samples = samples_of(
        tokenizer,
        prompts,
        first=7,
        tokens=[n for prompt, response in ids for n in prompt + response],
        prompt_lengths=[len(prompt) for prompt, _ in ids],
        response_lengths=[len(response) for _, response in ids],
        truncated=[False, False, True, True],
        group_index=[7, 7, 9, 9],
    )
    fields = {"task": "reversal"}
    assert samples == [
        Sample("ab>", "ba", "ba", False, fields, 3, MESSAGES, "p:1", 3, group=7),
        Sample("ab>", "ba", "", False, fields, 1, MESSAGES, "p:1", 3, group=7),
        Sample("abc>", "cba", "", True, {}, 0, num_prompt_tokens=4, group=9),
        Sample("abc>", "cba", "cbab", True, {}, 4, num_prompt_tokens=4, group=9),
    ]
    assert [type(sample.truncated) for sample in samples] == [bool] * 4
    nothing = np.zeros(0, int)
    names = ("tokens", "prompt_lengths", "response_lengths", "group_index")
    empty = dict.fromkeys(names, nothing) | {"truncated": nothing.astype(bool)}
    assert samples_of(tokenizer, [], **empty) == []


def test_of_an_episode_the_last_turn_is_scored() -> None:
    class Shown:
        eos_ids = (0,)
        decode_response = Tokenizer.decode_response

        def decode(self, token_ids: list[int]) -> str:
            return "".join(map(chr, token_ids))

    prompts = [Prompt("p", "a", "s")]
    # Capitals are tokens of the policy; small letters are tokens between the turns; digits are
    # tokens of prompts.
    texts = ["12AB", "12ABcdEF", "1AB234CdEF", "1AB23CD", "1A"]
    kinds = [np.array([not each.isdigit() for each in text]) for text in texts]
    found = samples_of(
        Shown(),
        prompts,
        tokens=[ord(each.upper()) for text in texts for each in text],
        prompt_lengths=[int((~kind).sum()) for kind in kinds],
        response_lengths=[int(kind.sum()) for kind in kinds],
        truncated=[False] * len(texts),
        group_index=[0] * len(texts),
        sampled=[each.isupper() for text in texts for each in text if not each.isdigit()],
        in_response=np.concatenate(kinds),
    )
    assert [sample.response for sample in found] == ["AB", "EF", "EF", "CD", "A"]
    assert [sample.transcript for sample in found] == ["AB", "ABCDEF", "AB234CDEF", "AB23CD", "A"]
    assert [sample.written for sample in found] == ["AB", "ABEF", "ABCEF", "ABCD", "A"]
    assert [sample.num_tokens for sample in found] == [2, 6, 6, 4, 1]
    assert [sample.num_prompt_tokens for sample in found] == [2, 2, 1, 1, 1]


def test_a_prompt_that_repeats_what_the_policy_wrote_is_no_repetition() -> None:
    """An episode whose history was rewritten: the prompt of its second branch shows the first
    branch again."""

    class Numbers:
        eos_ids = (0,)
        decode_response = Tokenizer.decode_response

        def decode(self, token_ids: list[int]) -> str:
            return " ".join(map(str, token_ids))

    first, second = [11, 12, 13, 14], [21, 22, 23]
    prompts = [[1], [1, *first, 2]]
    (sample,) = samples_of(
        Numbers(),
        [Prompt("p", "a", "s")],
        tokens=[*prompts[0], *first, *prompts[1], *second],
        prompt_lengths=[sum(map(len, prompts))],
        response_lengths=[len(first) + len(second)],
        truncated=[False],
        group_index=[0],
        sampled=[True] * 7,
        in_response=[False] + [True] * 4 + [False] * 6 + [True] * 3,
    )
    assert sample.written == "11 12 13 14 21 22 23"
    shaping = Shaping(RewardSection(repetition_penalty=1.0, repetition_words=3), 99)
    assert shaping(np.array([0.5]), sample).tolist() == [0.5]
    again = replace(sample, written=f"{sample.written} 11 12 13")
    assert shaping(np.array([0.5]), again).tolist() == [pytest.approx(0.5 - 1 / 8)]


def test_only_the_last_end_of_sequence_token_is_removed() -> None:
    class Shown:
        eos_ids = (2, 9)
        decode_response = Tokenizer.decode_response

        def decode(self, token_ids: list[int]) -> str:
            return str(token_ids)

    for last in (2, 9):
        (sample,) = samples_of(
            Shown(),
            [Prompt("p", "a", "s")],
            tokens=[5, 2, 7, 2, last],
            prompt_lengths=[1],
            response_lengths=[4],
            truncated=[False],
            group_index=[0],
        )
        assert sample.response == "[2, 7, 2]" and sample.num_tokens == 4
