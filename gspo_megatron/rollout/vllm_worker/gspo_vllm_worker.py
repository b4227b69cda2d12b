"""What a vLLM server lacks for new weights, and its guard. It runs there, not in our ranks.

A server loads it with `--worker-extension-cls gspo_vllm_worker.GspoWorker` and `--middleware
gspo_vllm_worker.TokenGuard`, and this folder is on its PYTHONPATH. The server has an environment of
its own, without gspo_megatron and what that needs: so nothing here imports gspo_megatron. This
folder is no package and holds nothing else, so that no other module of ours can hide one of the
server's.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

TOKEN_VARIABLE = "GSPO_SERVER_TOKEN"


class GspoWorker:
    """Methods for `/collective_rpc`. vLLM adds this class to the bases of its worker."""

    model_runner: Any  # of vLLM's worker

    def tell_config(self) -> str:
        """config.json of the model that is served, with all of its defaults."""
        return self.model_runner.model_config.hf_config.to_json_string(use_diff=False)

    def forget_prepacked_experts(self) -> int:
        """Make the next `reload_weights` pack the experts again; returns the number of MoE layers.

        On a CPU vLLM copies the experts' weights into the layout of its kernel, but only while a
        layer has no kernel. After a reload, every layer would go on computing with its first
        weights, and nothing says so. On GPUs the kernel reads the weights where they are, and CUDA
        graphs hold their addresses: there nothing is forgotten, and the result is 0.
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


class TokenGuard:
    """Answers 401 to all who do not send the token in GSPO_SERVER_TOKEN, except for /health; to
    everybody where the variable is not set. The routes for new weights run code that they are told
    to run."""

    def __init__(self, app: Any) -> None:
        self._app = app
        token = os.environ.get(TOKEN_VARIABLE)
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            told = f"this server wants the token in its {TOKEN_VARIABLE}\n"
            await send({"type": "http.response.body", "body": told.encode()})
        else:  # a websocket: closed before it is open, the server answers 403
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._expected is None or len(given) != 1:
            return False
        return hmac.compare_digest(given[0], self._expected)
