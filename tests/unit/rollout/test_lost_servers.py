"""Servers that are lost: during an update of their weights, or while they are restarted."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import web

from gspo_megatron.errors import RolloutError
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import (
    Double,
    Fault,
    Started,
    drops,
    fails,
    late,
    plain,
    until,
    weights,
)
from tests.unit.rollout.test_faulty_servers import (
    GENERATE,
    PROMPT,
    SAMPLING,
    assert_is_right,
    pooled,
)

# --- Updates --------------------------------------------------------------------------------------


def at_load(fault: Fault) -> Fault:
    """A fault that calls of workers have only if they load weights."""

    async def faulty(request: web.Request, answer: Any) -> web.StreamResponse:
        method = (await request.json()).get("method")
        loads = method in (None, "reload_weights", "receive_weights")
        return await (fault if loads else plain)(request, answer)

    return faulty


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", GENERATE])
def test_a_server_that_answers_nothing_in_an_update_is_out_and_a_busy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """An engine may be busy for minutes, but the HTTP part of its server answers meanwhile."""
    monkeypatch.setattr("gspo_megatron.rollout.vllm.weights.CALL_SECONDS", 0.5)
    monkeypatch.setattr("gspo_megatron.rollout.vllm.weights._LOOK_SECONDS", 0.1)

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        hung, busy = doubles
        await fleet.update(weights(tmp_path, 0))
        hung.faults |= {path: at_load(late(60)), "/metrics": late(60)}
        busy.faults[path] = at_load(late(2))
        start = time.monotonic()
        await fleet.update(weights(tmp_path, 1))
        assert 2 < time.monotonic() - start < 30
        [problem] = fleet.problems()
        told = r"server 0: weights of version 1: has not answered for \d+ s"
        assert re.fullmatch(told, problem), problem
        assert fleet.servers[1].version == 1

    pooled(work, silence_seconds=1, update_seconds=60)


@pytest.mark.parametrize("updates", [False, True], ids=["generates", "gets weights"])
def test_a_server_is_not_silent_while_an_environment_blocks_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: bool
) -> None:
    """The code blocks the loop just after the service has asked the server for its figures."""
    for module in ("fleet", "weights"):
        monkeypatch.setattr(f"gspo_megatron.rollout.vllm.{module}.CALL_SECONDS", 0.2)
        monkeypatch.setattr(f"gspo_megatron.rollout.vllm.{module}._LOOK_SECONDS", 0.05)

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        await fleet.update(weights(tmp_path, 0))

        async def blocks(request: web.Request, answer: Any) -> web.StreamResponse:
            del double.faults["/metrics"]
            time.sleep(1.5)
            return await plain(request, answer)

        async def works(request: web.Request, answer: Any) -> web.StreamResponse:
            for _ in range(20):
                double.drawn += 1
                await asyncio.sleep(0.1)
            return await plain(request, answer)

        double.faults |= {"/metrics": blocks, GENERATE: works, "/collective_rpc": at_load(works)}
        if updates:
            del double.faults[GENERATE]
            await fleet.update(weights(tmp_path, 1))
        else:
            assert_is_right(await fleet.generate(PROMPT, SAMPLING, 0), 0)
        assert "/metrics" not in double.faults and not fleet.problems()

    pooled(work, count=1, silence_seconds=1)


def test_a_server_that_is_away_after_a_stream_is_not_asked_to_read_a_folder(
    tmp_path: Path,
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        await fleet.update(weights(tmp_path, 0))
        double.faults |= {"/collective_rpc": at_load(drops), "/health": drops}
        fleet.take_weights(replace(weights(tmp_path, 1), stream={}))
        before = double.calls["/collective_rpc"]
        with pytest.raises(RolloutError, match="^server 0: weights of version 1: /collective_rpc"):
            await fleet.update_servers()
        # the calls of forget_prepacked_experts and of receive_weights
        assert double.calls["/collective_rpc"] - before == 2

    pooled(work, count=1)


# --- Servers that the run has not started ---------------------------------------------------------


def at_first(count: int, fault: Fault) -> Fault:
    """A fault of the first `count` requests."""
    left = iter([fault] * count)

    async def faulty(request: web.Request, answer: Any) -> web.StreamResponse:
        return await next(left, plain)(request, answer)

    return faulty


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is tried again soon."""
    monkeypatch.setattr("gspo_megatron.rollout.vllm.fleet._FIRST_PAUSE", 0.01)


# the client itself repeats a request once if the connection drops
@pytest.mark.parametrize("fault", [at_first(1, fails(503)), at_first(2, drops)])
def test_a_server_that_fails_once_is_used_again(tmp_path: Path, soon: None, fault: Fault) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        await fleet.update(weights(tmp_path, 0))
        double.loaded = "7"  # as if it had been started again, with other weights
        double.faults[GENERATE] = fault
        assert_is_right(await fleet.generate(PROMPT, SAMPLING, 0), 0)
        assert fleet.servers[0].restarts == 1 and not fleet.problems()

    pooled(work, count=1, restarts=1)


