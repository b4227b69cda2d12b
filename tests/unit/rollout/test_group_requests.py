"""Group requests while servers fail, pause or are full. A group request asks for several
responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save

from gspo_megatron.rollout.vllm.server import RequestWindow, Server
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import (
    LENGTH,
    MALFORMED,
    NOT_AS_VLLM,
    PARTS,
    TAKE_BACK,
    AnswerFailure,
    Answers,
    Response,
    pack,
    parse_response,
    seed_of,
    unpack,
)
from tests.unit.rollout.double import (
    FACTS,
    VOCABULARY,
    Double,
    Fault,
    Started,
    fails,
    fleet_settings,
    greedy,
    plain,
    until,
    weights,
)
from tests.unit.rollout.test_faulty_servers import (
    GENERATE,
    PROMPT,
    SAMPLING,
    ScheduledFleet,
    assert_is_right,
    pooled,
)

GROUP = [(7, number) for number in range(8)]


@pytest.fixture(autouse=True)
def _give_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "gives_parts", True)


# --- The format -----------------------------------------------------------------------------------


def same(first: Response, second: Response) -> bool:
    return (
        first.token_ids.tobytes() == second.token_ids.tobytes()
        and first.logprobs.tobytes() == second.logprobs.tobytes()
        and (first.truncated, first.spans) == (second.truncated, second.spans)
        and (first.routes is None) == (second.routes is None)
        and (first.routes is None or np.array_equal(first.routes, second.routes))
    )


def unpacked(record: bytes, prompt: int, routes: bool) -> dict[int, Response | AnswerFailure]:
    [length] = LENGTH.unpack(record[: LENGTH.size])
    assert len(record) == LENGTH.size + length
    return dict(unpack(record[LENGTH.size :], prompt, FACTS, routes=routes))


@pytest.mark.parametrize("routes", [False, True])
def test_a_record_is_what_the_json_says_response_for_response(routes: bool) -> None:
    double, generator = Double(), np.random.default_rng(5)
    for _ in range(20):
        prompt = generator.integers(0, VOCABULARY, int(generator.integers(1, 9))).tolist()
        outcomes: list[tuple[int, Response | AnswerFailure]] = []
        for number in generator.permutation(12)[: int(generator.integers(1, 9))].tolist():
            found = double._generate(prompt, int(generator.integers(1, 12)))
            choice = found["choices"][0]
            choice["finish_reason"] = str(generator.choice(["stop", "length"]))
            if generator.random() < 0.5:
                ends = sorted({1, len(choice["token_ids"])})
                spans = [{"version": f"v{end}", "start": 0, "end": end} for end in ends]
                choice["weight_versions"] = spans
            response = parse_response(found, len(prompt), FACTS, routes=routes)
            outcomes.append((number, response))
        outcomes.append((20, AnswerFailure(500, "no\nroom")))
        given = unpacked(pack(outcomes), len(prompt), routes)
        assert given.pop(20) == AnswerFailure(500, "no\nroom")
        assert given.keys() == {number for number, _ in outcomes[:-1]}
        assert all(same(given[number], response) for number, response in outcomes[:-1])
    assert unpacked(pack([(1, AnswerFailure(0, "x"))]), 3, routes) == {1: AnswerFailure(0, "x")}


def a_record(**changes: Any) -> bytes:
    """A record of two responses to PROMPT, each of two tokens. `changes` replaces tensors; None
    leaves a tensor out."""
    tensors: dict[str, Any] = {
        "told": np.frombuffer(b'{"failures": [], "spans": [null, null]}', np.uint8),
        "numbers": np.array([0, 1]),
        "lengths": np.array([2, 2]),
        "truncated": np.array([True, False]),
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "logprobs": np.full(4, -1, np.float32),
        "routes": np.zeros((2 * (len(PROMPT) + 2), 3, 2), np.uint8),
    }
    tensors |= changes
    return save({name: each for name, each in tensors.items() if each is not None})


WRONG_RECORDS = {
    "cut": a_record()[:-5],
    "nothing": b"",
    "a list for a header": LENGTH.pack(2) + b"[]",
    "no tensor": LENGTH.pack(10) + b'{"told":1}',
    "tensors beyond the end": a_record().replace(b'"shape":[4]', b'"shape":[9]'),
    "no token ids": a_record(token_ids=None),
    "too few tokens": a_record(token_ids=np.array([1, 2, 3], np.int32)),
    "too long": a_record(lengths=np.array([2, 3])),
    "an empty one": a_record(lengths=np.array([4, 0])),
    "other types": a_record(logprobs=np.full(4, -1.0)),
    "unknown tokens": a_record(token_ids=np.array([1, 2, 3, VOCABULARY], np.int32)),
    "NaN": a_record(logprobs=np.array([-1, -1, np.nan, -1], np.float32)),
    "too few numbers": a_record(numbers=np.array([0])),
    "no experts": a_record(routes=None),
    "a row too few": a_record(routes=np.zeros((9, 3, 2), np.uint8)),
    "other spans": a_record(
        told=np.frombuffer(b'{"failures": [], "spans": [[["1", 1]], null]}', np.uint8)
    ),
    "no JSON": a_record(told=np.frombuffer(b"{", np.uint8)),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_a_wrong_record_is_refused(name: str) -> None:
    assert len(list(unpack(a_record(), len(PROMPT), FACTS, routes=True))) == 2
    with pytest.raises(MALFORMED):
        list(unpack(WRONG_RECORDS[name], len(PROMPT), FACTS, routes=True))


def test_seeds_are_those_of_earlier_runs() -> None:
    state = np.random.SeedSequence((7, 3)).generate_state(1, np.uint64)[0]
    assert seed_of([7, 3]) == int(state >> np.uint64(1)) == 2530781778362038830


# --- Servers that fail ----------------------------------------------------------------------------


def sends(records: Iterable[bytes], length: int | None = None) -> Fault:
    """Answer with these records. length: a wrong length, given for each record."""

    async def fault(*_: Any) -> web.StreamResponse:
        framed = [LENGTH.pack(length or len(record)) + record for record in records]
        return web.Response(body=b"".join(framed))

    return fault


WRONG_ANSWERS: dict[str, tuple[Fault, str]] = {
    "HTTP 500": (fails(500), f"{PARTS}: HTTP 500: it is broken"),
    "a record that is none": (sends([b"12345678"]), NOT_AS_VLLM),
    "a page": (fails(200, "<html></html>"), "ends within a record"),
    "half a record": (sends([a_record()], 1 << 20), "ends within a record"),
    "a huge record": (sends([a_record()], 1 << 60), "ends within a record"),
    "two of eight": (sends([a_record()]), "lacks responses"),
    "twice": (sends([a_record(), a_record()]), "a response 0 that nobody asked for"),
    "another number": (sends([a_record(numbers=np.array([0, 9]))]), "a response 9 that nobody"),
    "nothing": (sends([]), "lacks responses"),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_part_costs_the_server_and_no_response(tmp_path: Path, name: str) -> None:
    fault, why = WRONG_ANSWERS[name]

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].front_faults[PARTS] = fault
        found = await fleet.scheduler.generate_all(PROMPT, SAMPLING, [*GROUP, *GROUP], 0)
        assert len(found) == 16
        for each in found:
            # Responses of another length come from the well-formed record.
            if len(each.token_ids) == 6:
                assert_is_right(each, 0)
        assert fleet.servers[0].bringing is not None
        await fleet.servers[0].bringing
        [problem] = fleet.problems()
        assert problem.startswith("server 0: ") and why in problem, problem
        assert fleet.servers[1].load == fleet.servers[0].load == 0

    pooled(work)


async def by_seed(given: Any) -> int:
    """The number in GROUP of the response that a request asks for, found by its seed."""
    seeds = [seed_of(each) for each in GROUP]
    return seeds.index(given["sampling_params"]["seed"])


class Held:
    """Holds back the responses of GROUP with these numbers. A probe is answered immediately."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.answers, self.names = numbers, asyncio.Event(), {}

    async def __call__(self, request: web.Request, answer: Any) -> web.StreamResponse:
        given = await request.json()
        if "request_id" in given:
            number = await by_seed(given)
            self.names[number] = given["request_id"]
            if number in self.numbers:
                await self.answers.wait()
        return await plain(request, answer)


