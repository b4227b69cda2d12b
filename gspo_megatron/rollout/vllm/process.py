"""A vLLM server as a process of this machine, and what it is started with."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import resource
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
from gspo_megatron.files import make_folder
from gspo_megatron.rollout.vllm.client import MODEL, TOKEN_VARIABLE
from gspo_megatron.rollout.vllm.worker.gspo_vllm_end import (
    FOLDER_VARIABLE,
    STARTER_VARIABLE,
    kill_group,
)

WORKER_FOLDER = Path(__file__).resolve().parent / "worker"
WORKER = "gspo_vllm_worker.GspoWorker"
GUARD = "gspo_vllm_worker.TokenGuard"
END_SECONDS = 10.0  # from SIGTERM to SIGKILL
_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 600
_LOOKED_AT = 1 << 16  # bytes at the end of a log
_ERROR = re.compile(r"\w(Error|Exception)(: |$)")
_UNKNOWN_OPTION = re.compile(r"^\S+\.py: error: (.+)")  # of argparse, below all options it knows
_INVALID = re.compile(r"ValidationError: \d+ validation errors? for \w+Config$")  # of pydantic
_CONSEQUENCE = re.compile(r"EngineDeadError|See stack trace|Engine core initialization failed")
_PREFIX = re.compile(
    r"^(\([^)]*\)\s+)*([A-Z]+ [\d: -]+\[[^\]]*\] )?"
)  # (process) LEVEL time [file]
_LONGEST = 40  # of the path of a folder for sockets
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServerProcess:
    """Started when it is made. It ends with the process that started it."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        log: Path | None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """words: its command without the address; environ: what is added to our own variables; log:
        a file for its output, or None: it goes to our stderr; port: None: any that is free. Raises
        RolloutError where it cannot be started."""
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
                    start_new_session=True,  # its engine processes end with its group
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                wrong = f"cannot be run: {error.strerror}; allowed: a Python that has vLLM"
                raise RolloutError(problem("rollout.vllm.python", words[0], wrong)) from error
            unstarted.pop_all()  # what goes again unless it has been started

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> str | None:
        """How it has ended, in words; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}: {self.last_lines()}"

    async def end(self) -> None:
        """SIGTERM, and SIGKILL for what is left of its group some seconds later."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.terminate()
        for _ in range(int(END_SECONDS / 0.1)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """End the server and its engine processes at once."""
        self._held.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _own_environment(self) -> dict[str, str]:
        return {
            STARTER_VARIABLE: str(os.getpid()),  # it ends with this process
            FOLDER_VARIABLE: self._folder,
            "TMPDIR": self._folder,
            "VLLM_RPC_BASE_PATH": self._folder,  # of the sockets between its processes
            # All of these are on this machine; by itself gloo looks up the name of the host.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }

    def last_lines(self) -> str:
        """The end of its log, for a message."""
        return "see above" if self.log is None else last_lines_of(self.log)

    def errors(self) -> str:
        """The last ones in its log, to be added to a message."""
        return "" if self.log is None else f"; {errors_of(self.log)}"


def _temporary_folder() -> str:
    """A new folder that only this user may enter. Paths of sockets have 107 bytes at most."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="gspo-server-", dir=usual if len(usual) <= _LONGEST else "/tmp")


def last_lines_of(log: Path) -> str:
    """The last errors in a log, or else its last lines, and where it is."""
    try:
        lines, errors = _end_of(log)
    except OSError:
        return f"its log {log} cannot be read"
    if (refused := _refused_settings(lines)) is not None:
        return f"{refused} (all of it: {log})"
    return f"{_joined(errors or lines)} (all of it: {log})"


def _refused_settings(lines: Sequence[str]) -> str | None:
    """Which settings vLLM has refused at its start; None where it says of none."""
    if lines and (unknown := _UNKNOWN_OPTION.search(lines[-1])):
        return f"{unknown[1]}; vLLM refuses rollout.vllm.options"
    last = max((n for n, line in enumerate(lines) if _ERROR.search(line)), default=None)
    if last is None or not _INVALID.search(lines[last]):
        return None
    told = [_PREFIX.sub("", line) for line in lines[last + 1 :]]
    told = [line for line in told if not line.startswith("For further information")]
    wrong = " ".join(told)[:_SHOWN_CHARACTERS]
    return f"{wrong}; vLLM refuses rollout.vllm.options, or the model's own settings"


def errors_of(log: Path) -> str:
    """The last errors in a log, if there are any, and where it is."""
    try:
        _, errors = _end_of(log)
    except OSError:
        return f"its log {log} cannot be read"
    return f"its log: {_joined(errors)} (all of it: {log})" if errors else f"its log: {log}"


