"""A compact format for responses, which our middleware in a vLLM server writes and clients read.

vLLM answers one request with one response, in JSON of 150 bytes a token. `Answers` takes several
responses to one prompt (a part of a group) as one request. It calls the server's own
`/inference/v1/generate` for each response, and sends each one, as soon as it has ended, as
safetensors of 8 bytes a token. So each server parses its own JSON, and the one process that talks
to all servers need not parse it.

This file runs in servers, whose environment lacks gspo_megatron and its dependencies. The rollout
service imports it too, so that both sides read vLLM's JSON with the same code.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import math
import re
import struct
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import save

GENERATE = "/inference/v1/generate"  # vLLM's path for requests of tokens
CHATS = "/v1/"  # vLLM's paths for other clients, such as chat clients
PARTS = "/gspo/generate"
TAKE_BACK = "/gspo/take_back"
FIGURES = "/gspo/figures"
ABOUT = "/gspo/about"
PROOF = "/gspo/proof"  # `TokenGuard` answers this path without a token
TOKEN_VARIABLE = "GSPO_SERVER_TOKEN"  # environment variable with the token of a server
FORM = 1  # version of the routes /gspo/…: a client uses only servers with the same version

# The errors of reading an answer that is not in vLLM's format. NumPy and safetensors raise the last
# four errors for data that is not an array.
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    EOFError,
    MemoryError,
    RecursionError,
    BadZipFile,
    SafetensorError,
)
NOT_AS_VLLM = "an answer that is not as vLLM gives it"

_TYPES = {  # names of safetensors -> types
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F32": np.float32,
}
LENGTH = struct.Struct("<Q")  # before each record: its size in bytes
_LINGER = 0.02  # seconds: responses that end within this time go into one record
_SHOWN = 300  # the most characters of an error that are shown
_METRIC = re.compile(r"^vllm:(\w+?)(?:\{.*\})? ([-+.\deE]+)$", re.MULTILINE)
# the metrics of vLLM that the rollout service reads
_FIGURES = (
    "generation_tokens_total",
    "num_requests_running",
    "kv_cache_usage_perc",
    "num_preemptions_total",
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def proof_of(token: str, challenge: str) -> str:
    """Return the answer to a challenge. It can be computed only with the token."""
    return hmac.new(token.encode(), f"proof {challenge}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the trainer's model, which responses must fit."""

    vocab_size: int
    num_layers: int
    num_experts: int  # 0: a dense model
    experts_per_token: int
    moe_layers: tuple[int, ...]  # numbers of the layers with experts, from 0


@dataclass(eq=False)
class Response:
    """One response that a server generated."""

    token_ids: np.ndarray  # [tokens] int32, with the token that ended the response
    logprobs: np.ndarray  # [tokens] float32, at the sampling temperature
    truncated: bool  # cut off by the limit of tokens
    # [prompt + response tokens, layers, k] uint8 or int16; None: not requested. A token has zeros
    # if the server reported no valid experts. The last token never goes through the model.
    routes: np.ndarray | None = None
    # (weights version, tokens until this version ended); None: the server reports no versions
    spans: tuple[tuple[str, int], ...] | None = None
    versions: np.ndarray | None = None  # [tokens] int32, weights version of each token


class AnswerFailure(NamedTuple):
    """The failure of one request among several."""

    status: int  # HTTP status; 0: the answer could not be read
    text: str


def seed_of(numbers: Sequence[int]) -> int:
    """Return a seed for vLLM: 63 bits, mixed from numbers that identify the response in its run."""
    state = np.random.SeedSequence(tuple(numbers)).generate_state(1, np.uint64)[0]
    return int(state >> np.uint64(1))


# vLLM's own format


