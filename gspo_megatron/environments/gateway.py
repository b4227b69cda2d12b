"""Serves the policy over OpenAI's chat completions API, for programs that act in an episode.

The gateway listens on loopback. An episode is a session; the API key of a request identifies it.
The episode's Client records the policy's tokens, so the programs need no change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_megatron.environments.chat_messages import assistant_message, plain_messages
from gspo_megatron.environments.episode import Client, EpisodePosition, LimitReached, Trajectory
from gspo_megatron.errors import EpisodeError, RolloutError, UserError
from gspo_megatron.files import parse_json

MODEL = "policy"
# Keys that change what a turn means -> their allowed values. (Sampling settings are the run's, and
# are ignored.)
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
}
_KINDS = {
    "max_completion_tokens": int,
    "max_tokens": int,
    "tools": list,
    "stream_options": dict,
}
_OBJECT, _STREAM = "chat.completion", "text/event-stream"


class _RefusedError(Exception):
    """Raised for a request that cannot be answered; the text says why."""


class _ReplacedError(Exception):
    """Raised for an old request: its client is gone, and a later request has replaced its turn."""


@dataclass
class _AnsweredTurn:
    """A request, and the turn that answers it."""

    body: str  # the request
    before: EpisodePosition
    known: list[dict[str, Any]]  # the conversation before the request
    answer: asyncio.Task[dict[str, Any]]
    is_read: bool = False  # the answer was sent to a client that was still connected
    listeners: list[Any] = field(default_factory=list)  # requests that wait for the answer


@dataclass
class EpisodeSession:
    """One episode of the gateway.

    A program may stop waiting and repeat its request; it then gets the same turn. A turn that no
    client has read is not part of the episode.
    """

    client: Client
    known: list[dict[str, Any]] = field(default_factory=list)  # the conversation so far
    reward: Trajectory | None = None
    is_over: bool = False  # a limit was reached
    problem: UserError | None = None  # the first error of a request
    _is_closed: bool = False
    _last: _AnsweredTurn | None = None
    # Held while a request drops the last turn and begins its own, so that a later request waits.
    _choosing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: set[asyncio.Task[dict[str, Any]]] = field(default_factory=set)

    async def complete(self, content: Mapping[str, Any], request: Any) -> dict[str, Any]:
        """Answer a request of /v1/chat/completions. Raises _RefusedError, _ReplacedError,
        UserError and LimitReached."""
        body = json.dumps(content, sort_keys=True)
        async with self._choosing:
            turn = self._last
            if turn is None or turn.body != body or (turn.is_read and not _is_repeated(request)):
                await self._drop_unread()
                if self._is_closed:
                    raise _RefusedError("the episode is over")
                turn = self._last = self._begin(body, content)
            turn.listeners.append(request)
        try:
            return await asyncio.shield(turn.answer)
        except asyncio.CancelledError:
            if turn.answer.cancelled():
                raise _ReplacedError from None
            raise
        finally:
            turn.listeners.remove(request)
            turn.is_read |= _is_there(request)

    def _begin(self, body: str, content: Mapping[str, Any]) -> _AnsweredTurn:
        """Begin a turn, which goes on if the client disconnects."""
        position, known = self.client.position(), self.known
        work = asyncio.ensure_future(self._turn(content))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return _AnsweredTurn(body, position, known, work)

    async def _drop_unread(self) -> None:
        """Drop the last turn if no client has read it and no client waits for it.

        The engine may need some time for this. The session may be closed meanwhile."""
        turn = self._last
        if turn is None or turn.is_read or any(map(_is_there, turn.listeners)):
            return
        turn.answer.cancel()
        await asyncio.wait([turn.answer])
        if self._last is turn:
            self._last = None
            self._take_back(turn)

    def close(self) -> None:
        """End the session after its program has ended. Drops a turn that was not read."""
        self._is_closed = True
        turn, self._last = self._last, None
        for work in self._running:
            work.cancel()
        if turn is not None and not turn.is_read:
            self._take_back(turn)

    def _take_back(self, turn: _AnsweredTurn) -> None:
        self.client.go_back(turn.before)
        self.known = turn.known

    async def _turn(self, content: Mapping[str, Any]) -> dict[str, Any]:
        for key, allowed in _ONLY.items():
            if content.get(key) not in (None, *allowed):
                raise _RefusedError(f"{key} = {content[key]}: not supported; allowed: {allowed[0]}")
        for key, kind in _KINDS.items():
            if content.get(key) and type(content[key]) is not kind:
                expected = {int: "a number", list: "a list", dict: "an object"}[kind]
                raise _RefusedError(f"{key} = {content[key]!r:.60}: {expected} is wanted")
        messages, tools = plain_messages(content.get("messages")), content.get("tools") or []
        limits = (content.get(key) for key in ("max_completion_tokens", "max_tokens"))
        limit = next((each for each in limits if each is not None), None)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise _RefusedError(f"max_tokens = {limit}: allowed: 1 or more")
        count = len(self.known)
        continues = messages[:count] == self.known and tools == self.client.conversation.tools
        if count and continues and len(messages) > count:
            turn = await self.client.generate(messages[count:], max_tokens=limit)
        else:  # the first request, or a changed history
            before = self.client.position()
            self.client.begin(messages, tools)
            try:
                turn = await self.client.generate(max_tokens=limit)
            except LimitReached:  # the program may go on with the history before
                self.client.go_back(before)
                self.client.is_cut = True
                raise
        message = assistant_message(turn.text, bool(tools), len(self.client.transcript.turns))
        self.known = [*messages, *plain_messages([message])]
        used = len(self.client.transcript.turns[-1].token_ids)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": _OBJECT,
            "created": int(time.time()),
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "length" if turn.truncated else reason,
                }
            ],
            "usage": {
                "prompt_tokens": len(self.client.transcript.context) - used,
                "completion_tokens": used,
                "total_tokens": len(self.client.transcript.context),
            },
        }

    def check(self) -> None:
        """Raise the first error of a request in this episode, if there was one."""
        if self.problem is not None:
            raise self.problem


def _is_there(request: Any) -> bool:
    """Whether the client of a request is still connected."""
    return request.transport is not None and not request.transport.is_closing()


def _is_repeated(request: Any) -> bool:
    """Whether the client declares the request as a retry, as the package `openai` does.

    The client may have given up just when the answer to its first request was sent."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


