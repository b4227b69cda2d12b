"""Servers with faults that cannot be provoked in vLLM. The run continues with another server, or
ends with one line that names the fault."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import os
import re
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from gspo_megatron.errors import RolloutError
from gspo_megatron.rl.served_rollouts import missing_rows
from gspo_megatron.rollout.vllm.checks import Abilities
from gspo_megatron.rollout.vllm.client import OutOfFilesError
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import (
    MALFORMED,
    NOT_AS_VLLM,
    PARTS,
    Response,
    parse_response,
    read_answer,
)
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import (
    EXPERTS,
    FACTS,
    LAYERS,
    TOP_K,
    VOCABULARY,
    Double,
    Fault,
    Started,
    choice_with,
    cut,
    decoded,
    drops,
    encoded,
    ends_early,
    experts,
    fails,
    fleet_of_doubles,
    greedy,
    late,
    logprob,
    plain,
    routes_with,
    weights,
)

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 1.0, "max_tokens": 6}


async def draw(fleet: ScheduledFleet, version: int, count: int, at_once: bool) -> list[Response]:
    """Generate `count` responses: all as one group if `at_once`, otherwise each by its own
    request."""
    if at_once:
        return await fleet.scheduler.generate_all(
            PROMPT, SAMPLING, [(1, n) for n in range(count)], version
        )
    calls = [fleet.generate(PROMPT, SAMPLING, version) for _ in range(count)]
    return list(await asyncio.gather(*calls))


def pooled(
    work: Callable[[ScheduledFleet, list[Double]], Awaitable[None]], count: int = 2, **limits: float
) -> None:
    """Run `work` with a fleet of stand-ins: see `fleet_of_doubles`. Work that waits for ever
    fails."""

    async def run() -> None:
        async with fleet_of_doubles(count, with_routes=True, **limits) as (fleet, doubles):
            await asyncio.wait_for(work(fleet, doubles), 100)

    asyncio.run(run())


def assert_is_right(response: Response, version: int) -> None:
    tokens = greedy(PROMPT, SAMPLING["max_tokens"])
    assert response.token_ids.tolist() == tokens
    expected = [logprob(token, str(version)) for token in tokens]
    np.testing.assert_allclose(response.logprobs, expected, rtol=1e-6)
    assert response.truncated and response.routes is not None
    inputs = [*PROMPT, *tokens][:-1]
    np.testing.assert_array_equal(response.routes[:-1], experts(inputs))
    assert not response.routes[-1].any()


def test_sound_servers_serve_every_version(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        for version in range(3):
            await fleet.update(weights(tmp_path, version))
            for each in await asyncio.gather(
                *(fleet.generate(PROMPT, SAMPLING, version) for _ in range(4))
            ):
                assert_is_right(each, version)
        # the probe has 2 requests
        assert all(each.calls[GENERATE] == 3 * (2 + 2) for each in doubles)

    pooled(work)


WRONG_ANSWERS: dict[str, tuple[Fault, str]] = {
    "HTTP 500": (fails(500), f"{GENERATE}: HTTP 500: it is broken"),
    "HTTP 429": (fails(429), f"{GENERATE}: HTTP 429: it is broken"),
    "no answer": (drops, f"{GENERATE}: "),
    "half an answer": (ends_early, f"{GENERATE}: "),
    "half of the JSON": (cut, "the answer is not JSON"),
    "a page": (fails(200, "<html>\n</html>"), "the answer is not JSON"),
    "no log-probs": (choice_with(logprobs=None), NOT_AS_VLLM),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_answer_costs_the_server_and_no_response(
    tmp_path: Path, name: str, gives_parts: bool
) -> None:
    fault, why = WRONG_ANSWERS[name]
    if gives_parts and "not JSON" in why:
        why = NOT_AS_VLLM

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults[GENERATE] = fault
        for each in await draw(fleet, 0, 8, gives_parts):
            assert_is_right(each, 0)
        assert fleet.scheduler.resubmitted == 4  # the first server had every second request
        # its own part, and the part that server 0 did not finish
        assert doubles[1].calls[PARTS] == 2 * gives_parts
        assert fleet.servers[0].bringing is not None
        await fleet.servers[0].bringing
        [problem] = fleet.problems()
        assert problem.startswith("server 0: ") and why in problem, problem
        assert len(problem.splitlines()) == 1
        asked = doubles[0].calls[GENERATE]
        assert_is_right(await fleet.generate(PROMPT, SAMPLING, 0), 0)
        assert doubles[0].calls[GENERATE] == asked

    pooled(work)


def first_infinite(given: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {"content": [{"logprob": -math.inf}, *given["content"][1:]]}


def table_with(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    return {"routed_experts": lambda text: encoded(change(decoded(text)))}


WRONG_CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"logprobs": {"content": [{"logprob": math.nan}] * 6}}, "not finite"),
    "-inf": ({"logprobs": first_infinite}, "not finite"),
    "above 0": ({"logprobs": {"content": [{"logprob": 0.5}] * 6}}, "above 0"),
    "too few": ({"logprobs": {"content": [{"logprob": -1}] * 5}}, "6 tokens with 5"),
    "no tokens": ({"token_ids": [], "logprobs": {"content": []}}, "0 tokens"),
    "unknown tokens": ({"token_ids": [VOCABULARY] * 6}, f"to {VOCABULARY}, of 50"),
    "huge tokens": ({"token_ids": [2**40] * 6}, "OverflowError"),
    "aborted": ({"finish_reason": "abort"}, "finish_reason 'abort'"),
    "no experts": ({"routed_experts": None}, "TypeError"),
    "a layer too many": (
        table_with(lambda t: np.concatenate([t, t[:, :1]], 1)),
        "routed experts [8, 4, 2]",
    ),
    "a row too few": (table_with(lambda t: t[1:]), "routed experts [7, 3, 2]"),
    "weights of experts": (table_with(lambda t: t / 2), "float64, expected (8, 3, 2)"),
    "not base64": ({"routed_experts": "?"}, "Error"),
    "an empty file": ({"routed_experts": ""}, "EOFError"),
    "a broken zip": (
        {"routed_experts": base64.b64encode(b"PK\3\4" + bytes(30)).decode()},
        "BadZipFile",
    ),
    "objects": (table_with(lambda t: t.astype(object)), "allow_pickle"),
}


@pytest.mark.parametrize("name", WRONG_CHOICES)
def test_a_choice_that_is_not_as_vllm_gives_it_is_refused(name: str) -> None:
    """Client and middleware read the JSON with this function."""
    changes, why = WRONG_CHOICES[name]
    [choice] = Double()._generate(PROMPT, 6)["choices"]
    changed = {k: v(choice[k]) if callable(v) else v for k, v in changes.items()}
    body = json.dumps({"choices": [{**choice, **changed}]}).encode()
    with pytest.raises(MALFORMED) as caught:
        read_answer(body, len(PROMPT), FACTS, routes=True)
    assert why in f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda table: table * 0, range(8)),
        (lambda table: np.where(table == table[2, 1, 0], EXPERTS, table), None),
        (lambda table: -1 - table, range(8)),
        (lambda table: table[..., :1].repeat(TOP_K, -1), range(8)),
    ],
    ids=["zeros", "beyond", "negative", "twice"],
)
@pytest.mark.usefixtures("gives_parts")
def test_useless_experts_of_a_token_are_missing_and_counted(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], rows: range | None
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults[GENERATE] = routes_with(change)
        response = await fleet.generate(PROMPT, SAMPLING, 0)
        assert response.routes is not None and not fleet.problems()
        tokens = [*PROMPT, *greedy(PROMPT, 6)]
        right, useless = experts(tokens[:-1]), change(experts(tokens[:-1]))
        wanted = rows
        # None stands for the tokens whose routes name an expert that the model does not have.
        if wanted is None:
            wanted = [n for n in range(8) if (useless[n, 1:] >= EXPERTS).any()]
            assert 0 < len(wanted) < 8
        for row in range(8):
            np.testing.assert_array_equal(response.routes[row], right[row] * (row not in wanted))
        assert missing_rows(np.concatenate([response.routes] * 3), 3) == 3 * len(wanted)

    pooled(work, count=1)


def test_a_server_that_names_another_version_is_out(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))

        async def another(*_: Any) -> Any:
            return await fails(200, '{"weight_version": "7"}')()

        doubles[1].faults["/weight_info"] = another
        await fleet.update(weights(tmp_path, 1))
        assert fleet.problems() == [
            "server 1: weights of version 1: says that it has version 7 of them, not 1"
        ]
        assert_is_right(await fleet.generate(PROMPT, SAMPLING, 1), 1)

    pooled(work)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume", GENERATE])
def test_an_update_ends_in_time(tmp_path: Path, path: str) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[1].faults[path] = late(60)
        start = time.monotonic()
        await fleet.update(weights(tmp_path, 1))
        assert 2.5 < time.monotonic() - start < 50
        [problem] = fleet.problems()
        said = rf"server 1: weights of version 1: {path}: no answer within [\d.]+ s"
        assert re.fullmatch(said, problem), problem
        assert_is_right(await fleet.generate(PROMPT, SAMPLING, 1), 1)

    pooled(work, update_seconds=3)


@pytest.mark.usefixtures("gives_parts")
def test_a_server_that_falls_silent_is_out_and_one_that_works_long_is_not(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        silent, slow = doubles
        await fleet.update(weights(tmp_path, 0))
        silent.faults[GENERATE] = late(60)

        async def works(request: Any, answer: Any) -> Any:
            for _ in range(30):
                slow.drawn += 1  # the slow server still generates tokens
                await asyncio.sleep(0.2)
            return await late(0)(request, answer)

        slow.faults[GENERATE] = works
        start = time.monotonic()
        for each in await asyncio.gather(*(fleet.generate(PROMPT, SAMPLING, 0) for _ in range(2))):
            assert_is_right(each, 0)
        # the silence lasts two seconds, and the work after it six seconds
        assert 8 < time.monotonic() - start < 50
        [problem] = fleet.problems()
        assert re.fullmatch(r"server 0: has not answered or drawn a token for \d s", problem)

    pooled(work, silence_seconds=2)


@pytest.mark.usefixtures("gives_parts")
def test_the_end_names_every_server(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults[GENERATE], doubles[1].faults[GENERATE] = fails(503), cut
        with pytest.raises(RolloutError) as caught:
            await fleet.generate(PROMPT, SAMPLING, 0)
        first, *others = str(caught.value).splitlines()
        assert first == "no server is left:"
        assert [each[:9] for each in others] == ["server 0:", "server 1:"]

    pooled(work)


@pytest.mark.usefixtures("gives_parts")
def test_a_request_that_is_refused_ends_the_run_in_one_line(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults[GENERATE] = fails(400)
        with pytest.raises(RolloutError) as caught:
            await fleet.generate(PROMPT, SAMPLING, 0)
        assert str(caught.value) == (
            f"server 0 refuses a request: {GENERATE}: HTTP 400: it is broken"
        )

    pooled(work)


@pytest.mark.parametrize(
    ("path", "fault", "told"),
    [
        ("/health", fails(404), "cannot be reached: /health: HTTP 404: it is broken"),
        ("/openapi.json", fails(200, "<html>"), "/openapi.json: the answer is not JSON"),
        ("/openapi.json", fails(401), "/openapi.json: the server wants another token: set GSPO_S"),
        ("/server_info", fails(200, "{}"), "an answer that is not as vLLM gives it: KeyError"),
        (GENERATE, routes_with(lambda t: t[:, 1:]), "routed experts [6, 2, 2]"),
    ],
)
def test_what_is_no_server_for_us_is_told_in_one_line_at_the_start(
    tmp_path: Path, path: str, fault: Fault, told: str
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        doubles[1].faults[path] = fault
        with pytest.raises(RolloutError) as caught:
            await fleet.update(weights(tmp_path, 0))
        [line] = str(caught.value).splitlines()
        assert line.startswith("server 1: ") and told in line, line

    pooled(work)


@pytest.mark.parametrize("layout", [{"worker_extension_cls": ""}, {"data_parallel_size": 2}])
def test_a_server_that_cannot_take_weights_from_rank_0_is_named_where_it_must(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        doubles[1].layout |= layout
        fleet.change_settings(needs=replace(fleet.settings.needs, must_stream=True))
        with pytest.raises(RolloutError) as caught:
            await fleet.update(weights(tmp_path, 0))
        assert str(caught.value) == (
            "server 1: takes no weights from rank 0 (weight_transport nccl): --worker-extension-cls"
            " gspo_vllm_worker.GspoWorker, and no data parallelism"
        )

    pooled(work)


def test_a_server_that_rank_0_cannot_send_weights_gets_them_in_folders(tmp_path: Path) -> None:
    async def refuse(request: web.Request, answer: Any) -> web.StreamResponse:
        is_sent = (await request.json())["method"] == "receive_weights"
        return await (fails(500) if is_sent else plain)(request, answer)

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults["/collective_rpc"] = refuse
        for version, receivers in ((1, 1), (2, 0)):
            newest = weights(tmp_path, version)
            assert len(fleet.take_weights(replace(newest, stream={}))) == receivers
            await fleet.update_servers()
            assert fleet.servers[0].version == version
            assert_is_right(await fleet.generate(PROMPT, SAMPLING, version), version)

    pooled(work, count=1)


def test_weights_for_servers_that_start_again_wait_for_a_folder(tmp_path: Path) -> None:
    """Rank 0 sends version 1 to one server. Meanwhile the other server restarts, so it needs the
    weights from a folder."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        doubles[1].layout |= {"worker_extension_cls": ""}
        fleet.servers[1].abilities = Abilities()
        first = weights(tmp_path, 1)
        assert list(fleet.take_weights(replace(first, folder=None, stream={})).values()) == [1]
        doubles[0].loaded = "1"  # as if the server had received version 1
        bringing = asyncio.create_task(fleet.update_servers())
        await asyncio.wait_for(fleet.loader.wait_until_folder_is_needed(), 20)
        await fleet.loader.add_to_weights(folder=str(first.folder))
        await asyncio.wait_for(bringing, 20)
        assert not fleet.loader.needs_folder and [each.version for each in fleet.servers] == [1, 1]

    pooled(work)


