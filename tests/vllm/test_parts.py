"""Several responses to one request, from the package's middleware in a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.rollout.vllm.client import ServerClient, connected_session
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, ModelFacts, Response
from tests.fleets import ScheduledFleet
from tests.vllm.servers import Server
from tests.vllm.test_weights import VOCABULARY, served, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FACTS = ModelFacts(VOCABULARY, 4, 8, 2, (0, 1, 2, 3))
PROMPT = np.random.default_rng(11).integers(0, VOCABULARY, 37).tolist()
SAMPLING = {"temperature": 0.8, "max_tokens": 200, "stop_token_ids": [5, 6], "ignore_eos": True}
SEEDS = [(3, number) for number in range(8)]


def assert_equal(first: Response, second: Response) -> None:
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert first.truncated == second.truncated and first.spans == second.spans
    assert first.routes is not None and second.routes is not None
    assert first.routes.dtype == second.routes.dtype == np.uint8
    np.testing.assert_array_equal(first.routes, second.routes)


def test_a_part_is_the_responses_that_vllm_gives_one_by_one(vllm_server: Server) -> None:
    """The single requests and the group request run one after the other, because rounding depends
    on the size of a batch."""

    async def draw() -> tuple[list[Response], list[Response]]:
        async with connected_session() as session:
            client = ServerClient(vllm_server.url, session)
            assert await client.gives_parts(seconds=60)
            parts, singles = [], []
            for number, seed in enumerate(SEEDS):
                part = GroupPart(PROMPT, SAMPLING, FACTS, True, [f"{number:032x}"], [seed])
                async with aclosing(client.generate_part(part)) as answers:
                    parts += [each async for ended in answers for _, each in ended]
                singles.append(await client.generate(replace(part, names=[""]), seconds=60))
            return parts, singles

    parts, singles = asyncio.run(draw())
    for part, single in zip(parts, singles, strict=True):
        assert_equal(part, single)
    assert len({tuple(each.token_ids.tolist()) for each in singles}) == len(SEEDS)
    assert {each.truncated for each in singles} == {False, True}


def test_a_whole_group_is_one_request(
    vllm_server: Server, tiny_qwen3_moe: Callable[[int], Path]
) -> None:
    async def work(fleet: ScheduledFleet) -> list[list[Response]]:
        fleet.change_settings(max_staleness=1)
        await fleet.update(weights(0, tiny_qwen3_moe(0)))
        [server] = fleet.servers
        assert server.abilities.gives_parts
        found = []
        for gives_parts in (True, False):
            server.abilities = replace(server.abilities, gives_parts=gives_parts)
            found.append(await fleet.scheduler.generate_all(PROMPT, SAMPLING, SEEDS, 0))
        assert fleet.scheduler.resubmitted == 0 and not fleet.problems()
        return found

    for part, single in zip(*served([vllm_server], work), strict=True):
        assert part.token_ids.tolist() == single.token_ids.tolist()
        np.testing.assert_allclose(part.logprobs, single.logprobs, atol=1e-5)
        assert part.versions is not None and set(part.versions.tolist()) == {0}
        assert len(part.versions) == len(part.token_ids)


def test_what_nobody_wants_any_more_is_not_drawn_on(vllm_server: Server) -> None:
    async def requests(client: ServerClient) -> float:
        return (await client.figures(seconds=60, in_short=True))["num_requests_running"]

    async def until(client: ServerClient, count: int) -> None:
        while await requests(client) != count:
            await asyncio.sleep(0.05)

    async def work() -> None:
        async with connected_session() as session:
            client = ServerClient(vllm_server.url, session)
            names = [f"{number:032x}" for number in range(100, 103)]
            sampling = {**SAMPLING, "max_tokens": 1900, "stop_token_ids": []}
            part = GroupPart(PROMPT, sampling, FACTS, True, names, SEEDS[:3])
            answers = client.generate_part(part)
            drawing = asyncio.create_task(anext(answers))
            await asyncio.wait_for(until(client, 3), 60)
            assert await client.take_back([*names[1:], "0"], seconds=60) == set()
            await asyncio.wait_for(until(client, 1), 60)
            assert not drawing.done()
            drawing.cancel()
            await asyncio.wait([drawing])
            await answers.aclose()
            await asyncio.wait_for(until(client, 0), 60)

    asyncio.run(work())
