"""The assembler joins responses of all kinds into one group, for both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.environments.episode import Client, Episode, EpisodeLimits
from gspo_megatron.environments.transcript import Written
from gspo_megatron.errors import EpisodeError
from gspo_megatron.rollout.episodes import assemble, played_episode, played_turn
from gspo_megatron.rollout.megatron import barrier
from gspo_megatron.rollout.types import COLUMNS
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response, no_routes
from gspo_megatron.types import Prompt, RolloutBatch
from tests.unit.rollout.double import FACTS, LAYERS, TOP_K

# the end-of-sequence token; the version of an episode that failed before its first turn
EOS, VERSION = 2, 5


def response(first: int, ids: np.ndarray, with_routes: bool) -> Response:
    """A response whose values (experts, log-probs, versions) follow from its token ids. Its branch
    begins with the token `first`."""
    routes = None
    if with_routes:
        experts = np.arange(first, ids[-1] + 1, dtype=np.int16)
        routes = np.broadcast_to(experts[:, None, None], (len(experts), LAYERS, TOP_K)).copy()
        routes[-1] = 0  # the last token was never an input
    cut = bool(ids[-1] % 2)
    return Response(ids.astype(np.int32), ids.astype(np.float32) / 8, cut, routes, versions=ids * 2)


def episode(
    branches: list[tuple[int, list[tuple[int, int]]]],
    with_routes: bool = True,
    *,
    failed: bool = False,
    cut: bool = False,
) -> Episode:
    """An episode. branches: the number of tokens of the prompt, and for each turn the numbers of
    tokens before it and in it. Tokens are consecutive numbers."""
    client = Client(Prompt("p", "a", "f:1"), EpisodeLimits(9, 99), None, None)  # type: ignore[arg-type]
    start = 100
    for prompt, turns in branches:
        first, end = start, start + prompt
        client.transcript.prompts[len(client.transcript.turns)] = tuple(range(start, end))
        for between, length in turns:
            client.transcript.between.append(tuple(range(end, end + between)))
            ids, end = np.arange(end + between, end + between + length), end + between + length
            source = response(first, ids, with_routes)
            client.transcript.turns.append(Written(ids.tolist(), source.truncated, source=source))
        start = end
    if not branches:
        client.transcript.prompts[0] = (100, 101)
        client.transcript.between.append(())
        client.transcript.turns.append(Written((EOS,), truncated=True))
    client.is_cut = cut
    return Episode(client, None, EpisodeError("no tool") if failed else None)


def no_turn(prompt_tokens: int) -> Response:
    return Response(
        np.array([EOS], np.int32),
        np.zeros(1, np.float32),
        True,
        no_routes(prompt_tokens + 1, FACTS).astype(np.int16),
        versions=np.full(1, VERSION),
    )


# The branches of an episode, and the kinds of its tokens. p: prompt; R: written by the policy; r:
# between turns; x: written in an episode that has failed; .: a token in place of a turn that never
# began.
EPISODES = {
    "of one turn": (episode([(2, [(0, 3)])]), "ppRRR"),
    "of turns": (episode([(3, [(0, 2), (1, 2), (2, 1)])]), "pppRRrRRrrR"),
    "of branches": (
        episode([(3, [(0, 2), (1, 2)]), (4, [(0, 1)]), (1, [(0, 2), (2, 1)])]),
        "pppRRrRRppppRpRRrrR",
    ),
    "cut by a limit": (episode([(1, [(0, 2), (3, 2)])], cut=True), "pRRrrrRR"),
    "failed": (episode([(2, [(0, 2), (1, 1)])], failed=True), "ppxxrx"),
    "failed at once": (episode([], failed=True), "pp."),
}


def test_episodes_of_every_kind_stand_end_to_end() -> None:
    played = [played_episode(each, no_turn) for each, _ in EPISODES.values()]
    group = assemble(played, range(12, 18), 6, has_episodes=True)
    kinds = "".join(kind for _, kind in EPISODES.values())
    ids = np.concatenate([100 + np.arange(len(kind)) for _, kind in EPISODES.values()])
    ids[-1] = EOS
    assert group.tokens.tolist() == ids.tolist()
    assert group.in_response.tolist() == [kind != "p" for kind in kinds]
    assert group.prompt_lengths.tolist() == [2, 3, 8, 1, 2, 2]
    assert group.response_lengths.tolist() == [3, 8, 11, 7, 4, 1]
    response, marks = ids[group.in_response], np.array([kind for kind in kinds if kind != "p"])
    by_policy = np.isin(marks, ["R", "x"])
    assert group.sampled.tolist() == (marks == "R").tolist()
    assert group.rollout_logprobs.tolist() == np.where(by_policy, response / 8, 0).tolist()
    # A token between two turns has the version of the next turn.
    follows = [int(np.flatnonzero(by_policy[n:])[0]) + n for n in range(len(marks) - 1)]
    assert group.versions.tolist() == [*(response[follows] * 2), VERSION]
    assert group.truncated.tolist() == [False, False, False, True, False, True]
    assert group.sample_index.tolist() == [*range(12, 18)] and group.number == 2
    # A token has the experts of the first turn in which it was an input. The last token of a branch
    # has no experts.
    ends = [n for n in range(len(kinds)) if kinds[n] not in "pr" and (kinds + "p")[n + 1] == "p"]
    experts = np.where(np.isin(np.arange(len(ids)), [*ends, len(ids) - 3, len(ids) - 2]), 0, ids)
    assert (group.routes == experts[:, None, None]).all()
    assert group.routes.shape == (len(ids), LAYERS, TOP_K)
    assert np.isnan(group.rewards).all() and group.turns.tolist() == [0] * 6


@pytest.mark.parametrize("with_routes", [True, False])
def test_a_single_turn_is_an_episode_of_one_turn(with_routes: bool) -> None:
    lengths = (3, 1, 4)
    turns = [response(100, np.arange(102, 102 + n), with_routes) for n in lengths]
    prompt = np.array([100, 101], np.int32)
    single = assemble([played_turn(prompt, t) for t in turns], [3, 4, 5], 3, has_episodes=False)
    episodes = [
        episode([(2, [(0, n)])], with_routes, cut=t.truncated) for n, t in zip(lengths, turns)
    ]
    whole = assemble(
        [played_episode(e, no_turn) for e in episodes], [3, 4, 5], 3, has_episodes=True
    )
    assert whole.in_response.tolist() == [kind == "R" for kind in "ppRRRppRppRRRR"]
    assert whole.sampled.all()
    whole.in_response = whole.sampled = None
    for name in COLUMNS:
        np.testing.assert_equal(getattr(single, name), getattr(whole, name), name)
    assert (single.routes is not None) == with_routes
    assert single.truncated.tolist() == [False, False, True]


def test_each_rank_adds_the_routes_of_its_layers_by_the_places_of_the_turns() -> None:
    """The result equals the result with a server, which returns the routes of each turn. Each round
    of the engine has turns of several episodes."""
    episodes = [each for each, _ in EPISODES.values()]
    rounds: list[list[Any]] = [[], [], [], [], []]
    expected = assemble(
        [played_episode(each, no_turn) for each in episodes], range(6), 6, has_episodes=True
    )
    for each in episodes:
        for number, turn in enumerate(each.client.transcript.turns):
            if turn.source is not None:
                turn.source.place = number, len(rounds[number])
                rounds[number].append(turn.source)

    def nothing(prompt_tokens: int) -> Any:
        return barrier.MegatronTurn(np.array([EOS]), np.zeros(1), truncated=True, place=None)

    for turns in rounds:
        for source in turns:
            source.versions = None
    batches = [batch_of(turns) for turns in rounds if turns]
    for turns in rounds:
        for source in turns:
            source.routes = None
    played = [played_episode(each, nothing) for each in episodes]
    assert assemble(played, range(6), 6, has_episodes=True).routes is None
    found = barrier.routes_of(barrier.places_of(played), batches)
    assert found.dtype == np.int16 and (found == expected.routes).all()


def batch_of(turns: list[Response]) -> RolloutBatch:
    """A call of the engine, with the columns that its routes need."""
    lengths = torch.tensor([len(turn.routes) for turn in turns])
    empty = torch.empty(0)
    responses = torch.tensor([len(turn.token_ids) for turn in turns])
    routes = torch.from_numpy(np.concatenate([turn.routes for turn in turns]))
    return RolloutBatch(
        empty, lengths - responses, responses, empty, empty, empty, empty, routes=routes
    )


def test_a_rank_without_prompts_has_the_columns_of_the_others() -> None:
    """The columns must exist, because ranks exchange them one by one."""
    for has_episodes in (True, False):
        group = assemble([], [], 4, has_episodes=has_episodes)
        assert len(group.tokens) == 0 and group.tokens.dtype == np.int32
        assert (group.in_response is not None) == (group.sampled is not None) == has_episodes
