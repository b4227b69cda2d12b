"""The rules of requests, tested without a server: seeds, numbers, limits and columns. A recorder
takes the place of the servers. Its tokens show the arguments of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_megatron.data import tokenizers
from gspo_megatron.environments.episode import (
    Client,
    Episode,
    EpisodeLimits,
    EpisodeRunner,
    LimitReached,
    Trajectory,
)
from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.store import read_groups
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.episodes import ServedRequests
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response
from gspo_megatron.types import Prompt
from tests.unit.rollout.double import EXPERTS, LAYERS, TOP_K, fleet_settings

LONGEST = 20  # the longest sequence of the servers, in tokens
EOS = 2
ROWS = 8  # The file has 8 prompts. Prompt n has n + 1 tokens of the value 10 + n.
GROUP = 3
DRAW = RolloutRequest(
    name="step_00000001_0",
    key="data.prompts",
    rows=[4, 0, 2],
    first=0,
    per_prompt=GROUP,
    sampling=Sampling(max_tokens=6),
    seed=7,
    version=3,
)


class Tokenizer:
    """A tokenizer in which each token is a character."""

    eos_id, eos_ids = EOS, (EOS,)
    decode_response = tokenizers.Tokenizer.decode_response

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@dataclass
class Recorder:
    """Takes requests in place of the fleet of servers. A response has `length` tokens, or fewer if
    the limit of the request is smaller."""

    length: int = 4
    with_routes: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = fleet_settings(with_routes=self.with_routes, longest=LONGEST)

    async def generate_all(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        seeds: Sequence[Any],
        version: int,
        draw: str,
    ) -> list[Response]:
        asked = {"prompt": tuple(prompt), "sampling": sampling, "seeds": [*map(tuple, seeds)]}
        self.requests.append({**asked, "version": version, "draw": draw})
        await asyncio.sleep(0)
        return [self._response(len(prompt), sampling["max_tokens"], seed) for seed in seeds]

    def _response(self, before: int, allowed: int, seed: Sequence[int]) -> Response:
        count = min(self.length, allowed)
        assert count > 0, "vLLM refuses a request for no token"
        ids = np.full(count, 100 + sum(seed) % 20, np.int32)
        routes = None
        if self.with_routes:
            routes = np.full((before + count, LAYERS, TOP_K), seed[1] % EXPERTS, np.uint8)
        versions = np.full(count, 3, np.int32)
        logprobs = np.full(count, -0.5, np.float32)
        return Response(ids, logprobs, count < self.length, routes=routes, versions=versions)

    def seeds(self) -> list[tuple[int, ...]]:
        return [seed for request in self.requests for seed in request["seeds"]]


class Unscored:
    """A scorer that gives no rewards, and collects the episodes of the groups."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    async def score(
        self,
        make: Callable[[], RolloutGroup],
        prompt: Prompt,
        then: Callable[[RolloutGroup], None],
        key: str,
        episodes: Sequence[Episode] = (),
    ) -> None:
        self.episodes += episodes
        then(make())


def requests_of(
    folder: Path, pool: Any, scorers: Any, runner: EpisodeRunner | None = None
) -> ServedRequests:
    prompts = [Prompt("p", "", f"f:{n}", {}, (10 + n,) * (n + 1)) for n in range(ROWS)]
    stops = {"stop_token_ids": [EOS]}
    return ServedRequests(pool, scorers, {DRAW.key: prompts}, stops, folder, "o", runner)


async def ended(draws: ServedRequests, draw: RolloutRequest) -> dict[str, Any]:
    """Make a request, and wait until it ends. Returns its status."""
    running = draws.begin(draw)
    assert running.task is not None
    await running.task
    return running.status()


def drawn(
    folder: Path,
    pool: Recorder,
    *draws: RolloutRequest,
    environment: Any = None,
    limits: EpisodeLimits | None = None,
) -> tuple[list[dict[int, RolloutGroup]], list[Episode]]:
    """The groups of these requests, by number, and the episodes of all groups."""
    runner = None
    if environment is not None:
        tokenizer: Any = Tokenizer()
        runner = EpisodeRunner(environment, tokenizer, limits or EpisodeLimits(9, 12))
    scorers = Unscored()

    async def run() -> None:
        all_draws = requests_of(folder, pool, scorers, runner)
        for draw in draws:
            assert (await ended(all_draws, draw))["error"] is None

    asyncio.run(run())
    return [read_groups(folder / f"{draw.name}.groups") for draw in draws], scorers.episodes


class Talk:
    """An environment with three turns. Between two turns is the text "x"."""

    async def rollout(self, client: Client, task: Prompt) -> None:
        await client.generate(max_tokens=2)
        await client.generate(text="x", max_tokens=2)
        await client.generate(text="x", max_tokens=2)


