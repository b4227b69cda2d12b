"""New weights while requests are in progress. The stand-ins for servers do things at moments that
cannot be chosen with vLLM. tests/vllm/test_spans.py makes such updates with real servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import TAKE_BACK
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import Double, choice_with, fails, plain, until, weights
from tests.unit.rollout.test_faulty_servers import GENERATE, PROMPT, SAMPLING, pooled

pytestmark = pytest.mark.usefixtures("gives_parts")


class Held:
    """Holds back answers until `answers` is set. A probe is answered immediately."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def __call__(self, request: web.Request, answer: Any) -> web.StreamResponse:
        if "request_id" in await request.json():
            await self.answers.wait()
        return await plain(request, answer)


async def begin(
    fleet: ScheduledFleet, doubles: list[Double], count: int
) -> list[asyncio.Task[Any]]:
    """Begin `count` requests, and wait until the servers have all of them."""
    before = sum(len(each.names) for each in doubles)
    calls = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING, 0)) for _ in range(count)]
    await until(lambda: sum(len(each.names) for each in doubles) == before + count)
    return calls


def test_a_request_with_tokens_goes_on_and_one_without_is_sent_again(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        fleet.change_settings(max_staleness=1)
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = held = Held()
        calls = await begin(fleet, doubles, 2)
        double.counts = {double.names[0]: 2}
        await fleet.update(weights(tmp_path, 1))
        held.answers.set()
        goes_on, again = await asyncio.gather(*calls)
        assert goes_on.versions.tolist() == [0, 0, 1, 1, 1, 1]
        assert again.versions.tolist() == [1] * 6
        assert len(double.names) == 3 and fleet.scheduler.resubmitted == 0

    pooled(work, count=1)


def test_an_answer_that_comes_while_new_weights_load_is_of_the_weights_before(
    tmp_path: Path,
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = held = Held()
        [call] = await begin(fleet, doubles, 1)

        async def loads(request: web.Request, answer: Any) -> web.StreamResponse:
            if (await request.json())["method"] == "reload_weights":
                held.answers.set()
                await asyncio.wait([call])  # the response ends before the new weights are checked
            return await plain(request, answer)

        double.faults["/collective_rpc"] = loads
        await fleet.update(weights(tmp_path, 1))
        assert (await call).versions.tolist() == [0] * 6
        assert len(double.names) == 1

    pooled(work, count=1)


def test_no_response_goes_on_with_weights_that_came_in_part(tmp_path: Path) -> None:
    """The stream from rank 0 breaks, and the server gets the weights in a folder. Between the two
    it goes on, perhaps with a part of the new weights."""

    async def breaks(request: web.Request, answer: Any) -> web.StreamResponse:
        is_sent = (await request.json())["method"] == "receive_weights"
        return await (fails(500) if is_sent else plain)(request, answer)

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        fleet.change_settings(max_staleness=1)
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults |= {GENERATE: (held := Held()), "/collective_rpc": breaks}
        [call] = await begin(fleet, doubles, 1)
        double.counts = {double.names[0]: 2}
        fleet.take_weights(replace(weights(tmp_path, 1), stream={}))
        await fleet.update_servers()
        held.answers.set()
        assert (await call).versions.tolist() == [1] * 6
        assert len(double.names) == 2 and fleet.scheduler.resubmitted == 1

    pooled(work, count=1)


@pytest.mark.parametrize("path", ["/collective_rpc", TAKE_BACK])
def test_a_response_that_is_given_up_in_an_update_is_not_generated_again(
    tmp_path: Path, gives_parts: bool, path: str
) -> None:
    """For example, an agent has ended while the policy wrote a turn. The response has no token
    yet."""
    if path == TAKE_BACK and not gives_parts:
        return  # such a server is not asked which responses have ended

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        fleet.change_settings(max_staleness=1)
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = Held()
        [call] = await begin(fleet, doubles, 1)

        async def gives_up(request: web.Request, answer: Any) -> web.StreamResponse:
            if path == TAKE_BACK or (await request.json())["method"] == "reload_weights":
                call.cancel()
                await asyncio.wait([call])
            return await plain(request, {"ended": []} if path == TAKE_BACK else answer)

        (double.front_faults if path == TAKE_BACK else double.faults)[path] = gives_up
        await fleet.update(weights(tmp_path, 1))
        await asyncio.sleep(0.3)
        assert call.cancelled() and len(double.names) == 1
        assert fleet.servers[0].load == fleet.scheduler._queue.places == 0

    pooled(work, count=1)


def test_no_token_of_weights_that_are_not_proven_is_used(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        for each in doubles:
            each.counts = {}
        await fleet.update(weights(tmp_path, 0))
        doubles[1].faults[GENERATE] = held = Held()
        first, call = await begin(fleet, doubles, 2)
        await first
        doubles[1].counts = {doubles[1].names[0]: 2}

        async def another(*_: Any) -> web.StreamResponse:
            # the response becomes complete just before the check of the weights fails
            held.answers.set()
            await asyncio.sleep(0.5)
            assert not call.done()
            return await plain(_[0], {"weight_version": "7"})

        doubles[1].faults["/weight_info"] = another
        await fleet.update(weights(tmp_path, 1))
        # The server that has not failed generated the response again.
        assert (await call).versions.tolist() == [1] * 6
        assert fleet.scheduler.resubmitted == 1 and len(fleet.problems()) == 1

    pooled(work)


def test_versions_that_a_server_tells_are_taken(tmp_path: Path) -> None:
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 6}]

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 3))
        doubles[0].faults[GENERATE] = choice_with(weight_versions=spans)
        response = await fleet.generate(PROMPT, SAMPLING, 3)
        assert response.versions.tolist() == [3, 3, 5, 5, 5, 5]
        spans[1]["end"] = 5
        assert (await fleet.generate(PROMPT, SAMPLING, 3)).versions.tolist() == [3] * 6
        assert fleet.servers[0].bringing is not None
        await fleet.servers[0].bringing
        assert "versions of the weights up to [2, 5], of 6 tokens" in str(fleet.servers[0].why_out)

    pooled(work)


