"""Starts vLLM's API server on a reserved port: `python -m gspo_vllm_server OPTIONS`.

The process that starts a server holds the server's port (`hold_port`), and shares it only with
sockets that have the option SO_REUSEPORT. vLLM itself sets this option only if it has several API
servers, so this module sets it. Two more changes save time at the start: the server does not
collect facts about the machine; and if `cpu_environment` has set FORK_VARIABLE, the engine on a CPU
is a fork of the server.
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

FORK_VARIABLE = "GSPO_SERVER_FORKS"  # "1": the server forks its engine; set by `cpu_environment`
_MODULE = "vllm.entrypoints.openai.api_server"


def share_port(port: int) -> None:
    """Set SO_REUSEPORT on all sockets that this process binds to the port."""
    native = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[1] == port:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        native(self, address)

    socket.socket.bind = bind  # ty: ignore[invalid-assignment]  # on purpose


def describe_no_machine() -> None:
    """Make `/server_info` report only the server, not the machine.

    We ask for `/server_info` once, to learn the server's settings. To describe the machine, vLLM
    would run pip and a dozen other programs, which takes seconds at each start.
    """
    with contextlib.suppress(ImportError):  # some versions of vLLM lack the module
        from vllm import collect_env

        collect_env.get_env_info = lambda: SimpleNamespace(_asdict=dict)


def fork_engine() -> None:
    """Make the engine a fork of this process, so that the engine need not import the modules again.

    The imports take half of the time of a server's start. vLLM itself starts a new interpreter for
    the engine. A new interpreter is needed only if the server has already used a GPU. The workers
    of an engine are still new interpreters, because the engine has threads when it starts its
    workers.
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
        remove_folder()  # needed if the process that started this server has died
