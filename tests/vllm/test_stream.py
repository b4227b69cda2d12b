"""rollout.vllm.weight_transport = nccl with real vLLM servers. On CPUs the tensors are sent with
gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.config.load import load_config
from gspo_megatron.rollout.vllm.weights_folder import weights_folders
from tests.vllm.runs import make_run
from tests.vllm.test_faults import LONG, assert_trained_once, begun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_rank_0_sends_the_weights_and_a_server_that_dies_gets_them_in_a_folder(
    vllm_python: Path, tmp_path: Path
) -> None:
    run = make_run(
        tmp_path,
        vllm_python,
        parallel={"layout": "tp=2,ep=2"},
        rollout={**LONG, "vllm": {"servers": 2, "weight_transport": "nccl"}},
        training={"steps": 6, "precision": "fp32"},
    )
    versions: list[str] = []
    process = run.start()
    run.wait(process, lambda: begun(run, 2))
    [folder] = weights_folders(load_config(tmp_path / "config.yaml"))
    versions += [each.name for each in folder.iterdir()]
    run.wait(process, lambda: begun(run, 3))
    versions += [each.name for each in folder.iterdir()]
    # The folder has at most the version of the start. No later version was written.
    assert set(versions) <= {"version_00000000"}
    run.servers()[0].kill()  # killed while it generates
    run.wait(process, lambda: any(each.name > "version_00000000" for each in folder.iterdir()))
    run.wait(process, lambda: begun(run, 5))
    # When the service is killed, its servers end. New servers need the weights of version 4.
    run.services()[0].kill()
    said = run.finish(process)
    assert "server 0: was killed by SIGKILL; restart 1" in said
    assert "the rollout service was killed by SIGKILL: starting it again" in said
    assert_trained_once(run, 6)
    for record in run.steps():
        assert record["sync/bytes"] > 1e6 and record["sync/version"] == record["step"]
