"""Extensions of a vLLM server: worker methods for new weights, and a token guard.

A server loads this file with `--worker-extension-cls gspo_vllm_worker.GspoWorker` and `--middleware
gspo_vllm_worker.TokenGuard`; this folder is on its PYTHONPATH. The server's environment may lack
gspo_megatron and its dependencies, so nothing here imports gspo_megatron. This folder is not a
package. Its modules are all named gspo_vllm_*, so that they cannot hide modules of the server.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gspo_vllm_answers import PROOF, TOKEN_VARIABLE, Answers, proof_of
from gspo_vllm_end import STARTER_VARIABLE, has_ended, kill_group, remove_folder
from gspo_vllm_group import Group, broadcast, make_group, nccl_version
from safetensors import safe_open

PATIENCE_SECONDS = 10.0  # a server has this time to end by itself
_LOOK_SECONDS = 1.0

_PART = 1 << 22  # number of elements in one partial sum
_CHALLENGE = re.compile(r"[0-9a-f]{64}")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Key: a family; value: parts of the names of its tensors. A tensor belongs to the first family that
# has a part of the tensor's name.
_FAMILIES = {
    "norms": ("norm",),
    "router": (".gate.", "router", "e_score_correction_bias"),
    "shared experts": ("shared_expert",),
    "experts": (".experts.",),
    "attention": ("attn",),
    "MLP": (".mlp.",),
    "embedding": ("embed",),
    "output layer": ("lm_head",),
}


class GspoWorker:
    """Methods for `/collective_rpc`. vLLM adds this class to the bases of its worker class."""

    model_runner: Any  # an attribute of vLLM's worker
    reload_weights: Callable[..., None]
    device: torch.device
    rank: int  # number of the worker in the server, from 0
    # key of the server, and process group with rank 0 of a run
    _sender: tuple[str, Group] | None = None

    def tell_config(self) -> str:
        """Return the config.json of the served model, with the default values of all missing
        fields."""
        return self.model_runner.model_config.hf_config.to_json_string(use_diff=False)

    def forget_prepacked_experts(self) -> int:
        """Make the next `reload_weights` pack the experts again; returns the number of MoE layers.

        On a CPU vLLM copies the experts' weights into the layout of its kernel, but only if a layer
        has no kernel yet. So after a reload every layer would silently compute with the weights
        that it had first. On a GPU the kernel reads the weights in place, and CUDA graphs hold
        their addresses. So on a GPU this method does nothing and returns 0.
        """
        methods = [
            method
            for module in self.model_runner.get_model().modules()
            if (method := getattr(module, "quant_method", None)) is not None
            and getattr(getattr(method, "unquantized_backend", None), "name", None) == "CPU"
        ]
        for method in methods:
            method.moe_kernel = None
        return len(methods)

    def pack_tied_output_layer(self) -> int:
        """Pack the output layer for its kernel again, after `reload_weights`, if it shares its
        matrix with the embedding; returns the number of such layers.

        On a CPU the output layer computes with a copy of its matrix. `reload_weights` renews the
        copies only of layers that have tensors of their own in the folder. A tied output layer has
        none, so it would silently compute with its old copy. On a GPU there is no copy.
        """
        owners: dict[int, torch.nn.Module] = {}  # the first module that has the parameter
        tied = []
        for module in self.model_runner.get_model().modules():
            weight = module._parameters.get("weight")
            if weight is None or owners.setdefault(id(weight), module) is module:
                continue
            if hasattr(module, "cpu_linear"):
                tied.append(module)
        for module in tied:
            module.quant_method.process_weights_after_loading(module)
        return len(tied)

    def response_tokens(self) -> dict[str, int] | None:
        """Return the number of response tokens of each request of this worker, by vLLM's name.

        The numbers are exact while the server is paused. Requests that have just ended may still be
        included. Returns None if this version of vLLM stores requests in another place.
        """
        requests = getattr(self.model_runner, "requests", None)
        if not isinstance(requests, dict):
            return None
        return {name: len(request.output_token_ids) for name, request in requests.items()}

    def weight_sums(self, folder: str | None = None) -> dict[str, list[float]]:
        """Return [elements, sum, sum of squares] of each family of tensors in each layer.

        Without `folder`, these are the sums of this worker's parameters. With a Hugging Face
        folder, these are the sums of the folder's tensors, which only worker 0 reads. vLLM fuses,
        pads and reorders tensors for its kernels. This does not change the sums, so a tensor that
        differs from the folder's is detected in any layout. The sums are float64.
        """
        if folder is None:
            return _sums(self.model_runner.get_model().named_parameters())
        return {} if self.rank else _sums(_tensors_of(Path(folder), self.device))

    def adapter_sums(self, folder: str | None = None) -> dict[str, float]:
        """Return the sum of squares of each matrix A of an adapter. The key is the part of the
        adapted matrix's name that begins with `layers.`. The experts of a layer count as one
        matrix.

        folder: a PEFT folder, which only worker 0 reads; None: the adapter that this worker loaded
        last. The sums are needed because vLLM silently ignores the parts of an adapter for which it
        has no layer.
        """
        if folder is None:
            return _adapter_sums(_loaded_parts(self.model_runner.lora_manager._adapter_manager))
        if self.rank:
            return {}
        found = _tensors_of(Path(folder), self.device)
        names = ((n.removeprefix("base_model.model.").partition(".lora_A."), t) for n, t in found)
        return _adapter_sums((matrix, t) for (matrix, is_a, _), t in names if is_a)

    def receive_weights(self, plan: Mapping[str, Any], key: str, world_size: int) -> int:
        """Load the tensors that rank 0 of a run sends, and return their number.

        plan: WeightStream.plan of that run; key: the key of this server in that run; world_size:
        the size of the process group. The group is reused for the next version with the same key.
        """
        if self._sender is None or self._sender[0] != key:
            self._sender = (key, self._join(plan, key, world_size))
        group, count = self._sender[1], sum(len(each["tensors"]) for each in plan["buckets"])
        try:
            self.reload_weights(weights_iterator=self._received(group, plan["buckets"]))
        except BaseException:
            self._sender = None
            raise
        return count

    def _join(self, plan: Mapping[str, Any], key: str, world_size: int) -> Group:
        """Join the process group with rank 0 of a run; it is separate from the groups of vLLM."""
        own, wanted = nccl_version(plan["backend"]), plan.get("nccl")
        if own != wanted:  # rank 0 does not begin to connect before all workers have come
            raise RuntimeError(f"this server has NCCL {own}, and rank 0 of the run has {wanted}")
        seconds = timedelta(seconds=plan["seconds"])
        store = dist.TCPStore(
            plan["host"], plan["port"], is_master=False, wait_for_workers=False, timeout=seconds
        )
        rank = self.rank + 1
        store.set(f"{key}/{rank}", "here")
        # The address of the host's name is not used, because rank 0 may not be able to reach it.
        address = _own_address(plan["host"], plan["port"])
        shared = dist.PrefixStore(key, store)
        return make_group(plan["backend"], shared, rank, world_size, seconds, address, self.device)

    def _received(
        self, group: Group, buckets: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the tensors; yields (name, tensor) in the order in which they are sent.

        vLLM may keep a tensor until its layer is complete, so every bucket gets new memory.
        """
        for bucket in buckets:
            buffer = torch.empty(bucket["bytes"], dtype=torch.uint8, device=self.device)
            broadcast(group, buffer).wait()
            for name, dtype, shape, start in bucket["tensors"]:
                kind = getattr(torch, dtype)
                content = buffer[start : start + math.prod(shape) * kind.itemsize]
                yield name, content.view(kind).view(shape)