def parse_response(found: Any, prompt_tokens: int, facts: ModelFacts, *, routes: bool) -> Response:
    """Read the first choice of an answer of /inference/v1/generate.

    Raises one of MALFORMED if the answer is wrong or incomplete.
    """
    choice = found["choices"][0]
    ids = np.array(choice["token_ids"], dtype=np.int32)
    logprobs = np.array([t["logprob"] for t in choice["logprobs"]["content"]], dtype=np.float32)
    if not len(ids):
        raise ValueError(f"0 tokens with {len(logprobs)} log-probs")
    _check_tokens(ids, logprobs, facts)
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    table = None
    if routes:
        table = _parse_routes(choice["routed_experts"], prompt_tokens + len(ids), facts)
    spans = choice.get("weight_versions")  # from vLLM 0.32 on
    if spans is not None:
        spans = _checked_spans(((each["version"], each["end"]) for each in spans), len(ids))
    return Response(ids, logprobs, choice["finish_reason"] == "length", table, spans)


def no_routes(tokens: int, facts: ModelFacts) -> np.ndarray:
    """Return zeros in the format of `Response.routes`: [tokens, layers, k]."""
    return np.zeros((tokens, facts.num_layers, facts.experts_per_token), _type_of_routes(facts))


def _type_of_routes(facts: ModelFacts) -> type:
    return np.uint8 if facts.num_experts <= 256 else np.int16


def read_answer(body: bytes, prompt_tokens: int, facts: ModelFacts, *, routes: bool) -> Response:
    """Read an answer's JSON text: see `parse_response`."""
    return parse_response(from_json(body), prompt_tokens, facts, routes=routes)


def _check_tokens(ids: np.ndarray, logprobs: np.ndarray, facts: ModelFacts) -> None:
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    least, most = ids.min(), ids.max()
    if least < 0 or most >= facts.vocab_size:
        raise ValueError(f"token ids from {least} to {most}, of {facts.vocab_size}")
    if not (logprobs.min() > -np.inf and logprobs.max() <= 0):  # false with a NaN, too
        raise ValueError("log-probs that are above 0 or not finite")


def _checked_spans(given: Iterable[Sequence[Any]], tokens: int) -> tuple[tuple[str, int], ...]:
    spans = tuple((str(version), int(end)) for version, end in given)
    ends = [end for _, end in spans]
    if ends != sorted(ends) or ends[-1] != tokens:
        raise ValueError(f"versions of the weights up to {ends}, of {tokens} tokens")
    return spans


def _parse_routes(encoded: str, tokens: int, facts: ModelFacts) -> np.ndarray:
    """Read the experts of prompt and response, [tokens, layers, k]; the last row means nothing.

    A token becomes zeros if, in any MoE layer, its experts are not k different experts of the
    model.
    """
    content = base64.b64decode(encoded, validate=True)
    given = np.load(io.BytesIO(content), allow_pickle=False)
    shape = (tokens - 1, facts.num_layers, facts.experts_per_token)
    if given.shape != shape or given.dtype.kind not in "iu":
        raise ValueError(f"routed experts {list(given.shape)} {given.dtype}, expected {shape}")
    given = given.astype(np.int64)
    ordered = np.sort(given, axis=-1)
    is_sound = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    is_sound &= (ordered[..., 0] >= 0) & (ordered[..., -1] < facts.num_experts)
    table = no_routes(tokens, facts)
    rows = is_sound[:, list(facts.moe_layers)].all(-1)
    table[:-1][rows] = given[rows]
    return table


# The compact format: records, each a length and safetensors


def pack(outcomes: Sequence[tuple[int, Response | AnswerFailure]]) -> bytes:
    """Make a record of requests that have ended: (number in the part, response or failure)."""
    good = [(n, each) for n, each in outcomes if isinstance(each, Response)]
    bad = [(n, *each) for n, each in outcomes if isinstance(each, AnswerFailure)]
    told = {"failures": bad, "spans": [each.spans for _, each in good]}
    tensors = {"told": np.frombuffer(json.dumps(told).encode(), np.uint8)}
    if good:
        tensors |= {
            "numbers": np.array([n for n, _ in good]),
            "lengths": np.array([len(each.token_ids) for _, each in good]),
            "truncated": np.array([each.truncated for _, each in good]),
            "token_ids": np.concatenate([each.token_ids for _, each in good]),
            "logprobs": np.concatenate([each.logprobs for _, each in good]),
        }
        if good[0][1].routes is not None:
            tensors["routes"] = np.concatenate([each.routes for _, each in good])
    content = save(tensors)
    return LENGTH.pack(len(content)) + content


