"""Starts vLLM's API server on the port that is held for it: `python -m gspo_vllm_server OPTIONS`.

Whoever starts a server holds its port meanwhile (`hold_port`), and shares it only with sockets that
have SO_REUSEPORT, which vLLM sets where it has several API servers. Two more changes only save time
at the start: nobody describes the machine, and on a CPU the engine is a fork of the server, where
`cpu_environment` asks for that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import Any

from gspo_vllm_end import remove_folder

FORK_VARIABLE = "GSPO_SERVER_FORKS"  # its engine; set by `cpu_environment`
_MODULE = "vllm.entrypoints.openai.api_server"


def share_port(port: int) -> None:
    """Have all sockets of this process that are bound to this port share it."""
    native = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[1] == port:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        native(self, address)

    socket.socket.bind = bind  # ty: ignore[invalid-assignment]  # on purpose


def describe_no_machine() -> None:
    """Have `/server_info` tell of the server only. It is asked once, for the server's settings, and
    would first run pip and a dozen other programs: seconds at each start."""
    with contextlib.suppress(ImportError):  # a version that has no such module
        from vllm import collect_env

        collect_env.get_env_info = lambda: SimpleNamespace(_asdict=dict)


def fork_engine() -> None:
    """Have the engine take over what this process has imported: that is half of a server's start.

    vLLM asks for a new interpreter, which an engine needs where the server has used a GPU. On a CPU
    the server has computed nothing yet. Workers of an engine stay new interpreters: the engine has
    threads of its own when it starts them.
    """
    native = multiprocessing.get_context

    def get_context(method: str | None = None) -> BaseContext:
        is_server = multiprocessing.parent_process() is None
        return native("fork" if method == "spawn" and is_server else method)

    multiprocessing.get_context = get_context  # ty: ignore[invalid-assignment]  # on purpose


if __name__ == "__main__":
    share_port(int(sys.argv[sys.argv.index("--port") + 1]))
    if os.environ.get(FORK_VARIABLE) == "1":
        fork_engine()
    try:
        describe_no_machine()
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    finally:
        remove_folder()  # if whoever started this server does not live to do so
