"""Starts vLLM's API server on the port that is held for it: `python -m gspo_vllm_server OPTIONS`.

Whoever starts a server holds its port meanwhile (`hold_port`), and shares it only with sockets that
have SO_REUSEPORT, which vLLM sets where it has several API servers. Nothing else is changed.
"""

from __future__ import annotations

import runpy
import socket
import sys
from typing import Any

from gspo_vllm_end import remove_folder

_MODULE = "vllm.entrypoints.openai.api_server"


def share_port(port: int) -> None:
    """Have all sockets of this process that are bound to this port share it."""
    native = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[1] == port:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        native(self, address)

    socket.socket.bind = bind  # ty: ignore[invalid-assignment]  # on purpose


if __name__ == "__main__":
    share_port(int(sys.argv[sys.argv.index("--port") + 1]))
    try:
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    finally:
        remove_folder()  # if whoever started this server does not live to do so
