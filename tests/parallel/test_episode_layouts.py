"""Episodes of several turns with the sharded model. The episodes are the same on all layouts. The
tokens, log-probs and experts of each turn are those with which the turn was generated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from gspo_megatron.config import Config
from gspo_megatron.data import tokenizers
from gspo_megatron.data.chat import Encoded, Rendered
from gspo_megatron.environments.episode import Client, EpisodeLimits, EpisodeRunner, Trajectory
from gspo_megatron.errors import UnplayableError
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import Prompt
from tests.parallel.models import VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool

PER_PROMPT, COUNT, PAD_ID, EOS_ID = 4, 6, 0, 2
LIMITS = EpisodeLimits(turns=4, response_tokens=23)
SAMPLING = Sampling(max_tokens=LIMITS.response_tokens, temperature=0.7)
# With sums in another order, fp32 logits of size 10 differ by 1e-6. A wrong position or token
# changes them by 0.1.
TOLERANCE = 1e-5


class Tokenizer:
    """A tokenizer of characters."""

    eos_ids, eos_id = (EOS_ID,), EOS_ID
    decode_response = tokenizers.Tokenizer.decode_response

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def render(self, messages: list[dict[str, str]], **_: Any) -> Rendered:
        return Rendered(messages[-1]["content"], None)

    def encode_rendered(self, text: str, quoted: Sequence[Any] = ()) -> Encoded:
        return Encoded(self.encode(text), [], [])


class Echo:
    """An environment that repeats a part of each turn. Its episodes end after one turn, go on until
    a limit, begin again with a short prompt, take a turn back, or fail at once or later."""

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        if task.answer == "fails at once":
            raise ConnectionError("no tool")
        turn = await client.generate(max_tokens=4)
        while sum(turn.token_ids) % 3:
            text = chr(3 + len(turn.token_ids)) + turn.text[:2][::-1]
            if task.answer == "forgets" and len(client.transcript.turns) == 2:
                client.begin([{"role": "user", "content": text}])
                text = ""
            if task.answer == "takes back" and len(client.transcript.turns) == 1:
                position = client.position()
                await client.generate(text=text, max_tokens=5)
                client.go_back(position)
            turn = await client.generate(text=text, max_tokens=5)
            if task.answer == "fails later" and len(turn.token_ids) % 2:
                raise ConnectionError("no tool")
        return Trajectory(turn_rewards=[float(n) for n in range(len(client.transcript.turns))])


def tasks() -> list[Prompt]:
    draw = random.Random(5)
    ids = [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(n)) for n in (5, 1, 8, 3, 6, 4)]
    answers = ["", "forgets", "fails at once", "fails later", "forgets", "takes back"]
    rows = zip(ids, answers, strict=True)
    return [Prompt("p", answer, f"f:{n}", token_ids=t) for n, (t, answer) in enumerate(rows)]


def play(config: Config) -> dict[int, dict[str, Any]]:
    """This rank's episodes, by the numbers of their samples."""
    policy = build_on_ranks(config)
    layers = attach_hooks(policy.models)
    engine = MegatronEngine(policy, pad_id=PAD_ID, eos_id=EOS_ID, record_routes=True)
    runner = EpisodeRunner(Echo(), Tokenizer(), LIMITS)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = range(group.rank(), COUNT, group.size())
    batched = MegatronRollouts(engine, runner, torch.device("cpu"), layers)
    found = batched.generate({n: tasks()[n] for n in mine}, PER_PROMPT, SAMPLING, seed=11)
    shared = batched.share(found)
    assert shared.layers.tolist() == [*layers]
    batch = shared.to_batch(torch.device("cpu"))
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    tokens, routes = batch.tokens.split(lengths), batch.routes.split(lengths)
    kinds = batch.in_response.split(lengths)
    of_response = (
        values.split(batch.response_lengths.tolist())
        for values in (batch.rollout_logprobs, batch.mask)
    )
    columns = zip(tokens, routes, kinds, *of_response, batch.truncated, strict=True)
    rows = {}
    for sample, (ids, experts, kind, logprobs, mask, cut) in zip(
        batch.sample_index.tolist(), columns, strict=True
    ):
        rows[sample] = {
            "tokens": ids.tolist(),
            "kinds": kind.tolist(),
            "mask": mask.tolist(),
            "logprobs": logprobs.tolist(),
            "truncated": bool(cut),
            "routes": experts.tolist(),
        }
    for sample, episode in zip(
        batch.sample_index.tolist(), found.episodes, strict=bool(found.episodes)
    ):
        given = episode.given
        rows[sample]["outcome"] = str(episode.error or "") or (
            None if given is None else [list(given.rewards), list(given.ends)]
        )
    assert batch.prompt_lengths.tolist() == [int((~kind).sum()) for kind in kinds]
    assert batch.group_index.tolist() == [n for n in mine for _ in range(PER_PROMPT)]
    return rows


