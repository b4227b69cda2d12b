"""Servers as processes: their ports, and their end. Small HTTP programs take the place of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_megatron.errors import RolloutError
from gspo_megatron.families import PRESETS
from gspo_megatron.families.model_shape import ModelShape, shape_of
from gspo_megatron.rollout.vllm import process
from gspo_megatron.rollout.vllm.process import (
    WORKER_FOLDER,
    ServerProcess,
    cpu_arguments,
    cpu_environment,
    errors_of,
    last_lines_of,
    option_words,
)
from tests.programs import command_environment, gspo, run_program, wait_until

# Like vLLM, this server starts to listen late: when a given file appears.
_SERVER = """
import http.server, socket, sys, time
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
while not Path(options["--when"]).exists():
    time.sleep(0.01)
address = (options["--host"], int(options["--port"]))
class Server(http.server.HTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as in servers
        super().server_bind()
Server(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""
# Like vLLM, this server has a semaphore that its child needs, and a socket in its temporary folder.
_MESSY = """
import multiprocessing, os, socket, sys, tempfile, time
from pathlib import Path
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    semaphore = spawn.Semaphore(1)
    child = spawn.Process(target=time.sleep, args=(300,))
    child.start()
    folder = tempfile.gettempdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "socket"))
    name = semaphore._semlock.name
    said = Path(sys.argv[1])
    said.with_suffix(".new").write_text(f"/dev/shm/sem.{name.lstrip('/')} {folder} {child.pid}")
    said.with_suffix(".new").rename(said)
    time.sleep(300)
"""
_START = """
import sys
from pathlib import Path
from tests.vllm.servers import serve
with serve(*map(Path, sys.argv[1:]), {}):
    pass
"""

# A server that waits forever for the answer of its engine. SIGTERM does not end it.
_STUCK = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import gspo_vllm_worker
Path("started").write_text(f"{os.getpid()} {os.environ['TMPDIR']}")
time.sleep(300)
"""
_STARTER = """
import os, sys, time
from gspo_megatron.rollout.vllm.process import WORKER_FOLDER, ServerProcess
environ = {"PYTHONPATH": str(WORKER_FOLDER)}
ServerProcess([sys.executable, "-c", sys.argv[1]], environ, None)
time.sleep(300)
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which a process already listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_is_the_server_s_before_the_server_takes_it(tmp_path: Path) -> None:
    script, when = tmp_path / "server.py", tmp_path / "go"
    script.write_text(_SERVER)
    words = [sys.executable, str(script), "--when", str(when)]
    process = ServerProcess(words, {}, tmp_path / "log")
    try:
        port = int(process.url.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        when.touch()

        def answers() -> bool:
            assert process.has_ended() is None, process.last_lines()
            with contextlib.suppress(OSError), urllib.request.urlopen(process.url) as answer:
                return answer.status == 200
            return False

        wait_until(answers, seconds=30)
    finally:
        asyncio.run(process.end())
    with socket.socket() as other:  # after the server's end the port is free
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()


def test_a_port_that_is_taken_is_told_at_once(taken: int, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=f"on 127.0.0.1, port {taken}: Address already in use"):
        ServerProcess([sys.executable, "-c", "pass"], {}, tmp_path / "log", port=taken)
    assert not (tmp_path / "log").exists()
    (tmp_path / "config.json").write_text("{}")
    for words, told in (
        (("--port", taken), f"on 127.0.0.1, port {taken}: Address already in use; allowed: "),
        (("--host", "192.0.2.1"), "on 192.0.2.1, port 0: Cannot assign requested address"),
    ):
        said = gspo("serve", tmp_path, *words, expect=2).stderr.strip()
        assert told in said and len(said.splitlines()) == 1


def test_a_server_without_a_place_for_its_files_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server leaves neither a port nor a folder, and the error gives the reason."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(process, "_LONGEST", 1000)
    words = [sys.executable, "-c", "pass"]
    before = sorted(os.listdir("/proc/self/fd"))
    for log, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "log", "File exists")):
        with pytest.raises(RolloutError, match=f"^a server cannot be started: .*{why}.*TMPDIR"):
            ServerProcess(words, {}, log)
    with pytest.raises(RolloutError, match="rollout.vllm.python = 'no-such-program': cannot be"):
        ServerProcess(["no-such-program"], {}, tmp_path / "log")
    assert list(temporary.iterdir()) == []
    temporary.rmdir()
    with pytest.raises(RolloutError, match="^a server cannot be started: .*No such file"):
        ServerProcess(words, {}, tmp_path / "log")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_server_that_tests_start_ends_with_them(tmp_path: Path) -> None:
    """The tests are killed here, and the server ends, too."""
    python, told = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ >{told}.new\nmv {told}.new {told}\nexec sleep 300\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    words = [sys.executable, "-c", _START, *map(str, (python, tmp_path))]
    tests = subprocess.Popen(words, env=command_environment())
    try:
        assert wait_until(told.exists, tests, seconds=60)
        server = psutil.Process(int(told.read_text()))
        tests.kill()
        tests.wait()
        server.wait(60)
    finally:
        tests.kill()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(told.read_text()), signal.SIGKILL)


