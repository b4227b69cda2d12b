"""The client of the rollout service, whose process may be killed while it starts, or at any other
moment."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_megatron.config import parse_config
from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.errors import RolloutError
from gspo_megatron.process import ranks
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.vllm.service_client import ServiceClient
from tests.programs import command_environment, wait_until

_MAIN = "gspo_megatron.rollout.vllm.service"
_RANK_0 = """
import sys, time
from pathlib import Path
from gspo_megatron.rollout.vllm.service_client import ServiceClient
from tests.unit.rollout.test_service_client import DRAW, begin_phase, hanging, settings
folder, hangs = Path(sys.argv[1]), sys.argv[2]
sections = {"environment": hanging(folder, hangs)} if hangs == "HangingEpisode" else {}
client = ServiceClient(settings(folder, **sections), restarts=0)
(folder / "ready").touch()
if hangs == "Hanging":
    begin_phase(client, folder, environment=hanging(folder, hangs))
if hangs == "HangingEpisode":
    client.begin_request(DRAW)
time.sleep(300)
"""
DRAW = RolloutRequest("step_00000001_0", "data.prompts", [0], 0, 2, Sampling(4), seed=1, version=0)


class Waiting:
    """An environment whose episodes never ask the policy for a turn."""

    async def rollout(self, client: Any, task: Any) -> None:
        print("an episode has begun", file=sys.stderr, flush=True)
        await asyncio.sleep(300)


class Hanging:
    """An environment that is never ready. It stands for a reward that never returns: the main
    thread of the service runs both."""

    def __init__(self, mark: str) -> None:
        Path(mark).touch()
        time.sleep(300)

    async def rollout(self, client: Any, task: Any) -> None: ...


class HangingEpisode:
    """An environment that blocks the event loop."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    async def rollout(self, client: Any, task: Any) -> None:
        Path(self.mark).touch()
        time.sleep(300)


def hanging(folder: Path, name: str) -> dict[str, Any]:
    """The section of this environment, which makes the file `hangs` in the folder."""
    return {"import_path": f"{__name__}:{name}", "options": {"mark": str(folder / "hangs")}}


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """The settings of a service without weights, so that it starts no server."""
    write_toy_dataset(folder / "toy", "mixed", train=4, test=2, seed=1)
    config = parse_config(
        {
            "data": {
                "tokenizer": str(folder / "toy" / "tokenizer.model"),
                "prompts": str(folder / "toy" / "train.jsonl"),
            },
            "rollout": {"engine": "vllm", "vllm": {"servers": 1}},
            "logging": {"dir": str(folder / "run")},
            **sections,
        }
    )
    return {
        "config": config.model_dump(mode="json"),
        "facts": {
            "vocab_size": 40,
            "num_layers": 2,
            "num_experts": 4,
            "experts_per_token": 2,
            "moe_layers": [0, 1],
        },
        "origin": "",
        "dtype": "float32",
        "devices": [],
        "on_cpu": True,
        "nodes": [],
        "weights_folder": str(folder / "weights"),
    }


@contextmanager
def killing(starts: int) -> Iterator[list[int]]:
    """Kill the first `starts` processes of the service, each as soon as it starts. Yields a list of
    their ids."""
    killed: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set() and len(killed) < starts:
            for child in psutil.Process().children():
                if child.pid not in killed and _is_service(child):
                    child.kill()
                    killed.append(child.pid)
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def _is_service(process: psutil.Process) -> bool:
    try:
        return _MAIN in process.cmdline()
    except psutil.Error:
        return False


def test_a_service_killed_while_it_starts_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with killing(2) as killed:
        client = ServiceClient(settings(tmp_path), restarts=3)
    try:
        assert len(killed) == 2
        told = capfd.readouterr().err
        assert told.count("the rollout service was killed by SIGKILL: starting it again") == 2
        # Then the service is killed twice in a row at a later time.
        ended = pytest.raises(RolloutError, match="once more than rollout.vllm.restarts allows")
        with killing(2) as killed, ended:
            while True:
                client.forget(0)
        assert len(killed) == 2
    finally:
        client.close()
    assert not (tmp_path / "weights").exists()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceClient, Path]]:
    """A healthy service, and the folder that contains its run."""
    folder = tmp_path_factory.mktemp("service")
    with closing(ServiceClient(settings(folder), restarts=0)) as client:
        yield client, folder