def test_of_a_part_whose_server_dies_what_is_missing_is_drawn_again_once(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        # This server is full, so the other server gets the whole request.
        fleet.servers[1].window = RequestWindow(0)
        doubles[0].faults[GENERATE] = Held(2, 3, 7)
        drawing = asyncio.create_task(fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP, 0))
        await until(lambda: len(fleet.servers[0].in_flight) == 3)
        asked: list[int] = []

        async def listens(request: web.Request, answer: Any) -> web.StreamResponse:
            asked.append(await by_seed(await request.json()))
            return await plain(request, answer)

        doubles[1].faults[GENERATE] = listens
        fleet.servers[1].window = RequestWindow(99)
        doubles[0].hang_up()
        for each in await drawing:
            assert_is_right(each, 0)
        assert sorted(asked) == [2, 3, 7] and fleet.scheduler.resubmitted == 3
        assert [each.load for each in fleet.servers] == [0, 0]
        assert fleet.servers[1].busy.seconds < 5

    pooled(work)


def test_a_draw_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        for double in doubles:
            double.faults[GENERATE] = Held(*range(8))
        drawing = asyncio.create_task(fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP, 0))
        await until(lambda: sum(each.running for each in doubles) == 8)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        await until(lambda: not any(each.running for each in doubles))
        assert [each.load for each in fleet.servers] == [
            0,
            0,
        ] and fleet.scheduler._queue.places == 0

    pooled(work)


