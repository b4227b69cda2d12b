"""Rules of the rollout service that need no server: salts of prefix caches, silence, versions of
interrupted responses, and the time at which files reach the disk."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_megatron.rollout import store as bank
from gspo_megatron.rollout.store import RequestFile
from gspo_megatron.rollout.vllm.checks import Abilities
from gspo_megatron.rollout.vllm.client import KEEP, RECOMPUTE, WAIT
from gspo_megatron.rollout.vllm.in_flight import InFlightResponse
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.service import Service, _stops
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import GroupPart, Response
from tests.fleets import ScheduledFleet
from tests.unit.rollout.double import fleet_settings
from tests.unit.rollout.test_bank import a_group

SETTINGS = fleet_settings()
CHECK = WeightCheck([[1, 2]], [[3, 4]], [[-0.5, -0.5]], 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], {}),
        (["<end>"], {}),  # a token of its own
        (["a", "<end>"], {"stop": ["a"]}),
        (["a<end>"], {"stop": ["a<end>"], "skip_special_tokens": False}),
    ],
)
def test_a_server_finds_a_stop_text_with_a_special_token(
    stop: list[str], expected: dict[str, Any]
) -> None:
    tokenizer = SimpleNamespace(special_tokens={"<end>": 7, "</s>": 2}, eos_ids=(2,))
    config: Any = SimpleNamespace(rollout=SimpleNamespace(stop=stop))
    inputs: Any = SimpleNamespace(tokenizer=tokenizer)
    ids = [2, 7] if "<end>" in stop else [2]
    assert _stops(config, inputs) == {"stop_token_ids": ids, "ignore_eos": True, **expected}


@dataclass
class Recorded:
    """Records the requests to a client. Every response is [3, 4]."""

    version: int = 0
    # for each request its weights version and its salt
    salts: list[tuple[int, str | None]] = field(default_factory=list)
    figures_told: dict[str, float] = field(default_factory=dict)

    async def generate(self, part: GroupPart, **_: Any) -> Response:
        self.salts.append((self.version, part.salt))
        return Response(np.array([3, 4], np.int32), np.full(2, -0.5, np.float32), False)

    async def generate_part(self, part: GroupPart) -> Any:
        yield [(number, await self.generate(part)) for number, _ in enumerate(part.names)]

    async def weight_version(self, **_: Any) -> str:
        return str(self.version)

    async def figures(self, **_: Any) -> dict[str, float]:
        return self.figures_told


def served(
    client: Recorded, settings: FleetSettings = SETTINGS, *, gives_parts: bool = False
) -> tuple[ScheduledFleet, Server]:
    recorded: Any = client
    server = Server("server", recorded, abilities=Abilities(gives_parts=gives_parts))
    return ScheduledFleet([server], settings), server


def salts_of(gives_parts: bool, *, keeps_kv: bool) -> list[tuple[int, str | None]]:
    """The salts of the check of weights and of a group, for two versions of the weights."""
    client = Recorded()
    settings = replace(SETTINGS, max_staleness=1, keeps_kv=keeps_kv)
    fleet, server = served(client, settings, gives_parts=gives_parts)

    async def run() -> None:
        for version in (4, 5):
            client.version, fleet.loader._newest = version, Weights(version, "folder", CHECK)
            assert await fleet.loader._check(server, fleet.loader._newest)
            await fleet.scheduler.generate_all(
                [1, 2], {"temperature": 1.0}, [(1, 0), (1, 1)], version
            )

    asyncio.run(run())
    return client.salts


@pytest.mark.parametrize("gives_parts", [False, True])
def test_caches_of_the_weights_before_are_told_apart_where_they_are_kept(gives_parts: bool) -> None:
    """The check uses the salt of the new weights, too, so that it notices a cache of other
    weights."""
    found = salts_of(gives_parts, keeps_kv=True)
    by_version = {version: {salt for v, salt in found if v == version} for version in (4, 5)}
    assert all(len(salts) == 1 for salts in by_version.values())
    assert None not in by_version[4] | by_version[5]
    assert by_version[4] != by_version[5]
    assert len(found) == 2 * (1 + 2)


def test_no_request_has_a_salt_where_caches_are_forgotten_with_each_version() -> None:
    """Groups of two versions may share a cache, and a salt would prevent this."""
    assert {salt for _, salt in salts_of(False, keeps_kv=False)} == {None}


@pytest.mark.parametrize(
    ("in_flight", "counts", "tells", "keeps_kv", "pause"),
    [
        # no request is in progress, so there is no cache to keep
        (False, True, True, True, RECOMPUTE),
        (True, False, False, True, WAIT),  # otherwise the version of some tokens would be unknown
        (True, False, False, False, WAIT),
        *[(True, *knows, True, KEEP) for knows in ((True, False), (False, True))],
        *[(True, *knows, False, RECOMPUTE) for knows in ((True, False), (False, True))],
    ],
)
def test_responses_under_way_go_on_only_where_their_versions_are_known(
    in_flight: bool, counts: bool, tells: bool, keeps_kv: bool, pause: dict[str, str]
) -> None:
    fleet, server = served(Recorded(), replace(SETTINGS, max_staleness=1, keeps_kv=keeps_kv))
    server.in_flight = {InFlightResponse(1)} if in_flight else set()
    server.abilities = replace(server.abilities, counts_tokens=counts)
    server.reports_versions = tells
    assert fleet.loader._pause(server) == pause


@pytest.mark.parametrize(
    ("tokens", "running", "in_flight", "silent", "is_lost"),
    [
        # No answer and no token have come, although requests are in progress.
        (9.0, 2.0, True, 31.0, True),
        (9.0, 2.0, True, 20.0, False),
        # The engine hangs, so the server still reports the number from before the requests.
        (9.0, 0.0, True, 31.0, True),
        # The server generates tokens.
        (10.0, 2.0, True, 31.0, False),
        # The server has no requests of this run.
        (9.0, 0.0, False, 31.0, False),
        (9.0, 2.0, False, 31.0, False),
    ],
)
def test_a_server_is_lost_after_its_silence_and_not_before(
    tokens: float, running: float, in_flight: bool, silent: float, is_lost: bool
) -> None:
    figures = {"generation_tokens_total": tokens, "num_requests_running": running}
    fleet, server = served(Recorded(figures_told=figures))

    async def run() -> None:
        server.version, server.why_out, server.tokens = 1, None, 9.0
        if in_flight:
            call = asyncio.create_task(asyncio.sleep(60))
            server.add_in_flight([InFlightResponse(1, call=call)])
        server.heard = time.monotonic() - silent
        await fleet._look_at(server)
        if server.bringing is not None:
            await server.bringing

    asyncio.run(run())
    assert server.serves != is_lost
    why = str(server.why_out)
    assert why.startswith("has not answered or drawn a token for 3") if is_lost else why == "None"


def test_a_status_says_whether_a_server_is_being_restarted() -> None:
    fleet, server = served(Recorded())
    service: Any = SimpleNamespace(fleet=fleet, told_to_end=False, heartbeats=0)

    def told() -> bool:
        return bool(Service._own_status(service)["is_restarting"])

    async def run() -> list[bool]:
        found = [told()]
        server.bringing = asyncio.create_task(asyncio.sleep(0))
        found.append(told())
        await server.bringing
        return [*found, told()]

    assert asyncio.run(run()) == [False, True, False]


def test_the_first_weights_of_a_server_without_a_name_are_those_of_the_request() -> None:
    """Before its first update, a server calls its weights `default`. This server gets updates
    during the response, so its answer also names later versions."""
    response = InFlightResponse(version=1)
    response.spans, response.version = [(1, 2), (3, 4)], 6
    spans = (("default", 2), ("3", 4), ("6", 7))
    response.arrive(Response(np.arange(7), np.zeros(7), truncated=False, spans=spans))
    assert response.answer is not None and response.answer.versions is not None
    assert response.answer.versions.tolist() == [1, 1, 3, 3, 6, 6, 6]
    whole = InFlightResponse(version=2)
    whole.arrive(Response(np.arange(3), np.zeros(3), False, spans=(("default", 3),)))
    assert whole.answer is not None and whole.answer.versions is not None
    assert whole.answer.versions.tolist() == [2, 2, 2]


class Disk:
    """Records what has reached the disk: the sizes of a file at the times when it was
    synchronised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, list[int]] = {}  # sizes by inode number
        self.folders: list[Path] = []
        sync = os.fsync

        def fsync(file: int) -> None:
            found = os.fstat(file)
            self.files.setdefault(found.st_ino, []).append(found.st_size)
            sync(file)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(bank, "sync", self.folders.append)

    def sizes(self, path: Path) -> list[int]:
        return self.files.get(path.stat().st_ino, [])


def test_a_group_is_on_the_disk_before_anyone_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "a.groups"
    file = RequestFile(path, {"rows": [1, 2]})
    assert disk.sizes(path) == [path.stat().st_size] and disk.folders == [tmp_path]
    for number in (1, 0):
        assert number not in file.finished
        file.append(a_group(number))
        assert number in file.finished
        assert disk.sizes(path)[-1] == path.stat().st_size
    assert len(disk.sizes(path)) == 3 and disk.sizes(path) == sorted({*disk.sizes(path)})
    file.close()
