"""Only a server gets the token of this server, and only the rollout service gets the token of the
service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from aiohttp import web

from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm import fleet as fleet_module
from gspo_megatron.rollout.vllm import service as service_module
from gspo_megatron.rollout.vllm import standalone
from gspo_megatron.rollout.vllm.client import ServerClient, ServerGone, connected_session
from gspo_megatron.rollout.vllm.process import WORKER_FOLDER, hold_port
from gspo_megatron.rollout.vllm.server import Server
from gspo_megatron.rollout.vllm.service_client import ServiceClient
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import PROOF, proof_of
from tests.fleets import ScheduledFleet
from tests.listeners import addresses_of_listeners
from tests.unit.hf.published import write_model
from tests.unit.other_user import needs_root, said_by
from tests.unit.rollout.double import Started, fleet_settings, site, weights
from tests.unit.rollout.test_service_client import settings
from tools.bench.asgi import handler_of

sys.path.append(str(WORKER_FOLDER))  # the folder is on the path of a server, too

from gspo_vllm_worker import TokenGuard

TOKEN = "the-token-of-this-start"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Tries every way of listening on a port, and reports the one that succeeded.
_LISTEN = """
import itertools, socket, sys
port = int(sys.argv[1])
places = [("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)]
options = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
for (host, family), chosen in itertools.product(places, [(), options[:1], options[1:], options]):
    try:
        other = socket.socket(family)
        if family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for option in chosen:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind((host, port))
        other.listen()
        print("listens on", host, "with", chosen)
    except OSError:
        pass
    finally:
        other.close()
"""


def listens_as_another_user(port: int) -> str:
    return said_by(_LISTEN, port)


@needs_root
def test_another_user_cannot_listen_on_a_held_port() -> None:
    with hold_port("127.0.0.1", 0) as held:
        assert listens_as_another_user(held.getsockname()[1]) == ""
        port = held.getsockname()[1]
        with pytest.raises(RolloutError, match=f"port {port}: Address already in use"):
            hold_port("127.0.0.1", port)  # another server of the same user cannot listen either
    assert "listens on 127.0.0.1" in listens_as_another_user(port)


@needs_root
def test_another_user_cannot_take_the_place_of_a_service_that_died(tmp_path: Path) -> None:
    client = ServiceClient(settings(tmp_path), restarts=1)
    try:
        first = dict(client._settings)
        assert client._process is not None
        assert addresses_of_listeners([client._process.pid]) == {"127.0.0.1": [first["port"]]}
        os.kill(client._process.pid, signal.SIGKILL)
        client._process.wait()
        assert listens_as_another_user(first["port"]) == ""
        client.forget(0)  # starts the service again
        assert client._settings["token"] != first["token"]
    finally:
        client.close()


def replays(request: web.Request) -> dict[str, str]:
    """The answer of a server that repeats a proof for another challenge."""
    return {"proof": proof_of(TOKEN, "0" * 64)}


def repeats(request: web.Request) -> dict[str, str]:
    return {"proof": request.query["challenge"]}


LIARS: dict[str, tuple[Callable[[web.Request], Any], str]] = {
    "replays": (replays, "another program"),
    "repeats": (repeats, "another program"),
    "says nothing": (lambda _: [], "another program"),
    "another alphabet": (lambda _: {"proof": "\u00e9"}, "another program"),
}


@contextlib.asynccontextmanager
async def fleet_at(url: str, update_seconds: float = 20) -> AsyncIterator[ScheduledFleet]:
    """A fleet of one server. The fleet believes that it has started this server, and that the
    server is at this URL."""
    async with connected_session() as session:
        client = ServerClient("", session)

        def start(_: str) -> Any:
            client.begin(TOKEN)
            return Started(url)

        settings = fleet_settings(with_routes=True, update_seconds=update_seconds)
        async with ScheduledFleet([Server("server 0", client, start)], settings) as fleet:
            yield fleet


@pytest.mark.parametrize("lie", LIARS)
def test_a_program_on_a_server_s_port_gets_no_token(lie: str, tmp_path: Path) -> None:
    answer, told = LIARS[lie]
    heard: list[str] = []

    async def pretend(request: web.Request) -> web.StreamResponse:
        heard.append(f"{request.raw_path} {dict(request.headers)} {await request.text()}")
        return web.json_response(answer(request) if request.path == PROOF else {})

    async def run() -> None:
        async with site(pretend) as url, fleet_at(url) as fleet:
            with pytest.raises(RolloutError, match=f"server 0: {url}: .*{told}"):
                await fleet.update(weights(tmp_path, 0))

    asyncio.run(run())
    assert [line.split("?")[0].split()[0] for line in heard] == ["/health", PROOF]
    assert TOKEN not in " ".join(heard) and "Authorization" not in " ".join(heard)


def late(answers: int) -> Handler:
    """A server that is too busy to answer its first requests for a proof. Later its proof is
    wrong."""
    asked = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        if request.path == PROOF:
            asked += 1
            if asked <= answers:
                await asyncio.sleep(30)
            return web.json_response({"proof": "wrong"})
        return web.json_response({})

    return answer


def test_a_late_proof_is_asked_for_again_until_the_start_s_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CALL_SECONDS", 0.5)

    async def start_up(answers: int, update_seconds: float) -> str:
        async with site(late(answers)) as url, fleet_at(url, update_seconds) as fleet:
            with pytest.raises(RolloutError) as told:
                await fleet.update(weights(tmp_path, 0))
            return str(told.value)

    told = asyncio.run(start_up(2, 60))
    assert "another program listens there: it does not know the token" in told
    assert asyncio.run(start_up(999, 1)) == "server 0: not ready within 1 s"


def test_a_standalone_server_that_proves_itself_late_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "_CALL_SECONDS", 0.5)

    async def run() -> None:
        async with site(late(2)) as url:
            started = Started(url)
            monkeypatch.setattr(standalone, "ServerProcess", lambda *_: started)
            environ = {"GSPO_SERVER_TOKEN": TOKEN}
            await standalone.serve([], environ, "127.0.0.1", None, asyncio.Event())

    told = "another program listens there: it does not know the token"
    with pytest.raises(RolloutError, match=told):
        asyncio.run(run())


def guarded(monkeypatch: pytest.MonkeyPatch, variable: str = TOKEN) -> Handler:
    """The package's guard in front of an application. variable: the contents of the environment
    variable with the token."""
    monkeypatch.setenv("GSPO_SERVER_TOKEN", variable)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return handler_of(TokenGuard(app))


def test_a_server_proves_itself_before_it_is_sent_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with site(guarded(monkeypatch)) as url, connected_session() as session:
            client = ServerClient(url, session)
            client.begin("the token of an earlier start")
            assert "another program" in str(await client.why_not_proven(seconds=5))
            client.begin(TOKEN)
            assert await client._call("GET", "/health", seconds=5) == {}
            with pytest.raises(ServerGone, match="before the server has proven who it is"):
                await client.weight_version(seconds=5)
            assert await client.why_not_proven(seconds=5) is None
            assert await client._call("GET", "/weight_info", seconds=5) == {}
            client.begin("the token of a later start")
            with pytest.raises(ServerGone, match="before the server has proven who it is"):
                await client.weight_version(seconds=5)
            async with session.get(f"{url}{PROOF}?challenge=abc") as answer:
                assert answer.status == 400  # anything but a challenge is not signed

    asyncio.run(run())


def test_a_program_cannot_send_us_to_the_server_for_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If redirects were followed, the right server would prove itself, and the program would then
    get the token."""

    async def run() -> None:
        async with site(guarded(monkeypatch)) as url, connected_session() as session:

            async def elsewhere(request: web.Request) -> web.StreamResponse:
                raise web.HTTPTemporaryRedirect(url + request.raw_path)

            async with site(elsewhere) as liar:
                client = ServerClient(liar, session)
                client.begin(TOKEN)
                assert await client.why_not_proven(seconds=5) is not None
                with pytest.raises(ServerGone, match="before the server has proven who it is"):
                    await client.weight_version(seconds=5)

    asyncio.run(run())


def test_health_is_asked_for_without_a_token() -> None:
    heard: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        heard.append(request.headers.get("Authorization", ""))
        return web.json_response({"weight_version": "1"})

    async def run() -> None:
        async with site(note) as url, connected_session() as session:
            client = ServerClient(url, session, TOKEN)  # a server at a URL from the configuration
            assert await client.why_not_ready(seconds=5) is None
            assert await client.weight_version(seconds=5) == "1"

    asyncio.run(run())
    assert heard == ["", f"Bearer {TOKEN}"]


def test_blanks_around_a_token_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A secret of Kubernetes often ends with a line end. An empty variable gives no token."""

    async def ask() -> None:
        async with site(guarded(monkeypatch, f" {TOKEN}\n")) as url, connected_session() as session:
            client = ServerClient(url, session, TOKEN)
            assert await client._call("GET", "/weight_info", seconds=5) == {}

    asyncio.run(ask())
    monkeypatch.setattr(standalone, "device_of", lambda _: "cuda")
    folder = write_model(tmp_path / "model", "llama", seed=1)
    for variable, is_told in ((f"{TOKEN}\n", False), (" ", True), ("", True)):
        monkeypatch.setenv("GSPO_SERVER_TOKEN", variable)
        _, environ = standalone.server_command(folder, "python", "float32", {})
        token = environ["GSPO_SERVER_TOKEN"]
        assert token and (token == TOKEN) != is_told
        standalone._tell_ready("http://here", token, scores=False)
        assert (f"GSPO_SERVER_TOKEN={token}\n" in capsys.readouterr().out) == is_told


def test_the_token_of_the_service_is_not_in_its_command(tmp_path: Path) -> None:
    with contextlib.closing(ServiceClient(settings(tmp_path), restarts=0)) as client:
        assert client._process is not None
        words = " ".join(psutil.Process(client._process.pid).cmdline())
        assert "rollout.vllm.service" in words and client._settings["token"] not in words
        listeners = addresses_of_listeners([client._process.pid])
        assert listeners == {"127.0.0.1": [client._settings["port"]]}


@pytest.mark.parametrize("nodes", [[], ["127.0.0.1"]], ids=["here", "on another node"])
def test_the_token_of_a_server_is_not_in_its_command(
    nodes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GSPO_ROLLOUT_NODES", ",".join(nodes))
    started: list[tuple[Any, ...]] = []
    for name in ("ServerProcess", "RemoteProcess"):
        monkeypatch.setattr(service_module, name, lambda *all_of_it: started.append(all_of_it))
    values = settings(tmp_path) | {"nodes": nodes}
    service = service_module.Service(values, *service_module._read(values))
    fleet = SimpleNamespace(settings=service._fleet_settings())
    monkeypatch.setattr(service, "fleet", fleet, raising=False)
    [server] = service._servers(session=None)
    assert server.start is not None
    server.start("folder")
    [parts] = started
    words, environ = parts[2:4] if nodes else parts[:2]
    token = environ["GSPO_SERVER_TOKEN"]
    assert token == server.client._token
    assert "gspo_vllm_server" in words and token not in " ".join(words)