# --- New weights ----------------------------------------------------------------------------------


def test_at_new_weights_each_response_of_a_part_goes_its_own_way(tmp_path: Path) -> None:
    """Response 0 has arrived. Response 1 has ended, but its answer is still on the way. Response 2
    has some tokens, and response 3 has no tokens."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        fleet.change_settings(max_staleness=1)
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = held = Held(1, 2, 3)
        drawing = asyncio.create_task(fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP[:4], 0))
        await until(lambda: len(fleet.servers[0].in_flight) == 3)
        double.counts = {held.names[2]: 2}
        named = dict(held.names)

        async def tells(request: web.Request, _: Any) -> web.StreamResponse:
            """The middleware takes back response 3, and reports that response 1 has ended."""
            names = (await request.json())["names"]
            assert sorted(names) == sorted([named[1], named[3]])
            return web.json_response({"ended": [named[1]]})

        double.front_faults[TAKE_BACK] = tells
        await fleet.update(weights(tmp_path, 1))
        held.numbers = ()
        # Response 3 is requested again. The other responses are not complete yet.
        await until(lambda: held.names[3] != named[3])
        held.answers.set()
        found = [each.versions.tolist() for each in await drawing]
        assert found == [[0] * 6, [0] * 6, [0, 0, 1, 1, 1, 1], [1] * 6]
        assert fleet.scheduler.resubmitted == 0 and len(double.names) == 5

    pooled(work, count=1)


def test_what_is_taken_back_ends_in_the_server_and_the_others_go_on(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        fleet.change_settings(max_staleness=1)
        double.counts = {}
        await fleet.update(weights(tmp_path, 0))
        double.faults[GENERATE] = held = Held(*range(8))
        drawing = asyncio.create_task(fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP, 0))
        await until(lambda: len(held.names) == 8)
        first = dict(held.names)
        double.counts = {first[number]: 1 for number in range(4)}
        await fleet.update(weights(tmp_path, 1))
        await until(lambda: len(double.names) == 12 and double.running == 8)
        assert double.calls[TAKE_BACK] == 1
        held.answers.set()
        found = [each.versions.tolist() for each in await drawing]
        assert found == [[0, 1, 1, 1, 1, 1]] * 4 + [[1] * 6] * 4
        assert fleet.scheduler.resubmitted == 0 and fleet.servers[0].load == 0

    pooled(work, count=1)


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_arrived_with_proven_weights_stays_where_the_next_ones_fail(
    tmp_path: Path, restarts: int
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        for each in doubles:
            each.counts = {}
        await fleet.update(weights(tmp_path, 0))
        fleet.servers[1].window = RequestWindow(0)
        double = doubles[0]
        if restarts:  # the run has started the server
            fleet.servers[0].start = lambda _: Started(double.url)
        double.faults[GENERATE] = held = Held(6, 7)
        drawing = asyncio.create_task(fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP, 0))
        await until(lambda: len(fleet.servers[0].in_flight) == 2)
        double.counts = {held.names[6]: 2, held.names[7]: 3}

        async def another(request: web.Request, _: Any) -> web.StreamResponse:
            # The responses become complete just before the check of the weights fails.
            held.answers.set()
            await asyncio.sleep(0.5)
            assert not drawing.done()
            return web.json_response({"weight_version": "7"})

        double.faults["/weight_info"] = another
        await fleet.update(weights(tmp_path, 1))
        fleet.servers[1].window = RequestWindow(99)
        fleet.scheduler._admit_soon()
        found = [each.versions.tolist() for each in await drawing]
        assert found == [[0] * 6] * 6 + [[1] * 6] * 2
        assert fleet.scheduler.resubmitted == 2 and fleet.servers[0].restarts == restarts

    pooled(work, restarts=restarts)


# --- The number of responses that a server gets ---------------------------------------------------


def fleet_of(*sizes: int, gives_parts: bool = True) -> tuple[ScheduledFleet, list[Server]]:
    """A fleet of servers with these numbers of slots. No request is sent to them."""
    servers = [Server(f"server {n}", client=None, version=0) for n in range(len(sizes))]
    for server, size in zip(servers, sizes, strict=True):
        server.window = RequestWindow(size)
        server.abilities = replace(server.abilities, gives_parts=gives_parts)
    return ScheduledFleet(servers, fleet_settings()), servers


def admitted(fleet: ScheduledFleet, *turns: int) -> list[list[tuple[str, int]] | None]:
    """The slots that the queue gives to waiting requests of these sizes."""

    async def run() -> list[list[tuple[str, int]] | None]:
        joined = [fleet.scheduler._queue.add("step_1", 0, places) for places in turns]
        fleet.scheduler._admit()
        return [
            [(server.name[-1], count) for server, count in each.granted.result()]
            if each.granted.done()
            else None
            for each in joined
        ]

    return asyncio.run(run())


def test_few_responses_are_spread_over_all_servers() -> None:
    fleet, _ = fleet_of(99, 99, 99, 99)
    assert admitted(fleet, 8) == [[(name, 2) for name in "0123"]]
    fleet, _ = fleet_of(99, 99, 99, 99)
    assert admitted(fleet, 2) == [[("0", 1), ("1", 1)]]


def test_of_much_work_a_server_gets_whole_groups() -> None:
    fleet, _ = fleet_of(99, 99)
    assert admitted(fleet, *[16] * 6) == [[(name, 16)] for name in "010101"]


def test_a_window_is_never_exceeded_and_a_part_is_worth_its_request() -> None:
    fleet, servers = fleet_of(33, 20)
    granted = admitted(fleet, *[16] * 4)
    assert granted == [[("0", 16)], [("1", 16)], [("0", 16)], [("1", 4)]]
    assert [each.load for each in servers] == [32, 20]
    # Three free slots of 64 are too few for a part of a group request. A single response needs only
    # one slot.
    for taken, wanted, given in ((61, 16, None), (60, 16, [("0", 4)]), (63, 1, [("0", 1)])):
        fleet, servers = fleet_of(64)
        servers[0].expected = taken
        assert admitted(fleet, wanted) == [given]


def test_a_server_without_our_middleware_gets_one_at_a_time(tmp_path: Path) -> None:
    fleet, _ = fleet_of(3, 3, gives_parts=False)
    assert admitted(fleet, 4, 9) == [
        [("0", 1), ("1", 1), ("0", 1), ("1", 1)],
        [("0", 1), ("1", 1)],
    ]

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        doubles[0].front_faults["/gspo/about"] = fails(404)
        doubles[1].front_faults["/gspo/about"] = fails(200, json.dumps({"form": 2}))
        doubles[2].front_faults["/gspo/about"] = fails(200, "<html>")
        await fleet.update(weights(tmp_path, 0))
        assert [each.abilities.gives_parts for each in fleet.servers] == [False] * 3
        for each in await fleet.scheduler.generate_all(PROMPT, SAMPLING, GROUP, 0):
            assert_is_right(each, 0)
        assert sum(each.calls[PARTS] for each in doubles) == 0
        assert len({name for each in doubles for name in each.names}) == 8
        assert greedy(PROMPT, 6) == (await fleet.generate(PROMPT, SAMPLING, 0)).token_ids.tolist()

    pooled(work, count=3)


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'{"names": 5}', b'{"names": [[1]]}'])
def test_a_request_to_take_back_that_is_none_is_refused(body: bytes) -> None:
    """The answer is the same as for a malformed group request."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    for path in (TAKE_BACK, PARTS):
        scope = {"type": "http", "path": path, "headers": []}
        asyncio.run(Answers(None)(scope, receive, send))
        start, told = sent[-2:]
        assert start["status"] == 400 and b"error" in told["body"]