def _views(content: bytes) -> dict[str, np.ndarray]:
    """Return the tensors without a copy; safetensors' own `load` copies them."""
    start = LENGTH.size + int.from_bytes(content[: LENGTH.size], "little")
    tensors = {}
    for name, about in dict(json.loads(content[LENGTH.size : start])).items():
        shape, (offset, _) = about["shape"], about["data_offsets"]
        flat = np.frombuffer(content, _TYPES[about["dtype"]], math.prod(shape), start + offset)
        tensors[name] = flat.reshape(shape)
    return tensors


def unpack(
    content: bytes, prompt_tokens: int, facts: ModelFacts, *, routes: bool
) -> Iterator[tuple[int, Response | AnswerFailure]]:
    """Yield the responses and failures of a record; `content` is the record without its length.

    Raises one of MALFORMED.
    """
    tensors = _views(content)
    told = json.loads(tensors["told"].tobytes())
    for number, status, text in told["failures"]:
        yield int(number), AnswerFailure(int(status), str(text))
    if "numbers" not in tensors:
        return
    ids, logprobs, lengths = tensors["token_ids"], tensors["logprobs"], tensors["lengths"]
    if (ids.dtype, logprobs.dtype) != (np.int32, np.float32) or ids.ndim != 1:
        raise ValueError(f"tokens as {ids.dtype}, log-probs as {logprobs.dtype}")
    if lengths.min() < 1 or lengths.sum() != len(ids):
        raise ValueError(f"{len(ids)} tokens in responses of {lengths.tolist()}")
    _check_tokens(ids, logprobs, facts)
    table = tensors["routes"] if routes else None
    if table is not None:
        rows = len(ids) + prompt_tokens * len(lengths)
        shape = (rows, facts.num_layers, facts.experts_per_token)
        if table.shape != shape or table.dtype != _type_of_routes(facts):
            raise ValueError(f"routed experts {list(table.shape)} {table.dtype}, expected {shape}")
    columns = (tensors["numbers"].tolist(), lengths.tolist(), tensors["truncated"].tolist())
    end = row = 0
    for number, length, truncated, spans in zip(*columns, told["spans"], strict=True):
        start, end = end, end + length
        own = None
        if table is not None:
            own, row = table[row : row + prompt_tokens + length], row + prompt_tokens + length
        told_spans = None if spans is None else _checked_spans(spans, length)
        yield number, Response(ids[start:end], logprobs[start:end], truncated, own, told_spans)


# The server's side


@dataclass(frozen=True)
class GroupPart:
    """A request for one or several responses to one prompt: a part of a group."""

    token_ids: Sequence[int]
    sampling: Mapping[str, Any]  # vLLM's SamplingParams without the seeds
    facts: ModelFacts
    routes: bool
    # One for each response: its name for `take_back` and vLLM, or "" for a response without a name,
    # and the numbers for `seed_of`, or None without a seed.
    names: Sequence[str] = ("",)
    seeds: Sequence[Sequence[int] | None] = (None,)
    salt: str | None = None  # vLLM's prefix cache reuses only prompts with the same salt
    model: str | None = None  # an adapter's name; None: the model itself

    def body(self) -> bytes:
        """Return the client's request for all responses, which `read` reads."""
        facts = {k: v for k, v in vars(self.facts).items() if k != "moe_layers"}
        given = {**vars(self), "sampling": {"logprobs": 0, **self.sampling}}
        given |= {"facts": facts, "moe_layers": self.facts.moe_layers}
        if self.model is None:  # earlier versions of the middleware do not know this key
            del given["model"]
        return json.dumps(given).encode()

    @classmethod
    def read(cls, body: bytes) -> GroupPart:
        given = from_json(body)
        facts: dict[str, Any] = {**given.pop("facts"), "moe_layers": tuple(given.pop("moe_layers"))}
        part = cls(facts=ModelFacts(**facts), **given)
        if not part.names or not len(set(part.names)) == len(part.names) == len(part.seeds):
            raise ValueError(f"names {part.names} with {len(part.seeds)} seeds")
        return part

    def request(self, number: int) -> dict[str, Any]:
        """Return the request to vLLM for one of the responses."""
        sampling, seed = {"logprobs": 0, **self.sampling}, self.seeds[number]
        if seed is not None:
            sampling["seed"] = seed_of(seed)
        more = {"request_id": self.names[number], "cache_salt": self.salt, "model": self.model}
        given = {"token_ids": self.token_ids, "sampling_params": sampling}
        return given | {key: value for key, value in more.items() if value}