def test_a_server_is_given_up_after_repeated_failures(
    tmp_path: Path, soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only failures count between which the server took no new weights."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [double] = doubles
        for version in range(3):
            await fleet.update(weights(tmp_path, version))
            double.faults[GENERATE] = at_first(1, fails(503))
            assert_is_right(await fleet.generate(PROMPT, SAMPLING, version), version)
        double.faults[GENERATE] = fails(503)
        with pytest.raises(RolloutError, match="^no server is left:\nserver 0: .* HTTP 503: it is"):
            await fleet.generate(PROMPT, SAMPLING, 2)
        assert fleet.servers[0].restarts == 4
        *_, last = capsys.readouterr().out.splitlines()
        assert last.startswith("server 0 is out: ")

    pooled(work, count=1, restarts=2)


def test_each_further_pause_is_five_times_as_long_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def shorter(seconds: float) -> None:
        if seconds >= 2:
            pauses.append(seconds)
        await sleep(min(seconds, 0.05))

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [server], [double] = fleet.servers, doubles
        await fleet.update(weights(tmp_path, 0))
        double.faults["/openapi.json"] = fails(503)
        monkeypatch.setattr(asyncio, "sleep", shorter)
        fleet.lose_server(server, "it is gone")
        assert server.bringing is not None
        await server.bringing

    pooled(work, count=1, restarts=6)
    assert pauses == [2, 10, 50, 250, 300, 300]
    told = re.findall(r"; tried again in (\S+) s", capsys.readouterr().out)
    assert told == ["2", "10", "50", "250", "300", "300"]


def test_new_weights_for_a_server_that_will_be_tried_again(tmp_path: Path, soon: None) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        lost, sound = fleet.servers
        await fleet.update(weights(tmp_path, 0))
        doubles[0].faults["/openapi.json"] = at_first(1, late(0.2))
        fleet.lose_server(lost, "it is gone")
        await fleet.update(weights(tmp_path, 1))
        assert (lost.version, sound.version, doubles[0].loaded) == (1, 1, "1")

    pooled(work, restarts=1)


# --- Restarts -------------------------------------------------------------------------------------


def test_a_fleet_that_is_closed_in_an_update_starts_no_further_server(tmp_path: Path) -> None:
    """The update waits for a restart, which ends with the update."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        starts: list[str] = []

        def start(folder: str) -> Started:
            starts.append(folder)
            return Started(doubles[0].url)

        [server] = fleet.servers
        await fleet.update(weights(tmp_path, 0))
        server.start = start
        doubles[0].faults["/health"] = fails(503)  # the new process is never ready
        fleet.lose_server(server, "it is gone")
        restart = server.bringing
        assert restart is not None
        await until(lambda: starts)
        fleet.take_weights(weights(tmp_path, 1))
        updating = asyncio.create_task(fleet.update_servers())
        await until(lambda: server.bringing is not restart)
        await asyncio.sleep(0.05)  # the update begins to wait for the restart
        await fleet.close()
        await asyncio.wait([restart, updating], timeout=5)
        assert restart.cancelled() and updating.cancelled() and len(starts) == 1

    pooled(work, count=1, restarts=3)


def test_the_restarts_of_own_servers_are_counted_over_the_whole_run(tmp_path: Path) -> None:
    """An update in between does not give new restarts, unlike for servers of others."""

    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [server] = fleet.servers
        server.start = lambda _: Started(doubles[0].url)
        for version, serves in enumerate([True, True, False]):
            await fleet.update(weights(tmp_path, version))
            fleet.lose_server(server, "it is gone")
            assert server.bringing is not None
            await server.bringing
            assert server.serves is serves
        assert server.restarts == 2

    pooled(work, count=1, restarts=2)


def test_a_server_is_restarted_although_nobody_reads_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        [server] = fleet.servers
        await fleet.update(weights(tmp_path, 0))
        server.start = lambda _: Started(doubles[0].url)
        unread = mock.Mock(write=mock.Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
        monkeypatch.setattr(sys, "stdout", unread)
        fleet.lose_server(server, "it is gone")
        assert server.bringing is not None
        await server.bringing
        assert unread.write.called and server.restarts == 1 and server.serves

    pooled(work, count=1, restarts=1)


def test_a_restart_that_cannot_begin_is_told_with_its_own_reason(tmp_path: Path) -> None:
    async def work(fleet: ScheduledFleet, doubles: list[Double]) -> None:
        def start(folder: str) -> Started:
            raise RolloutError("no port is free")

        [server] = fleet.servers
        await fleet.update(weights(tmp_path, 0))
        server.start, server.process = start, Started(doubles[0].url, "it was killed by SIGKILL")
        fleet.lose_server(server, "it is gone")
        assert server.bringing is not None
        await server.bringing
        assert server.restarts == 1 and fleet.problems() == ["server 0: no port is free"]

    pooled(work, count=1, restarts=1)