def reaching_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which no proxy stands between a program and the gateway."""
    exempt = [environ[name] for name in ("no_proxy", "NO_PROXY") if environ.get(name)]
    if "*" in exempt:  # no proxy for any host
        return {**environ}
    names = ",".join([*exempt, "127.0.0.1"])
    return {**environ, "no_proxy": names, "NO_PROXY": names}


def new_key() -> str:
    """Return an API key that cannot be guessed."""
    return secrets.token_urlsafe(24)


class Gateway:
    """The server. It starts at the first call of `url` and ends with the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, EpisodeSession] = {}
        self._url: str | None = None
        self._starting = asyncio.Lock()

    async def url(self) -> str:
        """Return the server's URL, without the "/v1" that OpenAI's clients need."""
        async with self._starting:
            if self._url is None:
                self._url = await self._serve()
        return self._url

    @contextlib.contextmanager
    def session(self, client: Client, key: str) -> Generator[EpisodeSession]:
        """Open the session of an episode. Requests with this key belong to it."""
        assert key not in self._sessions, "two episodes have one key"
        session = self._sessions[key] = EpisodeSession(client)
        try:
            yield session
        finally:
            del self._sessions[key]
            session.close()

    async def _serve(self) -> str:
        """Listen on loopback; return the URL."""
        from aiohttp import web  # imported here, because most runs do not need it

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        for path in ("/reward", "/v1/reward"):
            app.router.add_post(path, self._take_reward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        weakref.finalize(self, listener.close)  # the event loop does not close it
        await web.SockSite(runner, listener).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _session(self, request: Any) -> EpisodeSession:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            raise _RefusedError("no episode has this key")
        return self._sessions[key]

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        session = None
        try:
            session = self._session(request)
            content = await _json(request)
            answer = await session.complete(content, request)
            if content.get("stream"):
                return web.Response(text=_as_stream(answer, content), content_type=_STREAM)
            return web.json_response(answer)
        except LimitReached as error:
            assert session is not None
            session.is_over = True
            return _refusal(f"no turn or token is left: {error}", "context_length_exceeded")
        except _ReplacedError:
            return _refusal("a later request has replaced this one", "invalid_request_error")
        except Exception as error:  # noqa: BLE001 (a text that the tokenizer cannot encode, ...)
            has_own_text = isinstance(error, (_RefusedError, UserError))
            text = str(error) if has_own_text else f"{type(error).__name__}: {error}"
            if session is not None and session.problem is None:
                is_engines = isinstance(error, RolloutError)
                session.problem = error if is_engines else EpisodeError(f"a request: {text}")
            return _refusal(text, "invalid_request_error")

    async def _models(self, _: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _take_reward(self, request: Any) -> Any:
        from aiohttp import web

        try:
            session, content = self._session(request), await _json(request)
            known = {k: v for k, v in content.items() if k in ("reward", "turn_rewards")}
            if len(known) != 1 or len(content) != 1:
                raise _RefusedError("allowed: one of reward and turn_rewards")
        except _RefusedError as error:
            return _refusal(str(error), "invalid_request_error")
        session.reward = Trajectory(**known)
        return web.json_response({})


async def _json(request: Any) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = parse_json(await request.read())
        if isinstance(content, dict):
            return content
    raise _RefusedError("the request is not a JSON object")


def _as_stream(answer: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Write an answer as a stream, with the whole message as one chunk."""
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls", ())
    message = dict(choice["message"])
    if calls:
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if (content.get("stream_options") or {}).get("include_usage"):
        pieces.append({"choices": [], "usage": answer["usage"]})
    head = {
        **{key: answer[key] for key in ("id", "created", "model")},
        "object": f"{_OBJECT}.chunk",
    }
    lines = [json.dumps({**head, **piece}) for piece in pieces]
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))


def _refusal(message: str, code: str) -> Any:
    from aiohttp import web

    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=400)
