"""Episodes that servers drew, as the bank keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gspo_megatron.environments.episode import Client, Episode, Limits, Written
from gspo_megatron.rollout.vllm.episodes import episode_columns, group_columns, joined_turns
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response
from gspo_megatron.types import Prompt


def episode(branches: list[tuple[int, list[tuple[int, int]]]], with_routes: bool) -> Episode:
    """branches: tokens of the prompt, and of what stands before each turn and the turn. Tokens are
    numbered through; what a server says of a token has its number."""
    client = Client(Prompt("p", "a", "f:1"), Limits(9, 99), None, None)  # type: ignore[arg-type]
    start = 100
    for prompt, turns in branches:
        first, end = start, start + prompt
        client.prompts[len(client.turns)] = tuple(range(start, end))
        for between, length in turns:
            client.inserted.append(tuple(range(end, end + between)))
            ids, end = np.arange(end + between, end + between + length), end + between + length
            routes = np.arange(first, end)[:, None, None].copy() if with_routes else None
            response = Response(ids, ids / 8, False, routes, versions=ids * 2)
            client.turns.append(Written(tuple(ids.tolist()), False, source=response))
        start = end
    return Episode(client, None)


@pytest.mark.parametrize("with_routes", [True, False])
def test_branches_are_kept_in_their_order(with_routes: bool) -> None:
    episodes = [
        episode([(3, [(0, 2), (1, 2)]), (4, [(0, 1)]), (1, [(0, 2), (2, 1)])], with_routes),
        episode([(2, [(0, 3)])], with_routes),
    ]
    columns: dict[str, Any] = group_columns((), [joined_turns(e) for e in episodes], 7, [14, 15])
    columns |= episode_columns(episodes)
    kinds = "pppRRrRRppppRpRRrrRppRRR"  # R: what the policy wrote
    ids = np.concatenate([100 + np.arange(19), 100 + np.arange(5)])
    assert columns["tokens"].tolist() == ids.tolist()
    assert columns["in_response"].tolist() == [kind != "p" for kind in kinds]
    assert columns["prompt_lengths"].tolist() == [8, 2]
    assert columns["response_lengths"].tolist() == [11, 3]
    response = ids[columns["in_response"]]
    sampled = np.array([kind == "R" for kind in kinds if kind != "p"])
    assert columns["sampled"].tolist() == sampled.tolist()
    assert columns["rollout_logprobs"].tolist() == np.where(sampled, response / 8, 0).tolist()
    assert (columns["versions"][sampled] == response[sampled] * 2).all()
    assert columns["sample_index"].tolist() == [14, 15]
    if with_routes:
        assert columns["routes"][:, 0, 0].tolist() == ids.tolist()
    else:
        assert "routes" not in columns