@dataclass(eq=False)
class _Member:
    """The state of a response of a part while vLLM works on it."""

    left: asyncio.Event = field(default_factory=asyncio.Event)  # set if nobody needs the response
    has_ended: bool = False


class Answers:
    """ASGI middleware with additional routes beside those of vLLM:

    GET /gspo/about: the version of these routes
    POST /gspo/generate: generates a part of a group; answers with the records of `pack`
    POST /gspo/take_back: cancels responses that are still in progress
    GET /gspo/figures: the few metrics of vLLM that the rollout service reads

    It also removes the experts of each token from vLLM's answers to chat clients.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._members: dict[str, _Member] = {}  # by name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PARTS:
            await self._generate(scope, receive, send)
        elif path == TAKE_BACK:
            try:
                told, status = self._take_back(_names(await _body(receive))), 200
            except MALFORMED as error:
                told, status = {"error": f"{type(error).__name__}: {error}"}, 400
            await _tell(send, told, status=status)
        elif path == FIGURES:
            await _tell(send, await self._figures(scope))
        elif path == ABOUT:
            await _tell(send, {"form": FORM})
        elif path.startswith(CHATS):
            await self._app(scope, receive, WithoutRoutes(send))
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            part = GroupPart.read(await _body(receive))
        except MALFORMED as error:
            await _tell(send, {"error": f"{type(error).__name__}: {error}"}, status=400)
            return
        members = {name: _Member() for name in part.names}
        self._members |= members
        ended: asyncio.Queue[tuple[int, Response | AnswerFailure | None]] = asyncio.Queue()
        work = [
            asyncio.create_task(self._draw(scope, part, number, member, ended))
            for number, member in enumerate(members.values())
        ]
        work.append(asyncio.create_task(_until_gone(receive, members.values())))
        try:
            await _begin(send, 200, b"application/octet-stream")
            left = len(members)
            while left:
                outcomes = [await ended.get()]
                if ended.qsize() + 1 < left:
                    await asyncio.sleep(_LINGER)
                while not ended.empty():
                    outcomes.append(ended.get_nowait())
                left -= len(outcomes)
                if known := [(n, each) for n, each in outcomes if each is not None]:
                    record = pack(known)
                    await send({"type": "http.response.body", "body": record, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            for name, member in members.items():
                member.left.set()
                self._members.pop(name, None)
            work[-1].cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _draw(
        self,
        scope: Scope,
        part: GroupPart,
        number: int,
        member: _Member,
        ended: asyncio.Queue[tuple[int, Response | AnswerFailure | None]],
    ) -> None:
        """Generate one response of a part, and put the outcome into the queue `ended`.

        The outcome is None if the response is no longer needed.
        """
        outcome: Response | AnswerFailure | None
        try:
            request = json.dumps(part.request(number)).encode()
            status, body = await self._ask(scope, "POST", GENERATE, request, member.left)
            if status >= 400:
                outcome = AnswerFailure(status, body.decode(errors="replace")[:_SHOWN])
            else:
                outcome = read_answer(body, len(part.token_ids), part.facts, routes=part.routes)
        except MALFORMED as error:
            outcome = AnswerFailure(0, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 (vLLM's; treated like status 500)
            outcome = AnswerFailure(500, f"{type(error).__name__}: {error}"[:_SHOWN])
        member.has_ended = not member.left.is_set()
        ended.put_nowait((number, outcome if member.has_ended else None))

    def _take_back(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Cancel responses; return those that have already ended, whose answers still arrive."""
        ended = []
        for name in names:
            member = self._members.get(name)
            if member is not None and member.has_ended:
                ended.append(name)
            elif member is not None:
                member.left.set()
        return {"ended": ended}

    async def _figures(self, scope: Scope) -> dict[str, float]:
        _, text = await self._ask(scope, "GET", "/metrics", b"", asyncio.Event())
        return {k: v for k, v in parse_metrics(text.decode()).items() if k in _FIGURES}

    async def _ask(
        self, scope: Scope, verb: str, path: str, body: bytes, left: asyncio.Event
    ) -> tuple[int, bytes]:
        """Call the wrapped app; return status and body.

        When `left` is set, the app gets the message that the client has closed the connection.
        """
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, content = 0, bytearray()

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content.extend(message.get("body", b""))

        kept = [pair for pair in scope["headers"] if pair[0] in (b"authorization", b"host")]
        kept += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        changes = {"method": verb, "path": path, "raw_path": path.encode(), "query_string": b""}
        own = {"headers": kept, "state": dict(scope.get("state", {}))}
        await self._app({**scope, **changes, **own}, receive, send)
        return status, bytes(content)


