"""The choice of the next request, the number of requests that a server gets, and the time that a
server was without a request."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gspo_megatron.errors import RolloutError
from gspo_megatron.rl.served_rollouts import shares_of_work
from gspo_megatron.rollout.vllm.scheduler import RequestQueue
from gspo_megatron.rollout.vllm.server import RequestWindow
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import parse_metrics
from tests.unit.rollout.double import fleet_of_doubles, plain, until, weights


def test_earlier_draws_go_first_and_none_waits_for_weights_of_another() -> None:
    def choose(newest: int, free: list[int], wanted: int, kept: float, _: int) -> Any:
        return (free.pop(), 1) if wanted <= newest < kept and free else None

    async def run() -> list[str]:
        queue = RequestQueue()
        asked = [
            ("step_00000010_0", 1),
            ("step_00000003_0", 2),
            ("step_00000002_0", 1),
            ("step_00000003_0", 2),
            ("evaluation_00000003", 3),
            ("step_00000002_0", 1),
        ]
        gone: list[str] = []

        async def go(name: str, version: int, number: int) -> None:
            await queue.add(name, version, 1).granted
            gone.append(f"{name} {number}")

        tasks = [asyncio.create_task(go(*each, number)) for number, each in enumerate(asked)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        # For the only server: its weights version and the number of its free slots.
        for newest, room in ((1, 1), (2, 9), (3, 9)):
            queue.admit(partial(choose, newest, [0] * room))
            await asyncio.sleep(0)
        assert queue.places == 0
        return gone

    assert asyncio.run(run()) == [
        "step_00000002_0 5",
        "step_00000003_0 1",
        "step_00000003_0 3",
        "step_00000010_0 0",
        "evaluation_00000003 4",
    ]


def test_a_part_gets_what_there_is_and_later_draws_leave_it_the_place_that_it_waits_for() -> None:
    """Two servers have the weights of versions 1 and 2, and their slots become free one after the
    other. A group request gets slots only if at least three are free."""
    free = {"old": 0, "new": 0}
    versions = {"old": 1, "new": 2}

    def choose(version: int, kept: float, wanted: int) -> Any:
        for name, places in free.items():
            if version <= versions[name] < kept and places >= min(wanted, 3):
                free[name] -= (count := min(places, wanted))
                return name, count
        return None

    async def run() -> None:
        queue = RequestQueue()
        part, single, older = (queue.add(*a) for a in (("a", 2, 8), ("b", 2, 1), ("c", 1, 1)))
        free.update(old=1, new=2)
        queue.admit(choose)
        # The free slots of the new server are kept for the group request, because the old server
        # does not have the weights of version 2.
        assert (part.granted.done(), single.granted.done()) == (False, False)
        assert older.granted.result() == [("old", 1)]
        free.update(old=9, new=5)
        queue.admit(choose)
        assert part.granted.result() == [("new", 5)] and not single.granted.done()
        rest = queue.add("a", 2, 3, first=True)
        other = queue.add("a", 2, 1)
        free["new"] = 4
        queue.admit(choose)
        assert rest.granted.result() == [("new", 3)] and other.granted.result() == [("new", 1)]
        assert queue.places == 1
        queue.remove(single)
        queue.remove(single)
        assert queue.places == 0

    asyncio.run(run())


def test_those_who_wait_learn_that_no_server_is_left() -> None:
    def choose(*_: Any) -> Any:
        raise RolloutError("no server is left")

    async def run() -> list[Any]:
        queue = RequestQueue()
        turns = [queue.add("step_1", 0, 1), queue.add("step_2", 1, 2)]
        queue.admit(choose)
        return await asyncio.gather(*(each.granted for each in turns), return_exceptions=True)

    assert [str(each) for each in asyncio.run(run())] == ["no server is left"] * 2


def look(window: RequestWindow, in_flight: int, usage: float, preemptions: int) -> int:
    told = {"kv_cache_usage_perc": usage, "num_preemptions_total": float(preemptions)}
    window.adjust(told, in_flight)
    return window.size


def test_a_server_gets_fewer_after_preemptions_and_slowly_more() -> None:
    window = RequestWindow(128)
    assert look(window, 128, 0.9, 0) == 128
    assert look(window, 128, 0.9, 3) == 96
    # the number of requests has not yet fallen below the new limit
    assert look(window, 120, 0.9, 5) == 96
    assert look(window, 96, 0.98, 5) == 72
    assert look(window, 72, 0.9, 5) == 72  # the cache is neither full nor has it much room
    # the server has a free slot, so it would not use a higher limit
    assert look(window, 71, 0.5, 5) == 72
    assert [look(window, window.size, 0.5, 5) for _ in range(3)] == [76, 80, 84]
    for _ in range(20):
        look(window, window.size, 0.5, 5)
    assert window.size == 128
    for count in range(6, 40):
        look(window, window.size, 0.9, count)
    assert window.size == 8
    assert look(RequestWindow(3), 3, 1.0, 9) == 3


def test_requests_that_new_weights_preempt_change_nothing() -> None:
    window = RequestWindow(128)
    assert [look(window, 100, 0.3, count) for count in (50, 100, 150)] == [128] * 3


def test_the_engines_of_a_server_count_together() -> None:
    """With --data-parallel-size 2. The second engine has nothing to do, so its numbers stay the
    same. The server is not silent, because the first one draws tokens."""
    text = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="policy"} 120.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 3e+01
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="policy"} 2.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.98
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.02
"""
    found = parse_metrics(text)
    assert found.pop("generation_tokens_created") == 1.7e9
    assert found == {
        "generation_tokens_total": 150.0,
        "num_preemptions_total": 2.0,
        "kv_cache_usage_perc": 0.98,
    }


