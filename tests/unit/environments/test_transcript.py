"""The transcript of an episode: prompts, turns, and the text between the turns, as tokens."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_megatron.environments.transcript import Transcript, Written, joined_routes


def written(*ids: int) -> Written:
    return Written(ids, truncated=False, source=10 * np.array(ids))


@pytest.fixture
def transcript() -> Transcript:
    """A transcript with two branches. The first branch has two turns with a token in between, the
    second has a single turn."""
    made = Transcript({0: (1, 2)})
    made.add((), written(3, 4))
    made.add((5,), written(6))
    made.begin_branch((1, 7, 8))
    made.add((), written(9, 9))
    return made


def test_each_turn_is_of_one_branch(transcript: Transcript) -> None:
    assert [(each.prompt, each.turns) for each in transcript.branches()] == [
        ((1, 2), range(2)),
        ((1, 7, 8), range(2, 3)),
    ]
    assert transcript.prompt == (1, 2) and transcript.last_start == 2
    assert transcript.context == (1, 7, 8, 9, 9)


def test_a_branch_without_a_turn_is_what_comes_next(transcript: Transcript) -> None:
    before = transcript.branches()
    transcript.begin_branch((1,))
    transcript.begin_branch((4, 4))  # replaces the empty branch before
    assert transcript.branches() == before and transcript.context == (4, 4)


def test_the_response_is_all_turns_and_what_stands_between(transcript: Transcript) -> None:
    assert transcript.response.tolist() == [3, 4, 5, 6, 9, 9]
    assert transcript.response.dtype == np.int32
    assert transcript.num_response_tokens == 6
    assert transcript.turn_ends().tolist() == [2, 4, 6]
    ids, in_response = transcript.sequence
    assert ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 7, 8, 9, 9]
    assert "".join("pR"[kind] for kind in in_response.astype(int)) == "ppRRRRpppRR"


def test_the_policy_s_own_tokens_are_learnt_from(transcript: Transcript) -> None:
    assert transcript.mask().tolist() == [True, True, False, True, True, True]
    assert not transcript.mask(learnt=False).any()


def test_a_column_has_a_value_for_what_stands_between(transcript: Transcript) -> None:
    filled = transcript.column(lambda turn: turn.source, filler=-1)
    assert filled.tolist() == [30, 40, -1, 60, 90, 90]
    # without a filler, text in between gets the value of the next turn
    follows = transcript.column(lambda turn: turn.source)
    assert follows.tolist() == [30, 40, 60, 60, 90, 90]
    with pytest.raises(AssertionError):
        transcript.column(lambda turn: turn.source[1:])


def test_a_copy_goes_its_own_way(transcript: Transcript) -> None:
    before = transcript.copy()
    transcript.add((7,), written(8))
    transcript.begin_branch((1,))
    assert len(before.turns) == len(before.between) == 3 and before.last_start == 2
    assert before.context == (1, 7, 8, 9, 9)


def test_each_token_has_the_experts_of_its_first_pass() -> None:
    turns = [np.arange(4) + 10, np.arange(7) + 20, np.arange(8) + 30]
    assert np.concatenate(joined_routes(turns)).tolist() == [10, 11, 12, 23, 24, 25, 36, 37]
    assert np.concatenate(joined_routes(turns[:1])).tolist() == [10, 11, 12, 13]
