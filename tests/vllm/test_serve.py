"""`gspo-megatron serve` starts a server with the newest checkpoint of a run. Another run gets its
responses from this server."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.listeners import addresses_of_listeners
from tests.vllm.runs import is_alive, make_run, wait_for
from tests.vllm.servers import served_by_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
_NONE = {"servers": 0, "python": None}


def status(url: str, token: str | None) -> int:
    """The HTTP status with which the server answers a request with this token."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_run_draws_from_a_server_of_another_one_s_checkpoint(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    in_process = {"engine": "megatron", "vllm": _NONE}
    earlier = make_run(
        first,
        vllm_python,
        rollout=in_process,
        training={"steps": 1, "precision": "fp32"},
        checkpoint={"interval": 1},
    )
    earlier.finish(earlier.start())
    words = (str(earlier.out), "--python", str(vllm_python), "max_num_seqs=32")
    with served_by_command(tmp_path, *words, said="TOKEN=") as (server, told):
        url = re.search(r"rollout\.vllm\.urls='\[(http://127\.0\.0\.1:\d+)\]'", told)[1]
        token = re.search(r"GSPO_SERVER_TOKEN=(\S{32,})", told)[1]
        assert status(f"{url}/health", None) == 200
        for path in ("/v1/models", "/server_info", "/metrics", "/openapi.json", "/nothing"):
            assert status(url + path, None) == status(url + path, f"{token}x") == 401
        assert status(f"{url}/v1/models", token) == 200

        run = make_run(
            second,
            vllm_python,
            rollout={"vllm": {**_NONE, "urls": [url]}},
            training={"steps": 2, "precision": "fp32"},
        )
        monkeypatch.setenv("GSPO_SERVER_TOKEN", "another")
        said = run.finish(run.start(), code=2)
        refused = "the server wants another token: set GSPO_SERVER_TOKEN"
        assert f"server {url}: /openapi.json: {refused}" in said
        assert "Traceback" not in said
        monkeypatch.setenv("GSPO_SERVER_TOKEN", token)
        run.finish(run.start())
        assert [record["step"] for record in run.steps()] == [1, 2]
        for record in run.steps():
            assert record["mismatch/abs_mean"] <= 1e-5
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 2  # the server and its engine
        commands = [each.cmdline() for each in (psutil.Process(server.pid), *family)]
        assert not any(token in word for command in commands for word in command)
        port = int(url.rpartition(":")[2])
        listeners = addresses_of_listeners(each.pid for each in family)
        assert set(listeners) == {"127.0.0.1"} and port in listeners["127.0.0.1"], listeners
        server.terminate()
        assert server.wait(60) == 0
        wait_for(lambda: not any(map(is_alive, family)), seconds=120)