def test_a_defect_of_the_service_is_no_mistake_of_the_user(
    service: tuple[ServiceClient, Path],
) -> None:
    with pytest.raises(RuntimeError, match=r"GET /requests/unknown: HTTP Error 500"):
        service[0].request_status("unknown")


def test_a_service_that_lives_and_does_not_answer_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_megatron.rollout.vllm.service_client._DYING_SECONDS", 0.5)
    with closing(ServiceClient(settings(tmp_path), restarts=1)) as client:
        # A reward function without workers may hold the GIL for this time.
        assert client._call_seconds == 600.0  # half of training.hang_timeout_seconds
        first = client._process
        with socket.create_server(("127.0.0.1", 0)) as closed:
            client._url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        client.forget(0)  # the connection is refused
        assert first is not None and first.returncode == -signal.SIGKILL
        told = capfd.readouterr().err
        assert told.index("in work") < told.index("the rollout service did not answer, and was end")


def test_the_service_gets_the_environment_of_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, env: dict[str, str], **__: object) -> None:
        raise RuntimeError(sorted(env.keys() & {"OWN", "OF_ALL"}))

    for name in ("OWN", "OF_ALL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(ranks, "_own_variables", {"OWN"})
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match=r"^\['OF_ALL'\]$"):
        ServiceClient(settings(tmp_path), restarts=0)


def test_a_status_without_news_is_waited_for_with_any_hang_timeout(tmp_path: Path) -> None:
    """The service answers after some seconds. This is more than half of the time-out."""
    sections = {
        "environment": {"import_path": f"{__name__}:Waiting"},
        "training": {"hang_timeout_seconds": 8},
    }
    with closing(ServiceClient(settings(tmp_path, **sections), restarts=0)) as client:
        client.begin_request(DRAW)
        start = time.monotonic()
        assert not client.request_status(DRAW.name)["done"]
        assert time.monotonic() - start > 4


@pytest.mark.parametrize("missing", ["nodes", "dtype"])  # needed in the main thread; in the other
def test_a_service_that_ends_by_itself_is_not_started_again_and_tells_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    broken = settings(tmp_path)
    del broken[missing]
    with pytest.raises(RolloutError, match="the rollout service ended with 1"):
        ServiceClient(broken, restarts=3)
    told = capfd.readouterr().err
    assert f"KeyError: '{missing}'" in told and "starting it again" not in told


def test_what_an_earlier_start_drew_for_later_steps_is_not_forgotten(
    service: tuple[ServiceClient, Path],
) -> None:
    """The service was killed at step 10. This start continues from step 5, and the groups of steps
    6 to 12 are kept."""
    client, folder = service
    bank = folder / "run" / "rollouts"
    bank.mkdir(parents=True, exist_ok=True)
    later = [f"step_{step:08d}_0" for step in range(6, 13)]
    for name in (*later, "step_00000005_0", "step_00000005_1", "evaluation_00000005_near"):
        (bank / f"{name}.groups").touch()
    client.forget(5)
    assert sorted(path.stem for path in bank.glob("*.groups")) == later


def services_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if _is_service(each)]