def _own_address(host: str, port: int) -> str:
    """Return the address that this machine uses to reach `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((host, port))  # a connect of this socket sends nothing
        return way.getsockname()[0]


def _tensors_of(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's safetensors files, one by one."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


def _loaded_parts(manager: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices A of the adapter with the highest number. They have the shapes that vLLM's
    layers give them, padded with zeros. manager: vLLM's LoRAModelManager."""
    newest = max((n for n in manager.lora_index_to_id if n is not None), default=None)
    if newest is None:
        return
    place = manager.lora_index_to_id.index(newest)
    for name, layer in manager.modules.items():
        experts = [getattr(layer, f"w{n}_lora_a_stacked", ()) for n in ("13", "2")]
        if any(experts):
            yield from ((name, each[place]) for stacked in experts for each in stacked)
            continue
        stacked = layer.lora_a_stacked
        if isinstance(stacked, torch.Tensor):  # in the embedding and in the output layer
            stacked = (stacked,)
        parts = manager.packed_modules.get(name, [name])
        # the layer joins matrices in a way that `packed_modules` does not describe
        if len(parts) != len(stacked):
            parts = [name] * len(stacked)
        yield from ((part, each[place]) for part, each in zip(parts, stacked, strict=True))


def _adapter_sums(parts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, tensor in parts:
        matrix = name[max(0, name.find("layers.")) :].partition(".experts")
        key = matrix[0] + matrix[1]
        exact = tensor.detach().double()
        found[key] = found.get(key, 0.0) + float((exact * exact).sum())
    return found


@torch.no_grad()
def _sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.itemsize < 2:  # the server quantized it
            continue
        sums = found.setdefault(family_of(name), [0, 0.0, 0.0])
        sums[0] += tensor.numel()
        for part in tensor.reshape(-1).split(_PART):
            exact = part.double()
            sums[1] += float(exact.sum())
            sums[2] += float(exact @ exact)
    return found


def _end_with_others() -> None:
    """If this process is an engine or a worker, end it when the server ends. If it is the server,
    end it when the process that started it ends.

    Without this, an engine does not notice that its server was killed. A server gets SIGTERM when
    its starter dies. But the engine ends first, and then the server may wait forever for answers of
    the engine.
    """
    if not (starter := os.environ.get(STARTER_VARIABLE)):
        return
    server = os.getsid(0)
    if server == os.getpid():
        _kill_after(int(starter), PATIENCE_SECONDS)
    else:
        _kill_after(server, 0.0)


def _kill_after(other: int, patience: float) -> None:
    """Kill this process and its process group `patience` seconds after the process `other` has
    ended."""

    def watch() -> None:
        try:
            ended = select.poll()
            ended.register(os.pidfd_open(other), select.POLLIN)
            ended.poll()
        except ProcessLookupError:  # `other` ended before the watch began
            pass
        except (AttributeError, OSError):
            # Old kernels lack this call, and interpreters that were built for old kernels, such as
            # those of uv and conda, lack the function.
            while not has_ended(other):
                time.sleep(_LOOK_SECONDS)
        time.sleep(patience)
        remove_folder()
        kill_group(os.getpgid(0))

    if os.path.isdir("/proc/self"):  # Linux
        threading.Thread(target=watch, daemon=True).start()


def family_of(name: str) -> str:
    """Return the family of a parameter of vLLM, or of a tensor of a Hugging Face folder.

    Examples: `experts of layer 2`, `embedding`.
    """
    layer = _LAYER.search(name)
    kinds = (kind for kind, parts in _FAMILIES.items() if any(part in name for part in parts))
    return next(kinds, "others") + (f" of layer {layer[1]}" if layer else "")


class TokenGuard:
    """Middleware that answers 401 to requests without the token in GSPO_SERVER_TOKEN.

    Only /health and PROOF need no token. If the variable is not set, only /health is answered. The
    guard is necessary because the routes for new weights run any code that a request names. It also
    protects the routes of `Answers`.

    With PROOF a client checks that this server knows the token, before it sends the token."""

    def __init__(self, app: Any) -> None:
        self._app = Answers(app)
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip()  # a header has no blanks around it
        self._expected = f"Bearer {self._token}".encode() if self._token else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == PROOF and self._token:
            await self._prove(self._token, scope, send)
        elif scope["type"] == "lifespan" or scope["path"] == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            told = f"this server wants the token in its {TOKEN_VARIABLE}\n"
            await send({"type": "http.response.body", "body": told.encode()})
        else:  # If a websocket is closed before it is open, the server answers 403.
            await send({"type": "websocket.close", "code": 1008})

    @staticmethod
    async def _prove(token: str, scope: Any, send: Any) -> None:
        asked = urllib.parse.parse_qs(scope["query_string"].decode("ascii", "replace"))
        challenge, status, answer = asked.get("challenge", [""])[0], 400, {}
        if _CHALLENGE.fullmatch(challenge):
            status, answer = 200, {"proof": proof_of(token, challenge)}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _knows(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._expected is None or len(given) != 1:
            return False
        return hmac.compare_digest(given[0], self._expected)


_end_with_others()