def test_a_server_that_does_not_heed_its_starter_s_end_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _STARTER, _STUCK]
    starter = subprocess.Popen(words, env=command_environment(), cwd=tmp_path)
    told = tmp_path / "started"
    try:
        assert wait_until(lambda: told.exists() and told.read_text(), starter, seconds=60)
        pid, folder = told.read_text().split()
        server = psutil.Process(int(pid))
        assert Path(folder).is_dir()
        starter.kill()
        starter.wait()
        server.wait(60)  # it should take ten seconds, but a busy machine may be slower
        assert not Path(folder).exists()
    finally:
        starter.kill()
        with contextlib.suppress(OSError, LookupError):
            os.kill(int(told.read_text().split()[0]), signal.SIGKILL)


# A process that ends with another one, in an interpreter or on a kernel without pidfd_open.
_WATCHER = """
import os, sys, time
def refused(_):
    raise OSError(38, "Function not implemented")
BEFORE
import gspo_vllm_worker
gspo_vllm_worker._kill_after(int(sys.argv[1]), 0.0)
print("watches", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("before", ["del os.pidfd_open", "os.pidfd_open = refused"])
def test_a_server_ends_with_its_starter_on_old_systems(before: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        watcher = subprocess.Popen(
            [sys.executable, "-c", _WATCHER.replace("BEFORE", before), str(other.pid)],
            env=command_environment() | {"PYTHONPATH": str(WORKER_FOLDER)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # it ends its whole process group
        )
        try:
            assert watcher.stdout is not None and watcher.stdout.readline() == "watches\n"
            other.kill()
            assert watcher.wait(30) == -signal.SIGKILL
        finally:
            other.kill()
            watcher.kill()
            watcher.communicate()


_LOG = """
INFO 11-26 10:44:01 [core.py:114] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 11-26 10:44:08 [core.py:900] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-26 10:44:08 [core.py:900]   File "cpu_attn.py", line 9, in forward
(EngineCore pid=7) ERROR 11-26 10:44:08 [core.py:900] RuntimeError: Unsupported head_dim: 16
(EngineCore pid=7) RuntimeError: Unsupported head_dim: 16
(APIServer pid=5) ERROR 11-26 10:44:09 [async_llm.py:700] EngineDeadError: See stack trace (above)
INFO:     127.0.0.1:4000 - "POST /inference/v1/generate HTTP/1.1" 500 Internal Server Error
"""


def test_the_cause_is_found_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(_LOG)
    cause = "(EngineCore pid=7) RuntimeError: Unsupported head_dim: 16"
    assert errors_of(log) == f"its log: {cause} (all of it: {log})"
    assert last_lines_of(log) == f"{cause} (all of it: {log})"
    log.write_text("INFO: nothing is wrong\n")
    assert errors_of(log) == f"its log: {log}"
    assert last_lines_of(log) == f"INFO: nothing is wrong (all of it: {log})"
    # This is the only message of the log, so it is shown.
    log.write_text("vllm.EngineDeadError: See stack trace (above)\n")
    assert "EngineDeadError" in errors_of(log)
    log.unlink()
    assert errors_of(log) == f"its log {log} cannot be read"


@pytest.mark.parametrize(
    "wrong",
    ["unrecognized arguments: --foo-bar", "argument --kv-cache-dtype: invalid choice: 'x'"],
)
def test_an_option_that_vllm_refuses_leads_the_message_and_names_the_key(
    tmp_path: Path, wrong: str
) -> None:
    log = tmp_path / "0.log"
    log.write_text(
        "INFO 11-26 10:44:01 [api_server.py:9] starting\n"
        "usage: api_server.py [-h] [--headless]\n"
        "                     [--enable-log-requests | --no-enable-log-requests]\n"
        f"                     [model_tag]\napi_server.py: error: {wrong}\n"
    )
    told = f"{wrong}; vLLM refuses rollout.vllm.options (all of it: {log})"
    assert last_lines_of(log) == told


_INVALID_VALUE = """
(Server pid=7) pydantic_core.ValidationError: 1 validation error for SchedulerConfig
(Server pid=7) max_num_seqs
(Server pid=7)   Input should be greater than or equal to 1 [type=greater_than_equal]
(Server pid=7)     For further information visit https://errors.pydantic.dev/2.14
"""


def test_a_value_that_vllm_refuses_is_named(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(_INVALID_VALUE)
    told = "max_num_seqs Input should be greater than or equal to 1 "
    assert last_lines_of(log).startswith(told)
    assert "; vLLM refuses rollout.vllm.options, or the model's own settings" in last_lines_of(log)
    log.write_text(f"{_INVALID_VALUE}{_LOG}")  # the log of an earlier start
    assert "vLLM refuses" not in last_lines_of(log)


def test_a_killed_server_leaves_nothing_behind(tmp_path: Path) -> None:
    """Python's resource tracker must survive the server, because no other process removes the
    semaphore."""
    script = tmp_path / "server.py"
    script.write_text(_MESSY)
    said = tmp_path / "said"
    process = ServerProcess([sys.executable, str(script), str(said)], {}, tmp_path / "log")
    try:
        wait_until(lambda: said.exists() or process.has_ended(), seconds=60)
        assert process.has_ended() is None, process.last_lines()
        semaphore, folder, child = said.read_text().split()
        assert Path(semaphore).exists() and list(Path(folder).iterdir())
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        assert len(folder) < 60  # the path of a socket may have at most 107 bytes
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
    assert not Path(folder).exists()
    wait_until(lambda: not Path(semaphore).exists(), seconds=60)
    assert not psutil.pid_exists(int(child)) or (
        psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE
    )


def shape_with(**fields: Any) -> ModelShape:
    """The shape of the tiny model, with these fields of TransformerConfig."""
    return shape_of(PRESETS["tiny"], fields)


def test_latent_attention_on_cpus_gets_other_kernels() -> None:
    """Without YaRN, vLLM's rotary kernel for CPUs is wrong for latent attention; see
    tests/vllm/test_families.py."""
    on_cpu = cpu_arguments(shape_with(multi_latent_attention=True), workers=1)
    assert on_cpu["attention_backend"] == "CPU_MLA"
    assert on_cpu["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    words = option_words(on_cpu)
    assert words[words.index("--compilation-config") + 1] == (
        '{"custom_ops": ["all", "-rotary_embedding"]}'
    )
    usual = cpu_arguments(shape_with(), workers=2)
    assert usual == {"enforce_eager": True, "enable_chunked_prefill": False}


def test_the_cache_on_cpus_has_the_size_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes the variable, if there is one, and ignores the option."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert cpu_environment({})["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu_environment({"kv_cache_memory_bytes": 2**31})
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")  # the server inherits it
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu_environment({})


def test_delta_nets_on_cpus_have_no_prefix_caching() -> None:
    on_cpu = cpu_arguments(shape_with(linear_attention_freq=2), workers=1)
    assert on_cpu["enable_prefix_caching"] is False


_FORKS = """
import multiprocessing
import gspo_vllm_server
gspo_vllm_server.fork_engine()
def tell():
    print(multiprocessing.get_context("spawn").get_start_method(), flush=True)
tell()
engine = multiprocessing.get_context("spawn").Process(target=tell)
engine.start()
engine.join()
"""


def test_a_server_forks_its_engine_and_the_engine_forks_nothing() -> None:
    """The engine must be forked, because a new interpreter would run this program again instead of
    `tell`."""
    environ = {"PYTHONPATH": str(WORKER_FOLDER)}
    done = run_program(sys.executable, "-c", _FORKS, environ=environ)
    assert done.stdout == "fork\nspawn\n"