def test_an_older_version_serves_a_draw_that_allows_it(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, _: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 2))
        assert (await fleet.generate(PROMPT, SAMPLING, 1)).versions.tolist() == [2] * 6
        with pytest.raises(asyncio.TimeoutError):
            fleet.servers[0].bringing = asyncio.create_task(asyncio.sleep(60))
            await asyncio.wait_for(fleet.generate(PROMPT, SAMPLING, 3), 0.5)

    pooled(work, count=1)


OUTSIDE = {"data_parallel_external_lb": True, "data_parallel_size_local": 1}


@pytest.mark.parametrize(
    ("layout", "most"),
    [({}, 3), ({"data_parallel_size": 2}, 7), ({"data_parallel_size": 2, **OUTSIDE}, 3)],
)
def test_a_place_is_left_for_the_proof(tmp_path: Path, layout: dict[str, Any], most: int) -> None:
    """A server with data parallelism has places in each of its engines."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        double.sequences = 4
        double.layout |= layout
        fleet.change_settings(max_staleness=1)
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = held = Held()
        calls = await begin(fleet, doubles, most)
        calls.append(asyncio.create_task(fleet.generate(PROMPT, SAMPLING, 0)))
        await asyncio.sleep(0.3)
        assert len(double.names) == most
        held.answers.set()
        await asyncio.gather(*calls)
        assert len(double.names) == most + 1

    pooled(work, count=1)


def test_new_weights_for_a_server_that_still_starts_with_others(tmp_path: Path) -> None:
    """This happens in a restarted service: the responses of the next step are already in the store,
    so the policy is trained while the server starts."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        fleet.take_weights(replace(weights(tmp_path, 0), check=None))
        starting = asyncio.create_task(fleet.update_servers())
        await until(lambda: doubles[0].calls["/resume"])
        assert doubles[0].loaded == "0"
        await asyncio.wait_for(fleet.update(weights(tmp_path, 1)), 20)
        await starting
        assert not fleet.problems() and fleet.servers[0].version == 1
        assert (await fleet.generate(PROMPT, SAMPLING, 1)).versions.tolist() == [1] * 6

    pooled(work, count=1)


def test_of_several_engines_the_counts_of_the_first_are_not_taken_for_all(tmp_path: Path) -> None:
    """vLLM's collective_rpc asks only the first engine, so the counts of all others are unknown."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        for each in doubles:
            each.counts = {}
        doubles[1].layout["data_parallel_size"] = 2
        await fleet.update(weights(tmp_path, 0))
        assert [each.abilities.counts_tokens for each in fleet.servers] == [True, False]

    pooled(work)