def _joined(lines: Sequence[str]) -> str:
    return " | ".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]


def _end_of(log: Path) -> tuple[list[str], list[str]]:
    """The last lines of a log, and the errors among them. vLLM's processes write the error of the
    one that failed first several times, and then that they have lost it. Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOOKED_AT))
        found = file.read().decode(errors="replace").splitlines()
    lines = [line.strip() for line in found if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    # of one error, told by several processes, the last time
    distinct = {_PREFIX.sub("", line): line for line in causes or errors}
    return lines, list(distinct.values())


def server_words(python: str, arguments: Mapping[str, Any]) -> list[str]:
    """The command of a server that answers only to those who have its token, without its address.
    arguments: vLLM's options by name, as {max_num_seqs: 64}; true stands for a flag."""
    named = {"served_model_name": MODEL, "middleware": GUARD, **arguments}
    return [python, "-m", "gspo_vllm_server", *option_words(named)]


def needed_arguments(
    folder: str, dtype: str, *, routes: bool, on_cpu: bool, workers: int = 1, latent: bool = False
) -> dict[str, Any]:
    """Options that every run needs of a server. folder: of weights; dtype: as vLLM names it;
    routes: it reports the experts of its tokens; workers: over which its tensors are split; latent:
    the model has multi-head latent attention."""
    own: dict[str, Any] = {}
    if on_cpu:
        # After a part of a prompt vLLM undoes its draw, and sets the generator of the request's
        # seed back. Generators on CPUs cannot go back, and the engine dies.
        own = {"enforce_eager": True, "enable_chunked_prefill": False}
        if workers == 1:
            own["distributed_executor_backend"] = "uni"  # the engine is the worker
        if latent:
            # The kernel that vLLM 0.30 takes on CPUs with AMX knows bf16 alone. Its rotary kernel
            # for CPUs turns the keys of latent attention wrongly unless the model has YaRN: nothing
            # fails, and log-probs are off by 0.1 nats and more.
            own["attention_backend"] = "CPU_MLA"
            own["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return {
        "model": folder,
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "generation_config": "vllm",  # not the model's own temperature and the like
        "worker_extension_cls": WORKER,
        **({"enable_return_routed_experts": True} if routes else {}),
        **own,
    }


def adapter_arguments(rank: int, versions: int) -> dict[str, Any]:
    """Options of servers that load adapters of this rank at runtime, so many versions at once."""
    return {"enable_lora": True, "max_lora_rank": served_rank(rank), "max_loras": versions}


def adapter_environment() -> dict[str, str]:
    """Variables of such servers: the routes to load and unload adapters."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def option_words(options: Mapping[str, Any]) -> list[str]:
    """{max_num_seqs: 64, enforce_eager: true} -> --max-num-seqs 64 --enforce-eager."""
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


def cpu_environment() -> dict[str, str]:
    """Variables for vLLM's CPU build; variables that are set already stay."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        # else a worker is a process of its own even if it is the only one: 9 s of CPU at each start
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # else its engine imports once more what the server has imported: 7 s of CPU at each start
        "GSPO_SERVER_FORKS": "1",
        # glibc keeps what is freed: a reload allocates the weights layer by layer, and pages that
        # come from the system anew take longer than the copies
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def common_environment(token: str, device_numbers: Sequence[str] = ()) -> dict[str, str]:
    """Variables of every server: the routes for new weights, for those who have the token, and
    nothing from the network."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": "",  # it would be a second token
        "HF_HUB_OFFLINE": "1",
        TOKEN_VARIABLE: token,
        # not the trainer's: the server's environment has packages of its own
        "PYTHONPATH": str(WORKER_FOLDER),
        **({"CUDA_VISIBLE_DEVICES": ",".join(device_numbers)} if device_numbers else {}),
    }


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for the server; 0: any that is free. Raises RolloutError.

    A server needs seconds before it takes its port, and must not lose it to another program, which
    would be asked in its place. With SO_REUSEPORT alone, the system shares the port with sockets
    that have this option, too (see `gspo_vllm_server`), and that belong to the same user; nobody
    else gets it, with any options, as long as this socket is open. It does not listen itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        if port:  # not shared with another server of this user
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


def raise_open_files() -> None:
    """Let this process have as many files and connections as its hard limit allows. The usual soft
    limit, 1,024, is less than the responses under way of a few servers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_parent() -> None:
    """Runs in a new process before its program: SIGTERM when the process that started it dies,
    whatever kills that. Slurm sends the SIGUSR1 that tells the ranks to stop to all processes of
    the step: it is ignored."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
