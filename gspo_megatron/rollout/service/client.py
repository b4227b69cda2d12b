"""One vLLM server over HTTP: tokens in, tokens out, new weights, and what it is able to do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from zipfile import BadZipFile

import aiohttp
import numpy as np
from pydantic_core import from_json

MODEL = "policy"  # the name under which started servers serve the model
TOKEN_VARIABLE = "GSPO_SERVER_TOKEN"  # of servers that the run has not started

# How a server is paused for new weights, and what becomes of responses under way. They go on
# after it: with what the new weights make of their tokens, or with what the old ones have made.
RECOMPUTE = {"mode": "keep", "clear_cache": "true"}
KEEP = {"mode": "keep", "clear_cache": "false"}
# They end before it, and the pause lasts as long.
WAIT = {"mode": "wait", "clear_cache": "true"}

# What reading an answer raises that is not as vLLM gives it. The last three are NumPy's for what is
# no array.
_MALFORMED = (LookupError, TypeError, ValueError, OverflowError, EOFError, MemoryError, BadZipFile)

_FLIGHT = re.compile(r"[0-9a-f]{32}")  # in vLLM's name of a request

_METRIC = re.compile(r"^vllm:(\w+?)(?:\{.*\})? ([-+.\deE]+)$", re.MULTILINE)


class ServerGone(Exception):  # noqa: N818 (not the program's error: the request goes elsewhere)
    """The server is away, late, or failed by itself; another one may answer."""


class ServerRefused(Exception):  # noqa: N818 (the request is at fault, or the server's setup)
    """The server will not do that; asking again, or another one, is of no use."""


@dataclass(frozen=True)
class ModelFacts:
    """What responses must fit, as the trainer's model has it."""

    vocab_size: int
    num_layers: int
    num_experts: int  # 0: a dense model
    experts_per_token: int
    moe_layers: tuple[int, ...]  # numbers of the layers with experts, from 0


@dataclass(frozen=True)
class Response:
    """One response as a server drew it."""

    token_ids: np.ndarray  # [tokens] int32, with the token that ended it
    logprobs: np.ndarray  # [tokens] float32, at the sampling temperature
    truncated: bool  # cut off by the limit of tokens
    # [prompt + response tokens, layers, k] uint8 or int16, where asked for. All zeros: the server
    # did not say, or said nonsense. The last token was never fed to the model.
    routes: np.ndarray | None = None
    # (name of the weights' version, tokens up to its last one), where the server tells it
    spans: tuple[tuple[str, int], ...] | None = None
    versions: np.ndarray | None = None  # [tokens] int32, of the weights that drew them


class Client:
    """The HTTP calls of one server. Every call has a deadline, and raises ServerGone or
    ServerRefused."""

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None = None) -> None:
        self.url, self._session = url.rstrip("/"), session
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        facts: ModelFacts,
        *,
        seconds: float,
        routes: bool,
        name: str | None = None,
        salt: str | None = None,
    ) -> Response:
        """A response to the token ids `prompt`; `sampling`: vLLM's SamplingParams; name: of the
        request, as in `response_tokens`; salt: what is remembered of prompts with another one is
        not used."""
        given = {"token_ids": list(prompt), "sampling_params": {"logprobs": 0, **sampling}}
        given |= {} if name is None else {"request_id": name}
        given |= {} if salt is None else {"cache_salt": salt}
        found = await self._call("POST", "/inference/v1/generate", given, seconds=seconds)
        with malformed():
            return parse_response(found, len(prompt), facts, routes=routes)

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
        """None: it is healthy."""
        try:
            await self._call("GET", "/health", seconds=seconds)
        except (ServerGone, ServerRefused) as error:
            return str(error)
        return None

    async def figures(self, *, seconds: float) -> dict[str, float]:
        """vLLM's own metrics, by name without the prefix."""
        text = await self._call("GET", "/metrics", seconds=seconds, as_text=True)
        return {name: float(value) for name, value in _METRIC.findall(text)}

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
        seconds: float,
        query: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> Any:
        try:
            async with self._session.request(
                verb,
                self.url + path,
                json={} if given is None and verb == "POST" else given,
                params=query,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                content = await answer.read()
                told = f"{path}: HTTP {answer.status}"
                if answer.status >= 400:
                    told += f": {' '.join(content.decode(errors='replace').split())[:300]}"
                if answer.status >= 500 and path != "/collective_rpc":
                    raise ServerGone(told)
                if answer.status == 401:
                    raise ServerRefused(
                        f"{path}: it asks for another token: set {TOKEN_VARIABLE} to the one that "
                        "it was started with"
                    )
                if answer.status >= 400:
                    raise ServerRefused(told)
                if as_text or not content:
                    return content.decode(errors="replace")
                return from_json(content)  # long responses: in a fifth of json's time
        except asyncio.TimeoutError:
            raise ServerGone(f"{path}: no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{path}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise ServerGone(f"{path}: the answer is not JSON: {error}") from error


@contextlib.contextmanager
def malformed() -> Iterator[None]:
    """An answer of another form than vLLM's."""
    try:
        yield
    except _MALFORMED as error:
        told = f"{type(error).__name__}: {error}"
        raise ServerGone(f"an answer that is not as vLLM gives it: {told}") from error


def parse_response(found: Any, prompt_tokens: int, facts: ModelFacts, *, routes: bool) -> Response:
    """The first choice of an answer of /inference/v1/generate.

    Raises one of _MALFORMED for an answer that is wrong or misses what is needed.
    """
    choice = found["choices"][0]
    ids = np.array(choice["token_ids"], dtype=np.int32)
    logprobs = np.array([t["logprob"] for t in choice["logprobs"]["content"]], dtype=np.float32)
    if not len(ids) or len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    if ids.min() < 0 or ids.max() >= facts.vocab_size:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}, of {facts.vocab_size}")
    if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
        raise ValueError("log-probs that are above 0 or not finite")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    table = None
    if routes:
        table = _parse_routes(choice["routed_experts"], prompt_tokens + len(ids), facts)
    spans = choice.get("weight_versions")  # from vLLM 0.32 on
    if spans is not None:
        spans = tuple((str(each["version"]), int(each["end"])) for each in spans)
        ends = [end for _, end in spans]
        if ends != sorted(ends) or ends[-1] != len(ids):
            raise ValueError(f"versions of the weights up to {ends}, of {len(ids)} tokens")
    return Response(ids, logprobs, choice["finish_reason"] == "length", table, spans)


def no_routes(tokens: int, facts: ModelFacts) -> np.ndarray:
    """[tokens, layers, k] zeros, in the form of `Response.routes`."""
    shape = (tokens, facts.num_layers, facts.experts_per_token)
    return np.zeros(shape, np.uint8 if facts.num_experts <= 256 else np.int16)


def _parse_routes(encoded: str, tokens: int, facts: ModelFacts) -> np.ndarray:
    """[tokens, layers, k]: experts of prompt and response, the last token's void. Tokens whose
    experts are not k different ones of the model, in any layer with experts, become zeros."""
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
