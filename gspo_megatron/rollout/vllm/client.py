"""One vLLM server over HTTP: tokens in, tokens out, new weights, and what it is able to do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import re
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import aiohttp
from pydantic_core import from_json

from gspo_megatron.errors import RolloutError
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import (
    ABOUT,
    FIGURES,
    FORM,
    GENERATE,
    LENGTH,
    MALFORMED,
    NOT_AS_VLLM,
    PARTS,
    PROOF,
    TAKE_BACK,
    TOKEN_VARIABLE,
    Failure,
    ModelFacts,
    Response,
    parse_metrics,
    parse_response,
    part_request,
    proof_of,
    unpack,
)

HEALTH = "/health"  # of vLLM, which every server answers without a token
MODEL = "policy"  # the name under which started servers serve the model

# How a server is paused for new weights, and what becomes of responses under way. They go on
# after it: with what the new weights make of their tokens, or with what the old ones have made.
RECOMPUTE = {"mode": "keep", "clear_cache": "true"}
KEEP = {"mode": "keep", "clear_cache": "false"}
# They end before it, and the pause lasts as long.
WAIT = {"mode": "wait", "clear_cache": "true"}

_FLIGHT = re.compile(r"[0-9a-f]{32}")  # in vLLM's name of a request
_LATER = (408, 429)  # of a proxy: request timeout, too many requests
_KEPT_SECONDS = 2.0  # for which a connection without a request is kept; vLLM closes it after 5
_CONNECT_SECONDS = 30.0
_NO_DEADLINE = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
_BUFFER = 1 << 22  # bytes of an answer that may wait: those of a part come at once


class ServerGone(Exception):  # noqa: N818 (not the program's error: the request goes elsewhere)
    """The server is away, late, or failed by itself; another one may answer."""


class NoAnswer(ServerGone):
    """Nobody has answered: away, or late."""


class ServerRefused(Exception):  # noqa: N818 (the request is at fault, or the server's setup)
    """The server will not do that; asking again, or another one, is of no use."""


class OutOfFilesError(RolloutError):
    """This process, or its machine, has no file descriptor left. No server is to blame."""

    def __init__(self) -> None:
        super().__init__(
            "the rollout service has no file descriptor left for another connection: raise the "
            "hard limit (ulimit -n) where the run is started"
        )


class ServerClient:
    """The HTTP calls of one server. Every call has a deadline, and raises ServerGone or
    ServerRefused; or OutOfFilesError."""

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None = None) -> None:
        """token: of a server that the user names, and so trusts."""
        self.url, self._session, self._token = url.rstrip("/"), session, token
        self._is_ours, self._has_proven = False, True

    def begin(self, token: str) -> None:
        """The server is one of ours, and starts now with this token. It is sent nothing that is
        secret before `why_not_proven` has found that the token is known there."""
        self._token, self._is_ours, self._has_proven = token, True, False

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        facts: ModelFacts,
        *,
        seconds: float | None,
        routes: bool,
        name: str | None = None,
        salt: str | None = None,
        model: str | None = None,
    ) -> Response:
        """A response to the token ids `prompt`; `sampling`: vLLM's SamplingParams; name: of the
        request, as in `response_tokens`; salt: what is remembered of prompts with another one is
        not used; model: an adapter's name, or None: the model itself."""
        given: dict[str, Any] = {"token_ids": list(prompt)}
        given["sampling_params"] = {"logprobs": 0, **sampling}
        given |= {} if name is None else {"request_id": name}
        given |= {} if salt is None else {"cache_salt": salt}
        given |= {} if model is None else {"model": model}
        found = await self._call("POST", GENERATE, given, seconds=seconds)
        with malformed():
            return parse_response(found, len(prompt), facts, routes=routes)

    async def generate_part(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        names: Sequence[str],
        seeds: Sequence[Sequence[int] | None],
        facts: ModelFacts,
        *,
        routes: bool,
        salt: str | None = None,
        model: str | None = None,
    ) -> AsyncGenerator[list[tuple[int, Response]]]:
        """Several responses to one prompt, as they end, with their numbers in the part: those that
        have ended together at a time. Only of a server with our middleware; there is no deadline.
        names, seeds: of each of them, the seeds as numbers for `seed_of`; the other arguments are
        those of `generate`."""
        body = part_request(
            prompt, sampling, names, seeds, facts, routes=routes, salt=salt, model=model
        )
        async with self._asked("POST", PARTS, body, seconds=None) as answer:
            if answer.status >= 400:
                _fail(PARTS, answer.status, (await answer.read()).decode(errors="replace"))
            while (record := await _record(answer.content)) is not None:
                ended = []
                with malformed():
                    for number, outcome in unpack(record, len(prompt), facts, routes=routes):
                        if not isinstance(outcome, Failure):
                            ended.append((number, outcome))
                        elif outcome.status:
                            _fail(GENERATE, outcome.status, outcome.text)
                        else:
                            raise ServerGone(f"{NOT_AS_VLLM}: {outcome.text}")
                yield ended

    async def take_back(self, names: Sequence[str], *, seconds: float) -> set[str]:
        """End those of these responses of parts that are still drawn. Returns the names of those
        that have ended before: their answers are on their way."""
        found = await self._call("POST", TAKE_BACK, {"names": list(names)}, seconds=seconds)
        with malformed():
            return set(found["ended"])

    async def gives_parts(self, *, seconds: float) -> bool:
        """Whether it has our middleware, in the form that this client speaks."""
        try:
            found = await self._call("GET", ABOUT, seconds=seconds)
        except (ServerGone, ServerRefused):  # it knows no such route, and may say so as it likes
            return False
        return isinstance(found, dict) and found.get("form") == FORM

    async def load_weights(
        self,
        folder: str | None,
        version: str,
        *,
        seconds: float,
        forgets_prepacked: bool,
        stream: Mapping[str, Any] | None = None,
        pause: Mapping[str, str] = RECOMPUTE,
        paused: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Replace the weights by those of a Hugging Face folder, or by what rank 0 sends: `stream`
        has the arguments of `GspoWorker.receive_weights`. `pause` says what becomes of requests
        under way; what the server remembers of prompts is forgotten, but with KEEP. `paused` is
        entered and left while the server stands still.

        forgets_prepacked: the server has our worker extension. On CPUs vLLM packs experts for its
        kernels at the first load only, and would silently ignore the new ones."""
        await self._call("POST", "/pause", query=pause, seconds=seconds)
        try:
            async with paused or contextlib.nullcontext():
                if forgets_prepacked:
                    await self._remote("forget_prepacked_experts", {}, seconds)
                if stream is not None:
                    await self._remote("receive_weights", stream, seconds)
                else:
                    await self._remote("reload_weights", {"weights_path": folder}, seconds)
                named = {"new_version": version}
                await self._call("POST", "/update_weight_version", named, seconds=seconds)
                if pause != KEEP:
                    await self._call("POST", "/reset_prefix_cache", seconds=seconds)
        finally:
            await self._call("POST", "/resume", seconds=seconds)

    async def load_adapter(self, name: str, folder: str, *, seconds: float) -> None:
        """Have requests for the model `name` get the base with the adapter in a PEFT folder. The
        name is a new one: under an old one vLLM would go on with what it remembers of prompts."""
        given = {"lora_name": name, "lora_path": folder}
        await self._call("POST", "/v1/load_lora_adapter", given, seconds=seconds, as_text=True)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Forget the name of an adapter. The next one to be loaded takes its place in memory."""
        given = {"lora_name": name}
        await self._call("POST", "/v1/unload_lora_adapter", given, seconds=seconds, as_text=True)

    async def adapter_sums(self, folder: str | None, *, seconds: float) -> list[dict[str, Any]]:
        """GspoWorker.adapter_sums of every worker; only where the server has it."""
        found = await self._remote("adapter_sums", {"folder": folder}, seconds)
        with malformed():
            return list(found["results"])

    async def response_tokens(self, *, seconds: float) -> dict[str, int] | None:
        """GspoWorker.response_tokens, by the names that were given to `generate`."""
        found = await self._remote("response_tokens", {}, seconds)
        with malformed():
            workers = found["results"]
            if any(each is None for each in workers):
                return None
            named = ((_FLIGHT.search(key), n) for each in workers for key, n in each.items())
            return {key[0]: int(count) for key, count in named if key is not None}

    async def weight_sums(self, folder: str | None, *, seconds: float) -> list[dict[str, Any]]:
        """GspoWorker.weight_sums of every worker; only where the server has it."""
        found = await self._remote("weight_sums", {"folder": folder}, seconds)
        with malformed():
            return list(found["results"])

    async def weight_version(self, *, seconds: float) -> str:
        found = await self._call("GET", "/weight_info", seconds=seconds)
        with malformed():
            return str(found["weight_version"])

    async def why_not_healthy(self, *, seconds: float) -> str | None:
        """Ask for its health; None: it is healthy. Anybody may answer that."""
        try:
            await self._call("GET", HEALTH, seconds=seconds)
        except (ServerGone, ServerRefused) as error:
            return str(error)
        return None

    async def why_not_ready(self, *, seconds: float) -> str | None:
        """Ask for its health, and where it is one of ours for its proof; None: both are there.
        Raises ServerGone where another program answers in its place."""
        why = await self.why_not_healthy(seconds=seconds)
        if why is None and self._is_ours:
            try:
                wrong = await self.why_not_proven(seconds=seconds)
            except NoAnswer as error:
                return str(error)  # which is no wrong proof: it is asked again
            if wrong:
                raise ServerGone(wrong)
        return why

    async def why_not_proven(self, *, seconds: float) -> str | None:
        """Ask for a proof; None: whoever listens at the url knows the token of this start. Another
        program may have taken its port. Raises NoAnswer where nothing is known, because the server
        is busy, for example: it may be asked again."""
        assert self._token is not None, "a server that was started without a token"
        challenge = secrets.token_hex(32)  # new each time: an old answer is of no use
        try:
            found = await self._call("GET", PROOF, query={"challenge": challenge}, seconds=seconds)
        except NoAnswer:
            raise
        except (ServerGone, ServerRefused) as error:
            return f"{self.url}: what listens there does not prove that it is this server: {error}"
        proof = str(found.get("proof")) if isinstance(found, dict) else ""
        if not hmac.compare_digest(proof.encode(), proof_of(self._token, challenge).encode()):
            return f"{self.url}: what listens there is another program: it has not the token"
        self._has_proven = True
        return None

    async def figures(self, *, seconds: float, in_short: bool = False) -> dict[str, float]:
        """vLLM's own metrics, by name without the prefix. in_short: the few that `Fleet` needs,
        picked by our middleware: all of them are 1,000 lines."""
        if in_short:
            found = await self._call("GET", FIGURES, seconds=seconds)
            with malformed():
                return {name: float(value) for name, value in found.items()}
        return parse_metrics(await self._call("GET", "/metrics", seconds=seconds, as_text=True))

    async def settings(self, *, seconds: float) -> dict[str, Any]:
        """The server's own configuration, and max_model_len of the model it serves."""
        models = await self._call("GET", "/v1/models", seconds=seconds)
        query = {"config_format": "json"}
        info = await self._call("GET", "/server_info", query=query, seconds=seconds)
        with malformed():
            return {**info["vllm_config"], "max_model_len": models["data"][0]["max_model_len"]}

    async def paths(self, *, seconds: float) -> set[str]:
        """The paths that the server answers: what it is able to do."""
        found = await self._call("GET", "/openapi.json", seconds=seconds)
        with malformed():
            return set(found["paths"])

    async def model(self, *, seconds: float) -> dict[str, Any]:
        """config.json of its model, as a server with our worker extension tells it."""
        found = await self._remote("tell_config", {}, seconds)
        with malformed():
            return dict(json.loads(found["results"][0]))

    async def tokenize(self, text: str, *, seconds: float) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        given = {"prompt": text, "add_special_tokens": False}
        found = await self._call("POST", "/tokenize", given, seconds=seconds)
        with malformed():
            return list(found["tokens"])

    async def _remote(self, method: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Call a method of vLLM's workers; returns the answer."""
        given = {"method": method, "kwargs": dict(arguments), "timeout": seconds}
        return await self._call("POST", "/collective_rpc", given, seconds=seconds)

    async def _call(
        self,
        verb: str,
        path: str,
        given: Any = None,
        *,
        seconds: float | None,
        query: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> Any:
        body = None if verb == "GET" else json.dumps({} if given is None else given).encode()
        async with self._asked(verb, path, body, seconds=seconds, query=query) as answer:
            content = await answer.read()
            if answer.status >= 400:
                _fail(path, answer.status, content.decode(errors="replace"))
            if as_text or not content:
                return content.decode(errors="replace")
            try:
                return from_json(content)  # long responses: in a fifth of json's time
            except ValueError as error:
                raise ServerGone(f"{path}: the answer is not JSON: {error}") from error

    def _headers(self, path: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if path in (HEALTH, PROOF):
            return headers
        if not self._has_proven:
            raise ServerGone(f"{path}: nothing is sent before the server has proven itself")
        return headers | ({"Authorization": f"Bearer {self._token}"} if self._token else {})

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        *,
        seconds: float | None,
        query: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer, of which the body is not yet here. What goes wrong with the connection, until
        the end of the block, raises ServerGone."""
        asked: dict[str, Any] = {"data": body, "params": query, "headers": self._headers(path)}
        asked["timeout"] = _NO_DEADLINE if seconds is None else aiohttp.ClientTimeout(seconds)
        asked["allow_redirects"] = not self._is_ours  # ours sends nobody elsewhere
        try:
            try:
                answer = await self._session.request(verb, self.url + path, **asked)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # The server may have closed a connection that was idle, as this request was on its
                # way. One that is away is not there for a new connection either.
                answer = await self._session.request(verb, self.url + path, **asked)
            async with answer:
                yield answer
        except asyncio.TimeoutError:
            limit = _CONNECT_SECONDS if seconds is None else seconds
            raise NoAnswer(f"{path}: no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise OutOfFilesError from error
            raise NoAnswer(f"{path}: {error or type(error).__name__}") from error


def connected_session() -> aiohttp.ClientSession:
    """A session for the clients of all servers, without a limit on connections. A connection is
    kept for less time than a server keeps it, so that hardly ever both use and close it at once."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS)
    return aiohttp.ClientSession(connector=connector, read_bufsize=_BUFFER)


def _fail(path: str, status: int, text: str) -> NoReturn:
    """Raise what an answer with an error status means."""
    told = f"{path}: HTTP {status}: {' '.join(text.split())[:300]}"
    if status == 401:
        raise ServerRefused(
            f"{path}: it asks for another token: set {TOKEN_VARIABLE} to the one that it was "
            "started with"
        )
    if (status >= 500 or status in _LATER) and path != "/collective_rpc":
        raise ServerGone(told)
    raise ServerRefused(told)


async def _record(content: aiohttp.StreamReader) -> bytes | None:
    """The next record of a part; None: there is none."""
    try:
        (length,) = LENGTH.unpack(await content.readexactly(LENGTH.size))
        return await content.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ServerGone(f"{PARTS}: the answer ends within a record") from error
        return None


@contextlib.contextmanager
def malformed() -> Generator[None]:
    """An answer of another form than vLLM's."""
    try:
        yield
    except MALFORMED as error:
        told = f"{type(error).__name__}: {error}"
        raise ServerGone(f"{NOT_AS_VLLM}: {told}") from error
