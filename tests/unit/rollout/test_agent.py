"""Servers on other nodes: the rollout service and an agent, in separate processes. In these tests
the servers are small HTTP programs. Tests in tests/slurm start vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from gspo_megatron.errors import RolloutError, UserError
from gspo_megatron.rollout.vllm import agent as agent_module
from gspo_megatron.rollout.vllm import remote
from gspo_megatron.rollout.vllm.remote import HeartbeatFile, Node, RemoteProcess, exchange_files
from tests.programs import command_environment
from tests.unit.rollout.double import until

# The program of a server that answers every request at its address.
_SERVER = """
import http.server, os, shutil, signal, socket, sys
from pathlib import Path
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["WHO"].encode())
    def log_message(self, *_):
        pass
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--fail" in options:
    raise RuntimeError(options["--fail"])
class Server(http.server.HTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as in servers
        super().server_bind()
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    Server((options["--host"], int(options["--port"])), Handler).serve_forever()
finally:  # as gspo_vllm_server does
    shutil.rmtree(os.environ["TMPDIR"])
"""
NODE = "node-a"


class Run:
    """The folder of a run, and the agent of one node."""

    def __init__(self, folder: Path) -> None:
        self.run_folder = folder / "run"
        self.folder = self.run_folder / "rollouts" / remote.FOLDER
        self.script = folder / "server.py"
        self.script.write_text(_SERVER)
        self.agent: subprocess.Popen[str] | None = None

    def start_agent(self, *options: str) -> subprocess.Popen[str]:
        words = ["serve", "--join", str(self.run_folder), "--name", NODE, "--host", "127.0.0.1"]
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "gspo_megatron", *words, *options],
            env=command_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        return self.agent

    def server(self, node: Node, number: int = 0, *options: str) -> RemoteProcess:
        words = [sys.executable, str(self.script), *options]
        return RemoteProcess(node, number, words, {"WHO": f"server {number}"}, gpus=())

    def processes(self) -> list[psutil.Process]:
        """The processes of the servers that are running."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if not is_zombie and str(self.script) in (process.info["cmdline"] or ()):
                found.append(process)
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.agent is not None:
        made.agent.terminate()
        assert made.agent.wait(30) == 0
    assert not made.processes()


@contextlib.asynccontextmanager
async def service(run: Run) -> AsyncIterator[Node]:
    node = Node(run.folder, NODE)
    task = asyncio.create_task(exchange_files([node]))
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.wait([task])


def answer_of(url: str) -> str | None:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.read().decode()
    return None


async def started(server: RemoteProcess) -> str:
    """Wait until the server answers. Returns its URL."""
    await until(lambda: server.url and answer_of(server.url))
    return server.url


def test_a_server_starts_and_ends_as_the_service_says(run: Run) -> None:
    async def go() -> None:
        run.start_agent()
        async with service(run) as node:
            first, second = run.server(node, 0), run.server(node, 1)
            urls = [await started(first), await started(second)]
            assert [answer_of(url) for url in urls] == ["server 0", "server 1"]
            assert first.has_ended() is None
            secret = remote.wanted_file(run.folder, NODE)
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
            await first.end()
            assert answer_of(urls[0]) is None and answer_of(urls[1]) == "server 1"
            again = run.server(node, 0)
            assert await started(again) != urls[0]
            first.kill()  # this late request to end the earlier server must not end the new one
            await asyncio.sleep(2)
            assert again.has_ended() is None and answer_of(again.url) == "server 0"
        # The service has told the agent that the service ends.
        await until(lambda: not run.processes())

    asyncio.run(go())


def test_how_a_server_ended_is_told(run: Run) -> None:
    async def go() -> None:
        run.start_agent()
        async with service(run) as node:
            failing = run.server(node, 0, "--fail", "it-is-broken")
            killed = run.server(node, 1)
            await started(killed)
            await until(failing.has_ended)
            for process in run.processes():
                process.send_signal(40)  # a real-time signal, which has no name
            await until(killed.has_ended)
            assert "exit code 1" in str(failing.has_ended())
            assert "it-is-broken" in str(failing.has_ended())
            assert str(failing.log) in str(failing.has_ended())
            assert killed.has_ended() == "was killed by signal 40"

    asyncio.run(go())


def test_gpus_are_those_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6")
    assert agent_module._devices([]) == {}
    assert agent_module._devices([1, 2]) == {"CUDA_VISIBLE_DEVICES": "5,GPU-6"}
    with pytest.raises(RolloutError, match="GPU 3 of its node.* has 3 "):
        agent_module._devices([2, 3])
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        with pytest.raises(RolloutError, match="GPU 0 of its node.* has 0 "):
            agent_module._devices([0])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert agent_module._devices([2, 3]) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_an_agent_that_dies_is_noticed_and_another_takes_its_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_SECONDS", 5.0)

    async def go() -> None:
        agent = run.start_agent()
        async with service(run) as node:
            server = run.server(node)
            await started(server)
            agent.send_signal(signal.SIGKILL)
            assert agent.wait(60) == -signal.SIGKILL
            # The kernel ends the servers when the agent dies.
            await until(lambda: not run.processes())
            await until(server.has_ended)
            assert "no sign of life from node-a for " in str(server.has_ended())
            run.start_agent()
            again = run.server(node)
            await started(again)
            assert again.has_ended() is None

    asyncio.run(go())


def test_a_service_that_dies_without_a_word_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "FORGOTTEN_SECONDS", 4.0)

    async def go() -> None:
        agent = agent_module.NodeAgent(run.folder, NODE, "127.0.0.1")
        ended = asyncio.Event()
        working = asyncio.create_task(agent.run(ended))
        node = Node(run.folder, NODE)
        wishes = asyncio.create_task(exchange_files([node]))
        await started(run.server(node))
        wanted = remote.wanted_file(run.folder, NODE)
        kept = wanted.read_bytes()
        wishes.cancel()
        await asyncio.wait([wishes])
        # as if the service had been killed before it could remove this file
        wanted.write_bytes(kept)
        await until(lambda: not run.processes())
        # An agent must not start servers for an earlier service.
        ended.set()
        await working
        late = agent_module.NodeAgent(run.folder, NODE, "127.0.0.1")
        ended.clear()
        working = asyncio.create_task(late.run(ended))
        await asyncio.sleep(3)
        assert not run.processes() and not late.servers
        ended.set()
        await working

    asyncio.run(go())