@pytest.mark.parametrize("waits", [True, False], ids=["waits for a folder", "before its update"])
def test_a_server_that_is_lost_at_an_update_is_started_once(tmp_path: Path, waits: bool) -> None:
    """Both the loss and the new weights, which the dead server refused, started it again."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        starts: list[str] = []

        def start(folder: str) -> Started:
            starts.append(folder)
            doubles[0].loaded = "1"
            return Started(doubles[0].url)

        [server] = fleet.servers
        await fleet.update(weights(tmp_path, 0))
        server.start, server.process = start, Started(doubles[0].url)
        first = weights(tmp_path, 1)
        fleet.take_weights(replace(first, folder=None))
        bringing = asyncio.create_task(fleet.update_servers())
        if waits:
            await asyncio.wait_for(fleet.loader.wait_until_folder_is_needed(), 20)
        else:
            old = server.bringing
            while server.bringing is old:  # until there is a task for the update
                await asyncio.sleep(0)
        doubles[0].faults["/pause"] = fails(500)
        fleet.lose_server(server, "it is gone")
        await fleet.loader.add_to_weights(folder=str(first.folder))
        await asyncio.wait_for(bringing, 20)
        assert starts == [first.folder] and server.version == 1

    pooled(work, count=1, restarts=3)


def test_a_server_without_development_mode_is_told_what_it_lacks(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        doubles[0].paths = {GENERATE}
        with pytest.raises(RolloutError) as caught:
            await fleet.update(weights(tmp_path, 0))
        assert str(caught.value) == "; ".join(
            [
                "server 0: does not answer /server_info: VLLM_SERVER_DEV_MODE=1",
                "does not answer /collective_rpc: VLLM_SERVER_DEV_MODE=1",
                "does not answer /update_weight_version: VLLM_SERVER_DEV_MODE=1, "
                "and vLLM 0.30 or newer",
            ]
        )

    pooled(work, count=1)


# --- Reading and comparing responses, with plain formulas ----------------------------------------


def test_a_response_is_read_as_it_is_written() -> None:
    double, generator = Double(), np.random.default_rng(3)
    for _ in range(30):
        prompt = generator.integers(0, VOCABULARY, generator.integers(1, 20)).tolist()
        count = int(generator.integers(1, 12))
        found = double._generate(prompt, count)
        response = parse_response(found, len(prompt), FACTS, routes=True)
        tokens = greedy(prompt, count)
        assert response.token_ids.tolist() == tokens
        assert response.logprobs.tolist() == pytest.approx([logprob(t, "0") for t in tokens])
        assert response.routes is not None and response.routes.dtype == np.uint8
        table = response.routes.tolist()
        assert len(table) == len(prompt) + count
        assert table.pop() == [[0] * TOP_K] * LAYERS
        assert table == experts([*prompt, *tokens][:-1]).tolist()
        found["choices"][0]["finish_reason"] = "stop"
        assert not parse_response(found, len(prompt), FACTS, routes=False).truncated


def test_greedy_responses_are_compared_up_to_the_first_other_token() -> None:
    generator = np.random.default_rng(8)
    for _ in range(300):
        rows, length = int(generator.integers(1, 20)), int(generator.integers(1, 6))
        wanted = generator.integers(0, 3, (rows, length)).tolist()
        given = np.where(generator.random((rows, length)) < 0.8, wanted, 3).tolist()
        own = -generator.random((rows, length))
        theirs = own + generator.choice([0.0, 1e-3, 0.2], (rows, length), p=[0.9, 0.05, 0.05])
        means, largest = [], 0.0
        for row in range(rows):
            found = []
            for n in range(length):
                found.append(abs(own[row][n] - theirs[row][n]))
                if wanted[row][n] != given[row][n]:
                    break
            means.append(sum(found) / len(found))
            largest = max(largest, *found)
        responses = [
            Response(np.array(ids), np.array(values), truncated=True)
            for ids, values in zip(given, theirs, strict=True)
        ]
        # Two of 16 responses may differ, so the third largest mean must be within the limit.
        decides = sorted(means, reverse=True)[rows // 8]
        for limit, average, is_right in (
            (largest + 1e-9, decides + 1e-9, True),
            (largest - 1e-9, decides + 1e-9, False),
            (largest + 1e-9, decides - 1e-9, False),
        ):
            check = WeightCheck([[0]] * rows, wanted, own.tolist(), limit, average)
            told = check.difference(responses)
            assert (told is None) == is_right
            if told is not None:
                assert f"of {rows} responses differ by more than {average:g}" in told


def limit_that_leaves(count: int) -> int:
    """The limit of open files with which this process can open `count` more files.

    The kernel compares the limit with the number of the new file. Other tests leave gaps in these
    numbers.
    """
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    unused = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(unused, count, None))


def test_too_few_files_are_no_fault_of_a_server(tmp_path: Path) -> None:
    """The stand-ins run in this process, so they cannot accept connections either."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        await fleet.update(weights(tmp_path, 0))
        for each in doubles:
            each.faults[GENERATE] = late(1.0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_that_leaves(40), hard))
        try:
            with pytest.raises(OutOfFilesError, match="ulimit -n"):
                await draw(fleet, 0, 120, at_once=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not fleet.problems() and all(each.serves for each in fleet.servers)

    pooled(work)
