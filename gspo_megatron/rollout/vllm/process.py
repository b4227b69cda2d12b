"""Runs a vLLM server as a process of this machine, and makes its command and environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.config.servers import served_rank
from gspo_megatron.errors import RolloutError, problem
from gspo_megatron.families.model_shape import ModelShape, delta_net_layers
from gspo_megatron.files import make_folder
from gspo_megatron.process import keeper
from gspo_megatron.process.signals import signal_name
from gspo_megatron.rollout.vllm.client import MODEL, TOKEN_VARIABLE
from gspo_megatron.rollout.vllm.worker.gspo_vllm_end import (
    FOLDER_VARIABLE,
    STARTER_VARIABLE,
    kill_group,
)

WORKER_FOLDER = Path(__file__).resolve().parent / "worker"
WORKER = "gspo_vllm_worker.GspoWorker"
GUARD = "gspo_vllm_worker.TokenGuard"
END_SECONDS = 10.0  # time from SIGTERM to SIGKILL
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 600
_LOOKED_AT = 1 << 16  # number of bytes at the end of a log that are read
_ERROR = re.compile(r"\w(Error|Exception)(: |$)")
# Argparse prints this line last, after the usage.
_UNKNOWN_OPTION = re.compile(r"^\S+\.py: error: (.+)")
# A line that pydantic prints.
_INVALID = re.compile(r"ValidationError: \d+ validation errors? for \w+Config$")
_CONSEQUENCE = re.compile(r"EngineDeadError|See stack trace|Engine core initialization failed")
_PREFIX = re.compile(
    r"^(\([^)]*\)\s+)*([A-Z]+ [\d: -]+\[[^\]]*\] )?"
)  # (process) LEVEL time [file]
# The most characters in the path of a temporary folder. In a folder with a longer path, the paths
# of sockets would be too long.
_LONGEST = 40


class ServerProcess:
    """A server process. The constructor starts the server, which ends when this process ends."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        log: Path | None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """words: the command without the address; environ: variables to add to this process's own;
        log: a file for the output; None: this process's stderr; port: None: any free port. Raises
        RolloutError if the server cannot be started."""
        self.log = log
        self._held = hold_port(host, port or 0)
        port = self._held.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        with contextlib.ExitStack() as unstarted, contextlib.ExitStack() as stack:
            unstarted.callback(self._held.close)
            output: Any = sys.stderr
            try:
                self._folder = _temporary_folder()
                unstarted.callback(shutil.rmtree, self._folder, ignore_errors=True)
                if log is not None:
                    make_folder(log.parent)
                    output = stack.enter_context(log.open("ab"))
            except OSError as error:
                raise RolloutError(
                    f"a server cannot be started: it needs a temporary folder and a log: {error}; "
                    "see that both places can be written, and have room (TMPDIR, logging.dir)"
                ) from error
            try:
                self._process = subprocess.Popen(
                    [*words, "--host", host, "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environ, **self._own_environment()},
                    # In a process group of its own, so that the engine processes can be ended with
                    # the server.
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                wrong = f"cannot be run: {error.strerror}; allowed: a Python that has vLLM"
                raise RolloutError(problem("rollout.vllm.python", words[0], wrong)) from error
            unstarted.pop_all()  # the server runs, so its port and its folder are kept

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> str | None:
        """Return in words how the server ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"ended with exit code {code}: {self.last_lines()}"

    async def end(self) -> None:
        """Send SIGTERM, and after at most END_SECONDS kill what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.terminate()
        for _ in range(int(END_SECONDS / 0.1)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """Kill the server and its engine processes at once."""
        self._held.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _own_environment(self) -> dict[str, str]:
        return {
            STARTER_VARIABLE: str(os.getpid()),  # the server ends when this process ends
            FOLDER_VARIABLE: self._folder,
            "TMPDIR": self._folder,
            "VLLM_RPC_BASE_PATH": self._folder,  # for the sockets between the server's processes
            # All processes of the server are on this machine. By default gloo would look up the
            # host's name.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }

    def last_lines(self) -> str:
        """Return the end of the server's log, for a message."""
        return "see above" if self.log is None else last_lines_of(self.log)

    def errors(self) -> str:
        """Return the last errors in the server's log, as text to append to a message."""
        return "" if self.log is None else f"; {errors_of(self.log)}"


def _temporary_folder() -> str:
    """Make a folder that only this user may enter. Its path is short, because a socket's path may
    have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="gspo-server-", dir=usual if len(usual) <= _LONGEST else "/tmp")


def last_lines_of(log: Path) -> str:
    """Return the last errors in a log, or else its last lines, and the log's path."""
    try:
        lines, errors = _end_of(log)
    except OSError:
        return f"its log {log} cannot be read"
    if (refused := _refused_settings(lines)) is not None:
        return f"{refused} (all of it: {log})"
    return f"{_joined(errors or lines)} (all of it: {log})"


def _refused_settings(lines: Sequence[str]) -> str | None:
    """Return the settings that vLLM refused at its start, or None if the log names none."""
    if lines and (unknown := _UNKNOWN_OPTION.search(lines[-1])):
        return f"{unknown[1]}; vLLM refuses rollout.vllm.options"
    last = max((n for n, line in enumerate(lines) if _ERROR.search(line)), default=None)
    if last is None or not _INVALID.search(lines[last]):
        return None
    reasons = [_PREFIX.sub("", line) for line in lines[last + 1 :]]
    reasons = [line for line in reasons if not line.startswith("For further information")]
    wrong = " ".join(reasons)[:_SHOWN_CHARACTERS]
    return f"{wrong}; vLLM refuses rollout.vllm.options, or the model's own settings"