def branches_of(row: dict[str, Any]) -> list[tuple[int, int, int]]:
    """For each branch: its start, the start of its response, and its end."""
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(row["kinds"])]
    ends = [0, *itertools.accumulate(length for _, length in runs)]
    assert [kind for kind, _ in runs] == [False, True] * (len(runs) // 2)
    return list(zip(ends[::2], ends[1::2], ends[2::2]))


def continued(config: Config, rows: dict[int, dict[str, Any]]) -> dict[int, list[Any]]:
    """The log-probs of the responses and the experts of all tokens, computed by one pass for each
    branch."""
    policy = build_on_ranks(config)
    attach_hooks(policy.models)
    policy.eval()
    found: dict[int, list[Any]] = {}
    for sample, row in rows.items():
        found[sample] = [[], []]
        for start, middle, end in branches_of(row):
            tokens = row["tokens"][start:end]
            engine = MegatronEngine(policy, pad_id=PAD_ID, eos_id=(), record_routes=True)
            batch = engine.generate(Requests([tokens], [0]), Sampling(1, temperature=0.0), seed=0)
            ids = torch.tensor([tokens])
            with torch.no_grad():
                hidden = policy.models[0](
                    input_ids=ids,
                    position_ids=torch.arange(ids.shape[1])[None],
                    attention_mask=None,
                )
                logits = policy.models[0].next_token_logits(hidden[0]) / SAMPLING.temperature
            of_all = torch.log_softmax(logits.double(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            found[sample][0] += of_all.tolist()[middle - start - 1 :]
            found[sample][1] += batch.routes[: end - start].tolist()
    return found


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> dict[int, dict[str, Any]]:
    [rows] = pool.each(odd_moe("tp=1"), play)
    return rows


def test_episodes_of_one_rank_are_of_all_kinds(of_one_rank: dict[int, dict[str, Any]]) -> None:
    assert sorted(of_one_rank) == [*range(COUNT * PER_PROMPT)]
    outcomes = [row["outcome"] for row in of_one_rank.values()]
    failed = [text for text in outcomes if isinstance(text, str)]
    assert len(failed) >= 2 and all("ConnectionError: no tool" in text for text in failed)
    turns = [len(given[0]) for given in outcomes if isinstance(given, list)]
    assert len(set(turns)) > 1, "episodes of several lengths"
    assert None in outcomes, "ended by a limit"
    assert {len(branches_of(row)) for row in of_one_rank.values()} == {1, 2}
    for row in of_one_rank.values():
        response = [n for n, kind in zip(row["tokens"], row["kinds"]) if kind]
        *_, last = branches_of(row)
        # the start of the last branch in the response
        last_branch = len(response) - (last[2] - last[1])
        assert len(response) == len(row["mask"]) == len(row["logprobs"])
        assert len(response) <= LIMITS.response_tokens
        if not isinstance(row["outcome"], str):
            assert row["mask"][0] and row["mask"][-1]
        if isinstance(row["outcome"], list):
            starts, ends = [0, *row["outcome"][1]], row["outcome"][1]
            assert ends[-1] == len(response)
            turns = [response[start:end] for start, end in zip(starts, ends)]
            for before, turn, end in zip(turns, turns[1:], ends):
                own = [n for n, mask in zip(before, row["mask"][end - len(before) : end]) if mask]
                said = [3 + len(own), *reversed([n for n in own if n != EOS_ID][:2])]
                if end == last_branch:
                    assert row["tokens"][last[0] : last[1]] == said
                    said = []
                assert turn[: len(said)] == said
                of_turn = row["mask"][end : end + len(turn)]
                assert of_turn == [False] * len(said) + [True] * (len(turn) - len(said))


def test_log_probs_and_experts_are_those_of_the_whole_sequence(
    pool: Pool, of_one_rank: dict[int, dict[str, Any]]
) -> None:
    whole = pool.on(odd_moe("tp=1"), continued, rows=of_one_rank)
    for sample, row in of_one_rank.items():
        logprobs, experts = whole[sample]
        if len(row["mask"]) == 1 and not row["mask"][0]:
            continue  # the episode failed before its first turn
        drawn = [
            (own, true)
            for own, true, mask in zip(row["logprobs"], logprobs, row["mask"], strict=True)
            if mask
        ]
        for own, true in drawn:
            assert own == pytest.approx(true, abs=TOLERANCE)
        # The model never got these tokens as input.
        last = {end - 1 for _, _, end in branches_of(row)}
        for number, (own, true) in enumerate(zip(row["routes"], experts, strict=True)):
            assert number in last or own == true


class Unplayable:
    """An environment whose setup fails on one of the model replicas."""

    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate(max_tokens=2)
        if task.source == "f:1":
            raise UnplayableError("the bridge is gone")


def fail(config: Config) -> str:
    policy = build_on_ranks(config)
    engine = MegatronEngine(policy, pad_id=PAD_ID, eos_id=EOS_ID)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = range(group.rank(), 2, group.size())
    runner = EpisodeRunner(Unplayable(), Tokenizer(), LIMITS)
    batched = MegatronRollouts(engine, runner, torch.device("cpu"))
    with pytest.raises(UnplayableError) as raised:
        batched.generate({n: tasks()[n] for n in mine}, 1, SAMPLING, seed=11)
    return str(raised.value)


def test_all_ranks_are_told_that_no_episode_can_be_played(pool: Pool) -> None:
    """All ranks save the run together after this error."""
    assert pool.each(odd_moe("tp=2,dp=2"), fail) == ["the bridge is gone"] * 4


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,pp=2", "dp=4,ep=4", "cp=2", "pp=2,vpp=2"])
def test_episodes_are_those_of_one_rank(
    pool: Pool, of_one_rank: dict[int, dict[str, Any]], layout: str
) -> None:
    by_rank = pool.each(odd_moe(layout), play)
    assert {sample for rows in by_rank for sample in rows} == of_one_rank.keys()
    for rows in by_rank:
        for sample, row in rows.items():
            expected = of_one_rank[sample]
            for name in ("tokens", "kinds", "mask", "truncated"):
                assert row[name] == expected[name], name
            assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=TOLERANCE)
            if "outcome" in row:  # only the rank that runs the environment has an outcome
                assert row["outcome"] == expected["outcome"]
    told = {sample for rows in by_rank for sample, row in rows.items() if "outcome" in row}
    assert told == of_one_rank.keys()