class WithoutRoutes:
    """Removes the experts of each token from an answer of vLLM before sending it.

    A server with `enable_return_routed_experts` adds the experts to every choice: kilobytes of
    base64 for each token, which no chat client reads. A JSON answer is sent when it is complete. Of
    a stream, each event is sent when it is complete. Other content is sent unchanged.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # start of a JSON answer, kept until its length is known
        self._is_stream = False
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if kind.startswith(b"application/json"):
                self._start = message
            else:
                await self._send(message)
        elif message["type"] == "http.response.body" and self._start is not None:
            self._held += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_json(self._start)
        elif message["type"] == "http.response.body" and self._is_stream:
            await self._send_events(message)
        else:
            await self._send(message)

    async def _send_json(self, start: Message) -> None:
        body = without_routes(self._held)
        headers = [pair for pair in start.get("headers", ()) if pair[0] != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._send({"type": "http.response.body", "body": body})

    async def _send_events(self, message: Message) -> None:
        more = message.get("more_body", False)
        whole, end, rest = (self._held + message.get("body", b"")).rpartition(b"\n\n")
        self._held = rest if more else b""
        lines = (whole + end + (b"" if more else rest)).split(b"\n")
        body = b"\n".join(
            b"data: " + without_routes(line[6:]) if line.startswith(b"data: {") else line
            for line in lines
        )
        await self._send({**message, "body": body})


def without_routes(content: bytes) -> bytes:
    """Remove the experts of the tokens from JSON; other content is returned unchanged."""
    if b'"routed_experts"' not in content:
        return content
    try:
        found = from_json(content)
        for choice in found["choices"]:
            choice.pop("routed_experts", None)
    except (ValueError, LookupError, TypeError, AttributeError):
        return content
    return json.dumps(found).encode()


def parse_metrics(text: str) -> dict[str, float]:
    """Return vLLM's metrics by name, summed over engines; of used shares (`_perc`) the largest."""
    found: dict[str, list[float]] = {}
    for name, value in _METRIC.findall(text):
        found.setdefault(name, []).append(float(value))
    return {k: max(v) if k.endswith("_perc") else sum(v) for k, v in found.items()}


def _names(body: bytes) -> list[str]:
    """Return the names in a request to cancel responses. Raises one of MALFORMED."""
    names = list(from_json(body)["names"])
    if not all(isinstance(name, str) for name in names):
        raise TypeError("names: texts are wanted")
    return names


async def _until_gone(receive: Receive, members: Iterable[_Member]) -> None:
    """Wait until the client of a part disconnects; then cancel all responses of the part."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for member in members:
        member.left.set()


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _begin(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _tell(send: Send, told: Any, status: int = 200) -> None:
    await _begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})