def errors_of(log: Path) -> str:
    """Return the last errors in a log, if any, and the log's path."""
    try:
        _, errors = _end_of(log)
    except OSError:
        return f"its log {log} cannot be read"
    return f"its log: {_joined(errors)} (all of it: {log})" if errors else f"its log: {log}"


def _joined(lines: Sequence[str]) -> str:
    return " | ".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]


def _end_of(log: Path) -> tuple[list[str], list[str]]:
    """Return the last lines of a log, and the errors among them. Raises OSError.

    If one vLLM process fails, other processes write its error, too, and then errors about the loss
    of this process.
    """
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOOKED_AT))
        text_lines = file.read().decode(errors="replace").splitlines()
    lines = [line.strip() for line in text_lines if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    # If several processes wrote the same error, only the last of these lines is kept.
    distinct = {_PREFIX.sub("", line): line for line in causes or errors}
    return lines, list(distinct.values())


def server_words(python: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command, without the address, of a server that requires its token.

    arguments: vLLM's options by name, such as {max_num_seqs: 64}; True sets a flag.
    """
    named = {"served_model_name": MODEL, "middleware": GUARD, **arguments}
    return [python, "-m", "gspo_vllm_server", *option_words(named)]


def needed_arguments(folder: str, dtype: str, *, routes: bool) -> dict[str, Any]:
    """Return the options that every server of a run needs.

    folder: the weights; dtype: vLLM's name of the data type; routes: report the experts of tokens.
    """
    return {
        "model": folder,
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        # With this value vLLM ignores the temperature and other defaults of the model's folder.
        "generation_config": "vllm",
        "worker_extension_cls": WORKER,
        **({"enable_return_routed_experts": True} if routes else {}),
    }


def cpu_arguments(shape: ModelShape, workers: int) -> dict[str, Any]:
    """Return the further options of every server on a CPU.

    workers: number of workers that share the tensors.
    """
    # After a chunk of a prompt, vLLM discards the sampled token and rewinds the generator of the
    # request's seed. CPU generators cannot rewind, and the engine crashes.
    arguments: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False}
    if workers == 1:
        arguments["distributed_executor_backend"] = "uni"  # the engine is the worker
    if any(delta_net_layers(shape)):
        # With delta nets, prefix caching needs chunked prefill.
        arguments["enable_prefix_caching"] = False
    if shape.has_latent_attention:
        # On CPUs with AMX, vLLM 0.30 would choose a kernel that supports only bf16. And its CPU
        # rotary kernel rotates the keys of latent attention wrongly unless the model has YaRN:
        # there is no error, but log-probs are off by 0.1 nats and more.
        arguments["attention_backend"] = "CPU_MLA"
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def adapter_arguments(rank: int, versions: int) -> dict[str, Any]:
    """Return the options of servers that load adapters at runtime.

    rank: the rank of the adapters; versions: the number of versions that a server must hold at the
    same time.
    """
    return {"enable_lora": True, "max_lora_rank": served_rank(rank), "max_loras": versions}


def adapter_environment() -> dict[str, str]:
    """Return the variable that gives a server the routes to load and unload adapters."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Turn {max_num_seqs: 64, enforce_eager: true} into --max-num-seqs 64 --enforce-eager."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{name.replace('_', '-')}")
        elif value is not None:
            is_text = isinstance(value, (str, int, float))
            words += [flag, str(value) if is_text else json.dumps(value)]
    return words


def cpu_environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Return variables for vLLM's CPU build, without those that the environment already sets.

    options: the user's options of the server. For vLLM, a size of the cache in the environment
    overrides this option.
    """
    cache = {} if "kv_cache_memory_bytes" in options else {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GB
    variables = {
        **cache,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        # Otherwise even a single worker is a separate process: 9 s of CPU time at each start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise the engine imports the server's modules again: 7 s of CPU time at each start.
        "GSPO_SERVER_FORKS": "1",
        # glibc keeps freed memory. A reload allocates the weights layer by layer, and new pages
        # from the system would take longer than the copies.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def common_environment(token: str, device_numbers: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of every server: its token, routes for new weights, no network."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": "",  # a value would be a second token
        "HF_HUB_OFFLINE": "1",
        TOKEN_VARIABLE: token,
        # The value replaces the trainer's path, because the server's environment has its own
        # packages.
        "PYTHONPATH": str(WORKER_FOLDER),
        **({"CUDA_VISIBLE_DEVICES": ",".join(device_numbers)} if device_numbers else {}),
    }


def hold_port(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port for a server; 0: any free port. Raises RolloutError.

    A server opens its port some seconds after its start. Until then no other program may take the
    port and get the server's requests. With SO_REUSEPORT alone, the system shares the port only
    with sockets of the same user that also have this option (see `gspo_vllm_server`). No other
    socket gets the port while this one is open. This socket does not listen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        if port:  # check that no other server of this user has the port
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        wrong = f"{error.strerror or error}; allowed: an address of this machine, and a free port"
        raise RolloutError(f"a server cannot listen on {host}, port {port}: {wrong}") from error
    return held


def end_with_parent() -> None:
    """Prepare a new process before its program starts. It will get SIGTERM when its parent dies.

    The process also ignores SIGUSR1. Slurm sends this signal to tell the ranks to stop, but
    it sends the signal to all processes of the job step.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        keeper.end_with_parent(signal.SIGTERM)
