"""The HTTP client of one vLLM server: generation, new weights, and the server's abilities."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import re
import secrets
import time
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
    AnswerFailure,
    GroupPart,
    Response,
    parse_metrics,
    parse_response,
    proof_of,
    unpack,
)

HEALTH = "/health"  # vLLM's path, which every server answers without a token
MODEL = "policy"  # the model's name on servers that a run starts

# Ways to pause a server for new weights. With RECOMPUTE and KEEP, responses in progress continue
# after the pause. RECOMPUTE lets the new weights compute their keys and values again. KEEP keeps
# the old keys and values.
RECOMPUTE = {"mode": "keep", "clear_cache": "true"}
KEEP = {"mode": "keep", "clear_cache": "false"}
# The pause waits until responses in progress have ended.
WAIT = {"mode": "wait", "clear_cache": "true"}

# Calls that must not be repeated if the answer is lost: the server may have executed them, or may
# still be executing them. Each of these calls uses a new connection, because the server may just be
# closing an idle connection.
_ONCE = {"/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
# Our name of a request, which is a part of vLLM's name of the request.
_FLIGHT = re.compile(r"[0-9a-f]{32}")
_LATER = (408, 429)  # statuses of a proxy: request timeout, too many requests
_KEPT_SECONDS = 2.0  # how long an idle connection stays open; vLLM closes it after 5
_CONNECT_SECONDS = 30.0
_TO_RESUME = 10.0  # seconds for /resume after a failure
_NO_DEADLINE = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
_BUFFER = 1 << 22  # bytes of the read buffer; a whole record fits into it


class ServerGone(Exception):  # noqa: N818 (not the program's error: the request goes elsewhere)
    """The server is away, late, or failed by itself; another server may answer."""


class NoAnswer(ServerGone):
    """No answer came: the server is away or late."""


class ServerRefused(Exception):  # noqa: N818 (the request is at fault, or the server's setup)
    """The server refuses the request; a repetition, or another server, does not help."""


class OutOfFilesError(RolloutError):
    """This process, or its machine, has no file descriptor left. No server is to blame."""

    def __init__(self) -> None:
        super().__init__(
            "the rollout service has no file descriptor left for another connection: raise the "
            "hard limit (ulimit -n) where the run is started"
        )


class ServerClient:
    """The HTTP calls of one server. Every call may raise ServerGone, ServerRefused and
    OutOfFilesError."""

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None = None) -> None:
        """token: the token of a server that the user names, and therefore trusts."""
        self.url, self._session, self._token = url.rstrip("/"), session, token
        self._is_ours, self._has_proven = False, True

    def begin(self, token: str) -> None:
        """Use the token of a server that this run starts now.

        Nothing secret is sent until `why_not_proven` has confirmed that the server knows the token.
        """
        self._token, self._is_ours, self._has_proven = token, True, False

    async def generate(self, part: GroupPart, *, seconds: float | None) -> Response:
        """Generate the response of a part that has only one."""
        answer = await self._call("POST", GENERATE, part.request(0), seconds=seconds)
        with malformed():
            return parse_response(answer, len(part.token_ids), part.facts, routes=part.routes)

    async def generate_part(self, part: GroupPart) -> AsyncGenerator[list[tuple[int, Response]]]:
        """Generate the responses of a part.

        Yields (number in the part, response) for responses that ended together. Needs a server
        with our middleware; there is no deadline.
        """
        tokens, facts, routes = len(part.token_ids), part.facts, part.routes
        async with self._response("POST", PARTS, part.body(), seconds=None) as answer:
            if answer.status >= 400:
                _fail(PARTS, answer.status, (await answer.read()).decode(errors="replace"))
            while (record := await _record(answer.content)) is not None:
                ended = []
                with malformed():
                    for number, outcome in unpack(record, tokens, facts, routes=routes):
                        if not isinstance(outcome, AnswerFailure):
                            ended.append((number, outcome))
                        elif outcome.status:
                            _fail(GENERATE, outcome.status, outcome.text)
                        else:
                            raise ServerGone(f"{NOT_AS_VLLM}: {outcome.text}")
                yield ended

    async def take_back(self, names: Sequence[str], *, seconds: float) -> set[str]:
        """Cancel responses that `generate_part` requested, by their names. Returns the names of the
        responses that have already ended; their answers will still arrive."""
        reply = await self._call("POST", TAKE_BACK, {"names": list(names)}, seconds=seconds)
        with malformed():
            return set(reply["ended"])

    async def gives_parts(self, *, seconds: float) -> bool:
        """Return whether the server has our middleware in the version of this client."""
        try:
            reply = await self._call("GET", ABOUT, seconds=seconds)
        except (ServerGone, ServerRefused):  # a server without this route may send any error
            return False
        return isinstance(reply, dict) and reply.get("form") == FORM

    async def load_weights(
        self,
        folder: str | None,
        version: str,
        *,
        seconds: float,
        packs_again: bool,
        stream: Mapping[str, Any] | None = None,
        pause: Mapping[str, str] = RECOMPUTE,
        paused: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Load weights from a Hugging Face folder, or from rank 0 if `stream` is given.

        stream: the arguments of `GspoWorker.receive_weights`; pause: RECOMPUTE, KEEP or WAIT. All
        of them except KEEP clear the server's prefix cache; paused: a context that is entered and
        left during the pause.

        packs_again: make vLLM pack all weights for its kernels again, which needs our worker
        extension. On CPUs vLLM otherwise packs the experts and a tied output layer only at the
        first load, and silently ignores their new weights."""
        deadline = time.monotonic() + seconds

        def left() -> float:
            return max(deadline - time.monotonic(), 0.1)

        await self._call("POST", "/pause", query=pause, seconds=left())
        try:
            async with paused or contextlib.nullcontext():
                if packs_again:
                    await self._remote("forget_prepacked_experts", {}, left())
                if stream is not None:
                    await self._remote("receive_weights", stream, left())
                else:
                    await self._remote("reload_weights", {"weights_path": folder}, left())
                if packs_again:
                    await self._remote("pack_tied_output_layer", {}, left())
                named = {"new_version": version}
                await self._call("POST", "/update_weight_version", named, seconds=left())
                if pause != KEEP:
                    await self._call("POST", "/reset_prefix_cache", seconds=left())
        except BaseException:
            # the first error is the cause, even if this call fails too
            with contextlib.suppress(ServerGone, ServerRefused):
                await self._call("POST", "/resume", seconds=min(left(), _TO_RESUME))
            raise
        await self._call("POST", "/resume", seconds=left())

    async def load_adapter(self, name: str, folder: str, *, seconds: float) -> None:
        """Load the adapter in a PEFT folder: requests for the model `name` then get the base model
        with this adapter. The name must be new: for an old name, vLLM would use prefixes that it
        has cached with the old adapter."""
        fields = {"lora_name": name, "lora_path": folder}
        await self._call("POST", "/v1/load_lora_adapter", fields, seconds=seconds, as_text=True)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Unload an adapter. The next adapter that is loaded takes its place in memory."""
        fields = {"lora_name": name}
        await self._call("POST", "/v1/unload_lora_adapter", fields, seconds=seconds, as_text=True)

    async def adapter_sums(self, folder: str | None, *, seconds: float) -> list[dict[str, Any]]:
        """Return GspoWorker.adapter_sums of every worker; the server needs our worker extension."""
        reply = await self._remote("adapter_sums", {"folder": folder}, seconds)
        with malformed():
            return list(reply["results"])

    async def response_tokens(self, *, seconds: float) -> dict[str, int] | None:
        """Return GspoWorker.response_tokens, by the names that `generate` got."""
        reply = await self._remote("response_tokens", {}, seconds)
        with malformed():
            workers = reply["results"]
            if any(each is None for each in workers):
                return None
            named = ((_FLIGHT.search(key), n) for each in workers for key, n in each.items())
            return {key[0]: int(count) for key, count in named if key is not None}

    async def weight_sums(self, folder: str | None, *, seconds: float) -> list[dict[str, Any]]:
        """Return GspoWorker.weight_sums of every worker; the server needs our worker extension."""
        reply = await self._remote("weight_sums", {"folder": folder}, seconds)
        with malformed():
            return list(reply["results"])

    async def weight_version(self, *, seconds: float) -> str:
        reply = await self._call("GET", "/weight_info", seconds=seconds)
        with malformed():
            return str(reply["weight_version"])

    async def why_not_ready(self, *, seconds: float) -> str | None:
        """Check the health, and the proof of a server that this run started. Return what is wrong,
        or None if the server is ready.

        Raises ServerGone if another program answers instead of the server.
        """
        try:
            await self._call("GET", HEALTH, seconds=seconds)
        except (ServerGone, ServerRefused) as error:
            return str(error)
        try:
            wrong = await self.why_not_proven(seconds=seconds) if self._is_ours else None
        except NoAnswer as error:
            return str(error)  # not a wrong proof, so the caller may try again
        if wrong is not None:
            raise ServerGone(wrong)
        return None

    async def why_not_proven(self, *, seconds: float) -> str | None:
        """Return why the program at the url does not know the token of this start, or None.

        Another program may have taken the server's port. Raises NoAnswer if no answer came, for
        example because the server is busy; the caller may try again.
        """
        assert self._token is not None, "a server that was started without a token"
        challenge = secrets.token_hex(32)  # new each time, so that an old answer cannot be reused
        try:
            reply = await self._call("GET", PROOF, query={"challenge": challenge}, seconds=seconds)
        except NoAnswer:
            raise
        except (ServerGone, ServerRefused) as error:
            return f"{self.url}: the program there does not prove that it is this server: {error}"
        proof = str(reply.get("proof")) if isinstance(reply, dict) else ""
        if not hmac.compare_digest(proof.encode(), proof_of(self._token, challenge).encode()):
            return f"{self.url}: another program listens there: it does not know the token"
        self._has_proven = True
        return None

    async def figures(self, *, seconds: float, in_short: bool = False) -> dict[str, float]:
        """Return vLLM's metrics, by name without the prefix.

        in_short: return only the few metrics that `Fleet` needs; our middleware selects them. All
        metrics together are 1,000 lines.
        """
        if in_short:
            reply = await self._call("GET", FIGURES, seconds=seconds)
            with malformed():
                return {name: float(value) for name, value in reply.items()}
        return parse_metrics(await self._call("GET", "/metrics", seconds=seconds, as_text=True))

    async def settings(self, *, seconds: float) -> dict[str, Any]:
        """Return the server's own configuration, with max_model_len of the model that it serves."""
        models = await self._call("GET", "/v1/models", seconds=seconds)
        query = {"config_format": "json"}
        info = await self._call("GET", "/server_info", query=query, seconds=seconds)
        with malformed():
            return {**info["vllm_config"], "max_model_len": models["data"][0]["max_model_len"]}

    async def paths(self, *, seconds: float) -> set[str]:
        """Return the paths that the server answers; they show its abilities."""
        reply = await self._call("GET", "/openapi.json", seconds=seconds)
        with malformed():
            return set(reply["paths"])

    async def model(self, *, seconds: float) -> dict[str, Any]:
        """Return config.json of the server's model; the server needs our worker extension."""
        reply = await self._remote("tell_config", {}, seconds)
        with malformed():
            return dict(json.loads(reply["results"][0]))

    async def tokenize(self, text: str, *, seconds: float) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        fields = {"prompt": text, "add_special_tokens": False}
        reply = await self._call("POST", "/tokenize", fields, seconds=seconds)
        with malformed():
            return list(reply["tokens"])

    async def _remote(self, method: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Call a method of vLLM's workers; returns the answer."""
        fields = {"method": method, "kwargs": dict(arguments), "timeout": seconds}
        return await self._call("POST", "/collective_rpc", fields, seconds=seconds)

    async def _call(
        self,
        verb: str,
        path: str,
        fields: Any = None,
        *,
        seconds: float | None,
        query: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> Any:
        body = None if verb == "GET" else json.dumps({} if fields is None else fields).encode()
        async with self._response(verb, path, body, seconds=seconds, query=query) as answer:
            content = await answer.read()
            if answer.status >= 400:
                _fail(path, answer.status, content.decode(errors="replace"))
            if as_text or not content:
                return content.decode(errors="replace")
            try:
                return from_json(content)  # 5 times as fast as json for long responses
            except ValueError as error:
                raise ServerGone(f"{path}: the answer is not JSON: {error}") from error

    def _headers(self, path: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if path in (HEALTH, PROOF):
            return headers
        if not self._has_proven:
            raise ServerGone(f"{path}: nothing is sent before the server has proven who it is")
        return headers | ({"Authorization": f"Bearer {self._token}"} if self._token else {})

    @contextlib.asynccontextmanager
    async def _response(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        *,
        seconds: float | None,
        query: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and yield the answer before its body has arrived.

        Errors of the connection raise NoAnswer, even inside the `with` block.
        """
        options: dict[str, Any] = {"data": body, "params": query, "headers": self._headers(path)}
        options["timeout"] = _NO_DEADLINE if seconds is None else aiohttp.ClientTimeout(seconds)
        options["allow_redirects"] = not self._is_ours  # our servers never redirect
        try:
            if path in _ONCE:
                async with (
                    connected_session() as session,
                    session.request(verb, self.url + path, **options) as answer,
                ):
                    yield answer
                return
            try:
                answer = await self._session.request(verb, self.url + path, **options)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # The server may have closed an idle connection while this request was on its way,
                # so try once more on a new connection. A server that is away fails again.
                answer = await self._session.request(verb, self.url + path, **options)
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
    """Return a session for the clients of all servers, without a limit on connections.

    The session closes idle connections earlier than a server does, so that a server rarely closes a
    connection that a new request has just begun to use.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS)
    return aiohttp.ClientSession(connector=connector, read_bufsize=_BUFFER)


def _fail(path: str, status: int, text: str) -> NoReturn:
    """Raise ServerGone or ServerRefused for an answer with an error status."""
    message = f"{path}: HTTP {status}: {' '.join(text.split())[:300]}"
    if status == 401:
        raise ServerRefused(
            f"{path}: the server wants another token: set {TOKEN_VARIABLE} to the one that the "
            "server was started with"
        )
    if (status >= 500 or status in _LATER) and path != "/collective_rpc":
        raise ServerGone(message)
    raise ServerRefused(message)


async def _record(content: aiohttp.StreamReader) -> bytes | None:
    """Read the next record of a part. Return None if the answer has ended."""
    try:
        (length,) = LENGTH.unpack(await content.readexactly(LENGTH.size))
        return await content.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ServerGone(f"{PARTS}: the answer ends within a record") from error
        return None


@contextlib.contextmanager
def malformed() -> Generator[None]:
    """Raise ServerGone for the errors of reading an answer that is not in vLLM's format."""
    try:
        yield
    except MALFORMED as error:
        message = f"{type(error).__name__}: {error}"
        raise ServerGone(f"{NOT_AS_VLLM}: {message}") from error