def test_a_second_agent_with_a_name_ends(run: Run) -> None:
    """Whether both start together or one after the other, one of them works and the other ends."""

    async def go() -> None:
        ended = asyncio.Event()

        def start() -> asyncio.Task[None]:
            agent = agent_module.NodeAgent(run.folder, NODE, "127.0.0.1")
            return asyncio.create_task(agent.run(ended))

        async with service(run) as node:
            working, server = {start()}, run.server(node)
            for _ in range(2):
                working.add(start())
                refused, working = await asyncio.wait(
                    working, timeout=30, return_when=asyncio.FIRST_COMPLETED
                )
                with pytest.raises(UserError, match="node-a: another agent .* own --name"):
                    await refused.pop()
                await started(server)
                assert server.has_ended() is None and not refused
            assert answer_of(server.url) == "server 0"
            ended.set()
            await asyncio.gather(*working)

    asyncio.run(go())


def test_an_agent_leaves_a_new_run_s_folder_alone(run: Run) -> None:
    agent = run.start_agent()
    assert agent.stdout is not None
    assert "waits at 127.0.0.1" in agent.stdout.readline()
    time.sleep(1.5)
    assert not run.run_folder.exists()


def test_clocks_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    file = HeartbeatFile(path)
    file.read()
    HeartbeatFile(path).write({"0": {"boot": "a"}})
    file.read()
    assert file.heard is None and file.servers  # the file may be old
    for beat in (4e9, 1.0):  # the clock of the writer is far ahead, and is later set back
        path.write_text(json.dumps({"beat": beat, "servers": {}}))
        before = time.monotonic()
        file.read()
        assert file.heard is not None and file.heard >= before
    heard = file.heard
    file.read()
    assert file.heard == heard
    path.write_text('{"beat": 1')  # NFS may show such a partial file while the file is replaced
    file.read()
    assert file.heard == heard
    os.unlink(path)
    file.read()
    assert file.servers == {} and file.heard == heard


def test_servers_listen_on_the_way_to_the_service(tmp_path: Path) -> None:
    Node(tmp_path, NODE, "127.0.0.1").exchange()
    agent = agent_module.NodeAgent(tmp_path, NODE)
    agent.wanted.read()
    assert agent._way_to_service() == "127.0.0.1"
    HeartbeatFile(agent.wanted.path).write({}, "no-such-host.invalid")
    agent.wanted.read()
    with pytest.raises(RolloutError, match=r"node-a has no route .* give --host"):
        agent._way_to_service()