def test_shares_since_the_last_weights() -> None:
    first = {"began": 100.0, "time": 104.0, "busy_seconds": 1.0, "working_seconds": 3.0}
    later = {"began": 100.0, "time": 114.0, "busy_seconds": 7.0, "working_seconds": 11.0}
    again = {"began": 200.0, "time": 210.0, "busy_seconds": 2.0, "working_seconds": 4.0}
    for before, now, busy, idle in (
        ({}, first, 0.25, 0.25),
        (first, later, 0.6, 0.2),
        (later, again, 0.2, 0.6),
    ):
        assert shares_of_work(before, now) == {
            "engine/busy_share": pytest.approx(busy),
            "perf/engines_idle_share": pytest.approx(idle),
        }


def test_the_earlier_draw_goes_first_and_its_last_requests_are_spread(
    tmp_path: Path,
) -> None:
    """Each of the two servers works on two requests at a time. The requests of step 2 were made
    first."""

    async def run() -> tuple[list[str], list[list[int]], list[float]]:
        answers, order = asyncio.Semaphore(0), []

        async def hold(request: web.Request, answer: object) -> web.StreamResponse:
            given = await request.json()
            if "request_id" in given:
                order.append("".join(map(str, given["token_ids"])))
                await answers.acquire()
            return await plain(request, answer)

        async with fleet_of_doubles(2, max_staleness=1) as (fleet, doubles):
            for double in doubles:
                double.sequences, double.faults = 3, {"/inference/v1/generate": hold}
            await fleet.update(weights(tmp_path, 0))
            sampling = {"temperature": 1.0, "max_tokens": 4}
            asked = [("step_2", 2)] * 5 + [("step_1", 1)] * 2 + [("evaluation_0", 3)]
            calls, loads = [], []
            for draw, token in asked:
                calls.append(asyncio.create_task(fleet.generate([token], sampling, 0, draw)))
                await asyncio.sleep(0.05)
                loads.append([each.load for each in fleet.servers])
            for count in range(4, 9):  # one answer makes room for one request
                await until(lambda count=count: len(order) >= count)
                answers.release()
            for _ in range(3):
                answers.release()
            await asyncio.gather(*calls)
            busy = [each.busy.seconds for each in fleet.servers]
            assert [each.load for each in fleet.servers] == [0, 0]
            return order, loads, busy

    order, loads, busy = asyncio.run(run())
    assert [max(each) - min(each) for each in loads] == [1, 0, 1, 0, 0, 0, 0, 0]
    assert loads[-1] == [2, 2]
    assert order == ["2"] * 4 + ["3", "1", "1", "2"]
    assert all(0.3 < each < 10 for each in busy)