# Seeds


def test_a_request_names_its_draw_and_a_seed_is_of_draw_and_sample(
    tmp_path: Path,
) -> None:
    pool = Recorder()
    drawn(tmp_path, pool, DRAW)
    assert sorted(pool.seeds()) == [(DRAW.seed, sample) for sample in range(9)]
    assert {(each["version"], each["draw"]) for each in pool.requests} == {(3, DRAW.name)}
    by_prompt = {request["prompt"]: request["seeds"] for request in pool.requests}
    assert by_prompt == {
        (10 + row,) * (row + 1): [(DRAW.seed, GROUP * number + n) for n in range(GROUP)]
        for number, row in enumerate(DRAW.rows)
    }


def test_each_turn_has_a_seed_of_its_own(tmp_path: Path) -> None:
    pool = Recorder()
    drawn(tmp_path, pool, DRAW, environment=Talk())
    # the first turn has the same seed as a response without an environment
    turns = [(), (1,), (2,)]
    wanted = [(DRAW.seed, sample, *turn) for sample in range(9) for turn in turns]
    assert sorted(pool.seeds()) == sorted(wanted)


@pytest.mark.parametrize("environment", [None, Talk()])
def test_no_two_responses_of_a_step_with_refills_or_of_two_steps_share_a_seed(
    tmp_path: Path, environment: Any
) -> None:
    refill = replace(DRAW, name="step_00000001_1", first=3, rows=[4, 5, 6])
    later = replace(DRAW, name="step_00000002_0", seed=DRAW.seed + 1)
    pool = Recorder()
    drawn(tmp_path, pool, DRAW, refill, later, environment=environment)
    seeds = pool.seeds()
    assert len(seeds) == 27 * (1 if environment is None else 3)
    assert len({*seeds}) == len(seeds)


# Numbers


@pytest.mark.parametrize("environment", [None, Talk()])
def test_a_refill_goes_on_with_the_numbers_of_the_step(tmp_path: Path, environment: Any) -> None:
    """The refill has new rows. The numbers of its groups and samples follow those of the step's
    earlier requests."""
    refill = replace(DRAW, name="step_00000001_1", first=3, rows=[6, 1])
    pool = Recorder()
    (groups, more), _ = drawn(tmp_path, pool, DRAW, refill, environment=environment)
    assert (sorted(groups), sorted(more)) == ([0, 1, 2], [3, 4])
    for number, group in {**groups, **more}.items():
        row = [*DRAW.rows, *refill.rows][number]
        assert group.group_index.tolist() == [number] * GROUP
        assert group.sample_index.tolist() == [GROUP * number + n for n in range(GROUP)]
        assert group.prompt_lengths.tolist() == [row + 1] * GROUP
        assert group.tokens[: row + 1].tolist() == [10 + row] * (row + 1)


# Bounds


def test_a_response_has_the_room_that_the_servers_have(tmp_path: Path) -> None:
    """The servers' longest sequence is a second limit. After a long prompt it leaves fewer tokens
    for the response than the configuration allows."""
    draw = replace(DRAW, rows=[0, 7], sampling=Sampling(max_tokens=15, temperature=0.5))
    pool = Recorder()
    drawn(tmp_path, pool, draw)
    allowed = {len(each["prompt"]): each["sampling"] for each in pool.requests}
    assert {length: given["max_tokens"] for length, given in allowed.items()} == {1: 15, 8: 12}
    for given in allowed.values():
        assert given["temperature"] == 0.5 and given["stop_token_ids"] == [EOS]
        assert (given["top_p"], given["top_k"]) == (1.0, 0) and "seed" not in given


def test_a_late_turn_has_the_room_that_is_left(tmp_path: Path) -> None:
    """In this test only the servers' longest sequence is a limit, because the limits of the
    configuration are larger."""

    class Long:
        async def rollout(self, client: Client, task: Prompt) -> None:
            await client.generate()
            await client.generate(text="x" * 5)

    pool = Recorder(length=9)
    draw = replace(DRAW, rows=[3])
    drawn(tmp_path, pool, draw, environment=Long(), limits=EpisodeLimits(9, 50))
    sizes = {(len(each["prompt"]), each["sampling"]["max_tokens"]) for each in pool.requests}
    assert sizes == {(4, 16), (4 + 9 + 5, 2)}


# Columns