@contextmanager
def rank_0(
    folder: Path, *before: str, hangs: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """Start a rank 0 and its service. before: words before its command; hangs: the name of an
    environment, whose code the service then runs and which never returns."""
    words = [*before, sys.executable, "-c", _RANK_0, str(folder), hangs]
    process = subprocess.Popen(words, env=command_environment())
    try:
        assert wait_until((folder / "ready").exists, process, seconds=60)
        [service] = services_of(process.pid)
        yield process, service
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_the_service_only_with_rank_0(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM to all processes. The service must live until rank 0 has saved the
    run."""
    weights = tmp_path / "weights" / "version_00000005"
    weights.mkdir(parents=True)
    with rank_0(tmp_path) as (process, service):
        service.send_signal(signal.SIGTERM)
        with pytest.raises(psutil.TimeoutExpired):
            service.wait(3)
        assert weights.exists()
        process.kill()
        service.wait(30)
        assert not weights.parent.exists()


@pytest.mark.parametrize("hangs", ["Hanging", "HangingEpisode"])  # in each of the two threads
def test_the_service_ends_with_rank_0_even_if_the_users_code_hangs(
    tmp_path: Path, hangs: str
) -> None:
    weights = tmp_path / "weights" / "version_00000005"
    weights.mkdir(parents=True)
    with rank_0(tmp_path, hangs=hangs) as (process, service):
        assert wait_until((tmp_path / "hangs").exists, process, seconds=60)
        process.kill()
        service.wait(20)
        assert not weights.parent.exists()


def test_the_service_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rank_0(tmp_path, "prlimit", "--nofile=256:") as (process, service):
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (256, hard)
        assert service.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)


def test_a_token_that_is_no_ascii_is_refused_as_any_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(ServiceClient(settings(tmp_path), restarts=0)) as client:
        for word in ("Bearer schlüssel", "Bearer \N{PILE OF POO}", "Bearer \x80"):
            told = b"GET /figures HTTP/1.1\r\nHost: a\r\nAuthorization: "
            port = int(client._url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
                peer.sendall(told + word.encode() + b"\r\nConnection: close\r\n\r\n")
                assert peer.recv(1000).startswith(b"HTTP/1.1 401"), word
    assert "Traceback" not in capfd.readouterr().err


def test_a_service_that_ends_within_a_draw_says_nothing_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = {"import_path": f"{__name__}:Waiting"}
    client = ServiceClient(settings(tmp_path, environment=waiting), restarts=0)
    draw = RolloutRequest(
        "step_00000001_0", "data.prompts", [0, 1], 0, 2, Sampling(4), seed=1, version=0
    )
    told = ""

    def all_have_begun() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return told.count("an episode has begun") == 4

    client.begin_request(draw)
    assert wait_until(all_have_begun, client._process, seconds=60)
    client.close()
    lines = (told + capfd.readouterr().err).splitlines()
    assert lines[0].startswith("starting 1 server, log ")
    assert lines[1:] == 4 * ["an episode has begun"]


def test_a_restarted_service_gets_only_the_requests_that_are_not_done(tmp_path: Path) -> None:
    """It would generate failed groups of a step again that is trained already."""
    waiting = {"import_path": f"{__name__}:Waiting"}
    empty, open_one = (
        RolloutRequest(
            f"step_{step:08d}_0", "data.prompts", rows, 0, 2, Sampling(4), seed=1, version=0
        )
        for step, rows in ((1, []), (2, [0]))
    )
    with closing(ServiceClient(settings(tmp_path, environment=waiting), restarts=0)) as client:
        for request in (empty, open_one):
            client.begin_request(request)
        assert wait_until(lambda: client.request_status(empty.name)["done"], client._process)
        assert [*client._requests] == [open_one.name]


def begin_phase(client: ServiceClient, folder: Path, **sections: Any) -> bool:
    """Tell the service that a phase begins. The sections have new values in that phase."""
    given = settings(folder, **sections)
    return client.begin_phase(given, parse_config(given["config"]))


def test_a_phase_that_needs_other_servers_is_told_why(
    service: tuple[ServiceClient, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """If the phase cannot begin, the service stays as it is. This service has not started a server
    yet."""
    client, folder = service
    vllm = {"servers": 1, "options": {"max_num_seqs": 8}}
    assert not begin_phase(client, folder, rollout={"engine": "vllm", "vllm": vllm})
    assert not begin_phase(client, folder)
    told = [line for line in capfd.readouterr().err.splitlines() if "started again" in line]
    assert told == [
        "the servers are started again: the next phase changes rollout.vllm",
        "the servers are started again: server 0 is out of service",
    ]
    tokenizer = str(folder / "toy" / "tokenizer.model")
    lost = {"tokenizer": tokenizer, "prompts": str(folder / "none.jsonl")}
    with pytest.raises(RolloutError, match=r"none\.jsonl"):
        begin_phase(client, folder, data=lost)


def test_a_service_that_dies_at_a_border_begins_again_in_the_next_phase(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The new service is told of the phase, too. The phase does not change the settings of the
    service, but the server of the service is gone."""
    before = services_of(psutil.Process().pid)
    with closing(ServiceClient(settings(tmp_path), restarts=1)) as client:
        (process,) = (each for each in services_of(psutil.Process().pid) if each not in before)
        process.kill()
        vllm = {"servers": 1, "restarts": 7}
        assert not begin_phase(client, tmp_path, rollout={"engine": "vllm", "vllm": vllm})
    told = capfd.readouterr().err
    assert "the rollout service was killed by SIGKILL: starting it again" in told
    assert told.count("the servers are started again: server 0 is out of service") == 1
