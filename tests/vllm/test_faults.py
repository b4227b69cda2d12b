"""Processes that end or hang. No response is lost or trained on twice. test_async has kills at
random moments."""

from __future__ import annotations

import shutil
import signal
import stat
from collections import Counter
from pathlib import Path

import pytest

from gspo_megatron.config.load import load_config
from gspo_megatron.rollout.vllm.weights_folder import weights_folders
from tests.vllm.runs import Run, is_alive, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = {"group_size": 4, "prompts_per_step": 6, "max_response_tokens": 100}


def begun(run: Run, step: int) -> bool:
    return (run.out / "rollouts" / f"step_{step:08d}_0.groups").exists()


def assert_trained_once(run: Run, steps: int) -> None:
    """Check that every step occurs once, and that every response was scored once, so no
    response was generated again."""
    assert [record["step"] for record in run.steps()] == list(range(1, steps + 1))
    for record in run.steps():
        assert record["mismatch/abs_mean"] <= 1e-5, record["step"]
        assert record["sync/version"] == record["step"]
    rows = Counter(row for row, _ in run.calls())
    assert sum(rows.values()) == steps * LONG["prompts_per_step"] * LONG["group_size"], rows
    assert all(count % LONG["group_size"] == 0 for count in rows.values()), rows


def test_a_server_that_hangs_costs_no_response(vllm_python: Path, tmp_path: Path) -> None:
    """test_stream kills a server while it generates, and the service. A test below kills a server
    while it loads weights. test_async kills them at random moments."""
    run = make_run(
        tmp_path,
        vllm_python,
        rollout={**LONG, "vllm": {"servers": 2, "stall_timeout_seconds": 15, "restarts": 5}},
        training={"steps": 3, "precision": "fp32"},
        checkpoint={"interval": 1},
    )
    process = run.start()
    run.wait(process, lambda: begun(run, 2))
    run.servers()[-1].suspend()  # makes this server hang
    run.wait(process, lambda: begun(run, 3))
    [folder] = weights_folders(load_config(tmp_path / "config.yaml"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    left = [*run.services(), *run.servers()]
    said = run.finish(process)
    assert "has not answered or drawn a token for" in said
    assert_trained_once(run, 3)
    wait_for(lambda: not any(map(is_alive, left)))
    assert not folder.exists()


@pytest.mark.full
def test_weights_that_are_removed_cost_no_step(vllm_python: Path, tmp_path: Path) -> None:
    """A program that cleans temporary folders may remove the weights. If the run ends because of
    that, the same command continues it."""
    run = make_run(
        tmp_path,
        vllm_python,
        rollout=LONG,
        training={"steps": 4, "precision": "fp32"},
        checkpoint={"interval": 1},
    )
    process = run.start()
    run.wait(process, lambda: begun(run, 2))
    config = load_config(tmp_path / "config.yaml")
    [folder] = weights_folders(config)
    shutil.rmtree(folder)
    left = [*run.services(), *run.servers()]
    said = process.communicate(timeout=600)
    if process.returncode != 0:
        assert "Traceback" not in said and str(folder) in said
        run.finish(run.start())
    assert_trained_once(run, 4)
    wait_for(lambda: not any(map(is_alive, left)))
    assert not weights_folders(config)


def test_a_signal_to_all_processes_saves_the_run(vllm_python: Path, tmp_path: Path) -> None:
    """Slurm sends such a signal before a job's time limit, or when it preempts the job. Servers end
    at SIGTERM."""
    run = make_run(
        tmp_path,
        vllm_python,
        rollout=LONG,
        training={"steps": 5, "precision": "fp32"},
        checkpoint={"interval": 10},
    )
    for moment, number, expected in (
        (run.servers, signal.SIGTERM, "nothing new to save"),  # the server has just begun to start
        (lambda: begun(run, 2), signal.SIGUSR1, "checkpoints/rl_0000000"),
        (lambda: begun(run, 4), signal.SIGTERM, "checkpoints/rl_0000000"),
    ):
        process = run.start()
        run.wait(process, moment)
        told = [*run.servers(), *run.services(), *run.trainers()]
        for each in told:
            each.send_signal(number)
        said = run.finish(process, 75)
        assert expected in said
        # The run does not wait until silent servers count as lost. Slurm would kill it before.
        assert "has not answered" not in said
        wait_for(lambda told=told: not any(map(is_alive, told)))
        assert not weights_folders(load_config(run.folder / "config.yaml"))
    run.finish(run.start())
    assert_trained_once(run, 5)


def test_a_server_that_does_not_start_is_named_in_one_line(
    vllm_python: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, vllm_python)
    said = run.finish(run.start(VLLM_CPU_KVCACHE_SPACE="100000"), 2)  # in GB
    last = said.splitlines()[-1]
    assert last.startswith("server 0: ended with exit code 1") and "memory" in last, said
    assert "Traceback" not in said
    assert not run.servers() and not run.services()


def test_a_run_without_a_server_left_is_saved_and_goes_on_from_there(
    vllm_python: Path, tmp_path: Path
) -> None:
    """The last server dies while it loads the weights of version 2. Both ranks take part in saving
    the run."""
    run = make_run(
        tmp_path,
        vllm_python,
        rollout={**LONG, "vllm": {"restarts": 0}},
        training={"steps": 3, "precision": "fp32"},
        checkpoint={"interval": 10},
    )
    process = run.start("--nproc", "2")
    config = load_config(run.folder / "config.yaml")
    run.wait(
        process, lambda: any((f / "version_00000002").exists() for f in weights_folders(config))
    )
    run.servers()[0].kill()
    lines = run.finish(process, 2).splitlines()
    assert lines[-2].startswith("server 0: weights of version 2: ") or "SIGKILL" in lines[-2]
    assert "rl_00000002: the run is saved, with 2 finished steps" in lines[-1]
    bank = run.out / "rollouts"
    later = [bank / f"{kind}_00000009.groups" for kind in ("evaluation", "step")]
    for path in later:
        path.touch()
    run.finish(run.start())
    assert_trained_once(run, 3)
    # The repeated evaluation may not use stored groups, because it uses the weights that are sent
    # again. Responses of training may be from older weights, so their groups stay.
    assert [path.exists() for path in later] == [False, True]
