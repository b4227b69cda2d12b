"""The rollout service, a process beside rank 0: `python -m gspo_megatron.rollout.vllm.service`.

The service reads its settings, including its port, as JSON from stdin. It writes one line of JSON
to stdout, which says that it listens, or why it cannot start. Rank 0 controls it by HTTP on
loopback, with a token (`ServiceClient`). The service ends when rank 0 ends. Then the servers that
it has started end, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import hmac
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from aiohttp import web
from pydantic import TypeAdapter

from gspo_megatron.addresses import key_in, own_address_for_servers
from gspo_megatron.config import Config
from gspo_megatron.config.load import parse_config
from gspo_megatron.data.inputs import Inputs, read_inputs
from gspo_megatron.environments.registry import episodes_of, tools_of
from gspo_megatron.errors import UserError, tell
from gspo_megatron.process.cores import raise_open_files
from gspo_megatron.process.coroutines import allow_many_threads
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rollout.engine import RolloutRequest
from gspo_megatron.rollout.store import FOLDER, forget, step_of
from gspo_megatron.rollout.vllm.checks import Needs, tokenized
from gspo_megatron.rollout.vllm.client import TOKEN_VARIABLE, ServerClient, connected_session
from gspo_megatron.rollout.vllm.episodes import Scorers, ServedRequests
from gspo_megatron.rollout.vllm.fleet import Fleet
from gspo_megatron.rollout.vllm.process import (
    ServerProcess,
    adapter_arguments,
    adapter_environment,
    common_environment,
    cpu_arguments,
    cpu_environment,
    needed_arguments,
    server_words,
)
from gspo_megatron.rollout.vllm.remote import FOLDER as SERVERS
from gspo_megatron.rollout.vllm.remote import Node, RemoteProcess, exchange_files, server_log
from gspo_megatron.rollout.vllm.scheduler import Scheduler
from gspo_megatron.rollout.vllm.server import FleetSettings, Server
from gspo_megatron.rollout.vllm.service_client import END_SIGNAL, LONGEST_WAIT, STACKS_SIGNAL
from gspo_megatron.rollout.vllm.weight_check import WeightCheck
from gspo_megatron.rollout.vllm.weights import Weights
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

_REQUESTS = TypeAdapter(RolloutRequest)
_STUCK_SECONDS = 5.0  # after the death of rank 0, the event loop has this time to learn of it


class Service:
    """The HTTP server and its state. It runs in its own thread. The main thread calls the reward
    function."""

    def __init__(self, settings: dict[str, Any], config: Config, inputs: Inputs) -> None:
        self.config, self.inputs, self.settings = config, inputs, settings
        self.folder = Path(str(config.logging.dir)) / FOLDER
        names, address = settings["nodes"], None
        if names:  # servers on other nodes listen on the interface towards this host
            address = own_address_for_servers()
        self.nodes = [Node(self.folder / SERVERS, name, address) for name in names]
        self.scorers = Scorers(config, inputs)
        self.updating: asyncio.Task[None] | None = None
        self.told_to_end = False  # by SIGTERM, which the servers then got, too
        self.is_ending = False  # the event loop has learned that the service ends
        self.heartbeats = 0  # of work in this process, such as scoring
        self.loop: asyncio.AbstractEventLoop | None = None

    async def run(self, told_ready: Callable[[], None]) -> None:
        """Serve until the main thread stops."""
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        allow_many_threads(self.loop)
        with heard_by(self._count_heartbeat):
            await self._serve(told_ready)

    def _count_heartbeat(self) -> None:
        self.heartbeats += 1

    async def _serve(self, told_ready: Callable[[], None]) -> None:
        exchange = asyncio.create_task(exchange_files(self.nodes))
        async with connected_session() as session:
            self.fleet = Fleet(self._servers(session), self._fleet_settings())
            self.scheduler = Scheduler(self.fleet)
            self.requests = self._served_requests()
            runner = web.AppRunner(self._app())
            await runner.setup()
            # rank 0 holds this port (see `hold_port`)
            site = web.TCPSite(runner, "127.0.0.1", self.settings["port"], reuse_port=True)
            await site.start()
            told_ready()
            try:
                await self._until_end()
            finally:
                self.is_ending = True
                await self.requests.close()
                await self.fleet.close()
                if not self.rank_0_lives():
                    self.leave()
                await self.scorers.close()
                exchange.cancel()
                await asyncio.wait([exchange])
                await runner.cleanup()

    def _served_requests(self) -> ServedRequests:
        return ServedRequests(
            self.scheduler,
            self.scorers,
            self.inputs.files,
            _stops(self.config, self.inputs),
            self.folder,
            self.settings["origin"],
            episodes_of(self.config, self.inputs.tokenizer),
        )

    def rank_0_lives(self) -> bool:
        return os.getppid() == self.settings["starter"]

    def leave(self) -> NoReturn:
        """End this process after the death of rank 0. Nobody waits for responses and rewards now,
        and one that hangs would keep this process alive for ever."""
        # Rank 0 can no longer remove this folder, which may be in memory.
        shutil.rmtree(self.settings["weights_folder"], ignore_errors=True)
        os._exit(0)

    async def _until_end(self) -> None:
        """Wait for `end`, or for the end of rank 0. A reward may keep the main thread, which runs
        signal handlers, busy."""
        ended = asyncio.create_task(self.ended.wait())
        while self.rank_0_lives() and not ended.done():
            await asyncio.wait([ended], timeout=1.0)
        ended.cancel()

    def end(self) -> None:
        """End the service. Other threads may call this."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # raised if `run` has ended with an error
                self.loop.call_soon_threadsafe(self.ended.set)

    # The servers and their settings

    def _needs(self, config: Config, inputs: Inputs) -> Needs:
        section, finds_texts = config.rollout.vllm, "stop" in _stops(config, inputs)
        return Needs(
            # This is the model's limit, so it is enough for the lengths of all phases.
            max_model_len=config.resolved_model().max_sequence_length,
            dtype=self.settings["dtype"],
            with_routes="r3" in config.routing.modes,
            must_stream=section.weight_transport == "nccl",
            # A server that this run starts has the trainer's tokenizer, or needs none.
            tokenized=tokenized(inputs.tokenizer, is_needed=finds_texts) if section.urls else None,
        )

    def _fleet_settings(self) -> FleetSettings:
        section = self.config.rollout.vllm
        return FleetSettings(
            facts=ModelFacts(**self.settings["facts"]),
            needs=self._needs(self.config, self.inputs),
            restarts=section.restarts,
            update_seconds=section.weight_update_timeout_seconds,
            silence_seconds=section.stall_timeout_seconds,
            max_staleness=self.config.rollout.staleness,
            keeps_kv=self.config.rollout.kv_after_update == "keep",
            base=str(Path(str(self.config.model.hf_path)).resolve())
            if section.takes_adapters
            else None,
        )

    def _servers(self, session: Any) -> list[Server]:
        section = self.config.rollout.vllm
        if section.urls:
            token = key_in(TOKEN_VARIABLE)
            return [
                Server(f"server {url}", ServerClient(url, session, token)) for url in section.urls
            ]
        servers: list[Server] = []
        for number in range(section.servers):
            client = ServerClient("", session)  # url and token are set when the server starts
            if self.nodes:
                place, slot = divmod(number, section.servers // len(self.nodes))
                node = self.nodes[place]
                start = partial(self._start_there, client, node, number, slot)
                servers.append(Server(f"server {number} on {node.name}", client, start))
            else:
                start = partial(self._start_here, client, number)
                servers.append(Server(f"server {number}", client, start))
        first, last = (server_log(self.folder / SERVERS, n) for n in (0, section.servers - 1))
        logs = f"log {first}" if first == last else f"logs {first} to {last.name}"
        tell(f"starting {len(servers)} server{'s'[: first != last]}, {logs}", sys.stdout)
        return servers

    def _start_here(self, client: ServerClient, number: int, folder: str) -> ServerProcess:
        devices, size = self.settings["devices"], self.config.rollout.vllm.tensor_parallel_size
        environ = self._environment(client, devices[number * size : (number + 1) * size])
        log = server_log(self.folder / SERVERS, number)
        return ServerProcess(self._words(folder), environ, log)

    def _start_there(
        self, client: ServerClient, node: Node, number: int, slot: int, folder: str
    ) -> RemoteProcess:
        """Start a server on another node. slot: the number of the server among the servers of the
        node, from 0."""
        size = 0 if self.settings["on_cpu"] else self.config.rollout.vllm.tensor_parallel_size
        gpus = range(slot * size, (slot + 1) * size)
        return RemoteProcess(node, number, self._words(folder), self._environment(client), gpus)

    def _words(self, folder: str) -> list[str]:
        """Return the command that starts a server with the weights in `folder`."""
        section, tokenizer = self.config.rollout.vllm, Path(self.config.data.tokenizer)
        shape, workers = self.config.resolved_model(), section.tensor_parallel_size
        routes = self.fleet.settings.needs.with_routes
        arguments = {
            **needed_arguments(folder, self.settings["dtype"], routes=routes),
            **(cpu_arguments(shape, workers) if self.settings["on_cpu"] else {}),
            "max_model_len": shape.max_sequence_length,
            "tensor_parallel_size": workers,
            **(
                {"tokenizer": str(tokenizer.resolve())}
                if tokenizer.is_dir()
                else {"skip_tokenizer_init": True}
            ),
            **self._adapter_arguments(self.config),
            **section.options,
        }
        return server_words(section.python or sys.executable, arguments)

    @staticmethod
    def _adapter_arguments(config: Config) -> dict[str, Any]:
        if not config.rollout.vllm.takes_adapters:
            return {}
        # A server holds the current version, the older versions of responses in progress, and the
        # version that is being loaded.
        return adapter_arguments(config.model.lora.rank, config.rollout.staleness + 2)

    def _environment(self, client: ServerClient, devices: Sequence[str] = ()) -> dict[str, str]:
        """Return the environment variables for a start of a server, with a new token."""
        token = secrets.token_urlsafe(32)
        client.begin(token)
        on_cpu = self.settings["on_cpu"]
        options = self.config.rollout.vllm.options
        environ = common_environment(token, devices) | (cpu_environment(options) if on_cpu else {})
        return environ | (adapter_environment() if self.fleet.settings.base is not None else {})

    # The next phase of the run

    async def _begin_phase(self, request: web.Request) -> web.Response:
        """Continue with the settings of the run's next phase, if the servers fit this phase.
        Otherwise, answer why they do not, and change nothing."""
        settings = await request.json()
        try:
            # This runs in the main thread, as at the start, because it may run the user's code.
            config, inputs = await self.scorers.in_main(lambda: _read(settings))
            if other := self._needs_others(config, inputs):
                return web.json_response({"other": other})
            await self.requests.close()
            await self.scorers.renew(config, inputs)
        except UserError as error:
            return web.json_response({"error": str(error)})
        self.config, self.inputs, self.settings = config, inputs, settings
        self.fleet.take_settings(self._fleet_settings())
        self.requests = self._served_requests()
        gc.freeze()  # garbage collection never examines the new prompts, either
        tell("the servers go on with the next phase", sys.stdout)
        return web.json_response({"other": ""})

    def _needs_others(self, config: Config, inputs: Inputs) -> str:
        """Return why the next phase cannot use the servers of this phase. Returns an empty text if
        the next phase can use these servers."""
        if config.rollout.vllm != self.config.rollout.vllm:
            return "the next phase changes rollout.vllm"
        if self._adapter_arguments(config) != self._adapter_arguments(self.config):
            return "the next phase changes how many adapters they hold (rollout.max_staleness)"
        if self._needs(config, inputs) != self.fleet.settings.needs:
            return "the next phase needs other abilities of them (rollout.stop)"
        out = [server.name for server in self.fleet.servers if not server.serves]
        return f"{', '.join(out)} is out of service" if out else ""

    # The routes for rank 0

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        app.router.add_post("/requests", self._begin_request)
        app.router.add_get("/requests/{name}", self._request_status)
        app.router.add_post("/weights", self._take_weights)
        app.router.add_get("/weights", self._weights_status)
        app.router.add_post("/weights/parts", self._add_to_weights)
        app.router.add_get("/weights/receivers", self._receivers)
        app.router.add_post("/forget", self._forget)
        app.router.add_post("/phase", self._begin_phase)
        app.router.add_get("/figures", self._figures)
        return app

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        # compared as bytes, because compare_digest takes only ASCII in strings
        authorization = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(authorization, f"Bearer {self.settings['token']}".encode()):
            return web.json_response({"error": "token"}, status=401)
        return await handler(request)

    async def _begin_request(self, request: web.Request) -> web.Response:
        rollout = _REQUESTS.validate_json(await request.read())
        return web.json_response(self.requests.begin(rollout).status())

    async def _request_status(self, request: web.Request) -> web.Response:
        running = self.requests.running[request.match_info["name"]]
        assert running.task is not None
        await self._wait_for_change(running.task)
        drawn = sum(each.tokens for each in self.fleet.servers)
        return web.json_response({**running.status(), "drawn": drawn, **self._own_status()})

    def _own_status(self) -> dict[str, int]:
        """The part of each status that is about the service itself."""
        return {
            "needs_folder": self.fleet.loader.needs_folder,
            "told_to_end": self.told_to_end,
            "heartbeats": self.heartbeats,
            # Each start has a deadline, and the number of restarts is limited.
            "is_restarting": any(each.may_come_back for each in self.fleet.servers),
        }

    async def _wait_for_change(self, task: asyncio.Task[Any]) -> None:
        """Wait until the task ends, a server needs a folder of weights, or LONGEST_WAIT is over."""
        folder_wait = asyncio.create_task(self.fleet.loader.wait_until_folder_is_needed())
        await asyncio.wait(
            [task, folder_wait], timeout=LONGEST_WAIT, return_when=asyncio.FIRST_COMPLETED
        )
        folder_wait.cancel()

    async def _take_weights(self, request: web.Request) -> web.Response:
        content = await request.json()
        receivers = self.fleet.take_weights(Weights(**_weights_parts(content)))
        self.updating = asyncio.create_task(self.fleet.update_servers())
        return web.json_response({"receivers": receivers})

    async def _add_to_weights(self, request: web.Request) -> web.Response:
        await self.fleet.loader.add_to_weights(**_weights_parts(await request.json()))
        return web.json_response({})

    async def _receivers(self, _: web.Request) -> web.Response:
        return web.json_response([s.stream_key for s in self.fleet.servers if s.stream_key])

    async def _weights_status(self, _: web.Request) -> web.Response:
        assert self.updating is not None
        await self._wait_for_change(self.updating)
        error = self.updating.exception() if self.updating.done() else None
        if error is not None and not isinstance(error, UserError):
            raise error
        return web.json_response(
            {
                "done": self.updating.done(),
                "error": None if error is None else {"kind": "RolloutError", "text": str(error)},
                "can_stream": all(
                    each.abilities.can_stream for each in self.fleet.servers if each.serves
                ),
                **self._own_status(),
            }
        )

    async def _forget(self, request: web.Request) -> web.Response:
        """Delete the requests up to a step. No resumed run needs them any more."""
        step = (await request.json())["step"]
        running = self.requests.running
        self.requests.running = {k: v for k, v in running.items() if step_of(k) > step}
        forget(self.folder, lambda name: step_of(name) > step)
        return web.json_response({})

    async def _figures(self, _: web.Request) -> web.Response:
        servers = self.fleet.servers
        return web.json_response(
            {
                "time": time.time(),
                "began": self.fleet.began,
                "busy_seconds": fmean(each.busy.seconds for each in servers),
                "working_seconds": fmean(each.working.seconds for each in servers),
                "tokens": sum(each.tokens for each in servers),
                "kv_usage": max(each.kv_usage for each in servers),
                "restarts": sum(each.restarts for each in servers),
                "serving": sum(each.serves for each in servers),
                "in_flight": sum(len(each.in_flight) for each in servers),
                "resubmitted": self.scheduler.resubmitted,
                "load_seconds": max(each.load_seconds for each in servers),
                "check_seconds": max(each.check_seconds for each in servers),
            }
        )


def _stops(config: Config, inputs: Inputs) -> dict[str, Any]:
    """Return the sampling parameters that end a response: token ids, and texts to search for.

    The server searches for the texts.
    """
    tokenizer, stops = inputs.tokenizer, config.rollout.stop
    special = tokenizer.special_tokens
    ids = [special[text] for text in stops if text in special]
    texts = [text for text in stops if text not in special]
    return {
        "stop_token_ids": [*tokenizer.eos_ids, *ids],
        "ignore_eos": True,  # only the ids above end a response, not the ids that the server knows
        **({"stop": texts} if texts else {}),
        # A server searches the text that it would show, by default without special tokens.
        **({"skip_special_tokens": False} if any(s in t for t in texts for s in special) else {}),
    }


def _read(settings: dict[str, Any]) -> tuple[Config, Inputs]:
    """Return the configuration in the settings, and the input files that it names."""
    config = parse_config(settings["config"])
    return config, read_inputs(config, tools_of(config))


def _weights_parts(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `Weights` from JSON values."""
    check = given.get("check")
    return given if check is None else {**given, "check": WeightCheck(**check)}


def collect_garbage_less_often() -> None:
    """Make garbage collection rarer.

    Parsing a response makes several short-lived objects for each token. By default Python collects
    garbage after every few hundred objects, which would take two thirds of the service's time.
    """
    gc.freeze()  # garbage collection never examines the objects that exist now
    gc.set_threshold(50_000, 20, 100)


def main() -> None:
    to_rank_0 = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # from now on, prints go to stderr, for people to read

    def tell(**values: Any) -> None:
        to_rank_0.write(json.dumps(values) + "\n")
        to_rank_0.flush()

    settings = json.load(sys.stdin)
    try:
        service = Service(settings, *_read(settings))
    except UserError as error:
        tell(error=str(error))
        return
    collect_garbage_less_often()
    raise_open_files()
    # works even while a reward function holds the GIL
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    signal.signal(END_SIGNAL, lambda *_: service.scorers.stop())

    def at_sigterm(*_: object) -> None:
        """Stop only if rank 0 has died. A job scheduler sends SIGTERM to all processes. Then rank 0
        still needs the service, to finish its step and save the run. But vLLM ends its engine at
        SIGTERM, and leaves open requests without an answer."""
        service.told_to_end = True
        if not service.rank_0_lives():
            service.scorers.stop()

    signal.signal(signal.SIGTERM, at_sigterm)
    failure: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(service.run(lambda: tell(ready=True)))
        except BaseException as error:  # noqa: BLE001 (raised below, in the main thread)
            failure.append(error)
            service.scorers.stop()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        service.scorers.work()
    finally:
        service.end()
        while thread.is_alive():
            thread.join(_STUCK_SECONDS)
            # An environment may block the other thread for ever.
            if thread.is_alive() and not (service.is_ending or service.rank_0_lives()):
                service.leave()
    if failure:
        raise failure[0]


if __name__ == "__main__":
    main()