class Ends:
    """An environment whose end depends on the number of tokens in the prompt."""

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        kind = len(task.token_ids)
        # The environment's own max_tokens cuts off the turn. This is not a limit of the episode.
        if kind == 1:
            await client.generate(max_tokens=2)
        elif kind == 2:  # the last turn is complete, and the episode has no room for another turn
            await client.generate()
            await client.generate(text="x" * 4)
            await client.generate(text="x" * 9)
        elif kind == 3:  # the episode also has no room, but the environment handles the limit
            await client.generate()
            try:
                await client.generate(text="x" * 30)
            except LimitReached:
                return Trajectory(reward=1.0)
        elif kind == 4:  # the limit of the episode cuts off the last turn
            await client.generate()
            await client.generate(text="x" * 6)
        else:
            await client.generate()
        return None


def test_an_episode_is_cut_where_its_own_limit_ended_it(tmp_path: Path) -> None:
    pool = Recorder(length=4)
    draw = replace(DRAW, rows=[0, 1, 2, 3, 4])
    [groups], _ = drawn(tmp_path, pool, draw, environment=Ends())
    cut = [group.truncated.tolist() for _, group in sorted(groups.items())]
    assert cut == [[False] * 3, [True] * 3, [True] * 3, [True] * 3, [False] * 3]


class Fails:
    """An environment that fails before its first turn if the prompt has one token."""

    async def rollout(self, client: Client, task: Prompt) -> None:
        if len(task.token_ids) == 1:
            raise ConnectionError("no tool")
        await client.generate()


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_an_episode_without_a_turn_has_a_row_of_routes_for_each_token(
    tmp_path: Path, temperature: float
) -> None:
    """Groups with such an episode and groups without one are joined. So the columns of every group
    must fit its tokens."""
    pool = Recorder(with_routes=temperature > 0)
    pool.settings = replace(pool.settings, needs=replace(pool.settings.needs, with_routes=True))
    draw = replace(DRAW, rows=[0, 5], sampling=Sampling(6, temperature=temperature))
    [groups], episodes = drawn(tmp_path, pool, draw, environment=Fails())
    assert sum(episode.error is not None for episode in episodes) == GROUP
    for number, group in groups.items():
        lengths = group.prompt_lengths + group.response_lengths
        assert len(group.tokens) == len(group.in_response) == lengths.sum()
        response = group.response_lengths.sum()
        for name in ("sampled", "rollout_logprobs", "versions"):
            assert len(getattr(group, name)) == response
        if temperature > 0:
            assert group.routes.shape == (lengths.sum(), LAYERS, TOP_K)
            assert group.routes.any() == (number == 1)
        else:
            assert group.routes is None
    failed = groups[0]
    assert failed.tokens.tolist() == [10, EOS] * GROUP
    assert not failed.sampled.any() and failed.truncated.all()
    assert failed.versions.tolist() == [DRAW.version] * GROUP


def test_status_counts_groups_and_tokens(tmp_path: Path) -> None:
    """Rank 0 shows these numbers while it waits for responses."""
    recorder = Recorder()

    async def run() -> dict[str, Any]:
        draws = requests_of(tmp_path, recorder, Unscored())
        running = draws.begin(DRAW)
        assert draws.begin(DRAW) is running and not running.status()["done"]
        return await ended(draws, DRAW)

    tokens = 9 * recorder.length
    expected = {"finished": 3, "tokens": tokens, "scoring": 0, "done": True, "error": None}
    assert asyncio.run(run()) == expected


def test_a_draw_begins_again_where_it_failed_or_asks_for_something_else(tmp_path: Path) -> None:
    """A finished group is used again only if the same request is repeated."""

    class Refusing(Recorder):
        refuses = True

        async def generate_all(self, *asked: Any) -> list[Response]:
            # group 1 fails after the other groups are finished
            if self.refuses and len(asked[0]) == 1:
                await asyncio.sleep(0.05)
                raise RolloutError("no server is left")
            return await super().generate_all(*asked)

    recorder = Refusing()

    async def run() -> None:
        draws = requests_of(tmp_path, recorder, Unscored())
        failed = await ended(draws, DRAW)
        assert failed["error"] == {"kind": "RolloutError", "text": "no server is left"}
        assert failed["finished"] == 2 and len(recorder.seeds()) == 6
        recorder.refuses = False
        assert (await ended(draws, DRAW))["error"] is None
        # three more responses are requested, for the missing group
        assert len(recorder.seeds()) == 9
        assert (await ended(draws, DRAW))["error"] is None
        assert len(recorder.seeds()) == 9  # no group is missing, so nothing is requested
        other = await ended(draws, replace(DRAW, rows=[1, 2, 3]))
        assert other["finished"] == 3 and len(recorder.seeds()) == 18

    asyncio.run(run())
    groups = read_groups(tmp_path / f"{DRAW.name}.groups")
    assert [groups[n].prompt_lengths[0] for n in range(3)] == [2, 3, 4]
