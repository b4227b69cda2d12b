"""The number of this process among the ranks, and the environment and port that the launcher
sets."""

from __future__ import annotations

import os
import socket

import pytest

from gspo_megatron.errors import UserError
from gspo_megatron.process.launcher import rank_environment, store_socket
from gspo_megatron.process.ranks import (
    environment_of_children,
    first_host,
    ranks_on_node,
    world_size_of_rank,
)

# The variables that srun sets for the third task of `--nodes=2 --ntasks-per-node=2` (Slurm 22.05).
SLURM_TASK = {
    "SLURM_JOB_ID": "45123",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[06-08]",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({}, None),
        ({"MASTER_PORT": "1234", "LOCAL_RANK": "0"}, None),
        (TORCHRUN, 2),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1),
        (SLURM_TASK | TORCHRUN, 2),  # torchrun inside a task of srun
        (SLURM_TASK | {"SLURM_NTASKS": "1"}, None),
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # the shell of salloc
        # A batch script runs once, however many tasks the job has.
        ({name: text for name, text in SLURM_TASK.items() if "STEP" not in name}, None),
    ],
)
def test_which_process_is_a_rank(environ: dict[str, str], world_size: int | None) -> None:
    after = dict(environ)
    assert world_size_of_rank(after) == world_size
    assert after == environ


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": None}, "WORLD_SIZE = 2: only one of RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": None}, "RANK = 1: only one of RANK and WORLD_SIZE"),
        ({"RANK": "2"}, "RANK = 2: must be below WORLD_SIZE = 2"),
        ({"RANK": "first"}, "RANK = 'first' in the environment: not an integer"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE = '-2' in the environment: not an integer"),
        ({"MASTER_ADDR": "", "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT must be set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http' in the environment: allowed: 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = '65536' in the environment: allowed: 1 to"),
    ],
)
def test_an_incomplete_or_senseless_environment_is_refused(
    changes: dict[str, str | None], told: str
) -> None:
    environ = {name: text for name, text in {**TORCHRUN, **changes}.items() if text is not None}
    with pytest.raises(UserError, match=told):
        world_size_of_rank(environ)


def test_a_task_of_srun_gets_the_variables_of_torchrun() -> None:
    environ = dict(SLURM_TASK)
    assert world_size_of_rank(environ) == 4
    added = {name: text for name, text in environ.items() if name not in SLURM_TASK}
    assert added == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "29123",  # 20000 + 45123 % 12000
    }


def test_children_of_torchruns_ranks_make_their_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this variable torch.distributed, in a vLLM server too, only connects to a store."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "True")
    kept = environment_of_children()
    assert [name for name in kept if name.startswith("TORCHELASTIC")] == ["TORCHELASTIC_RUN_ID"]


def test_an_address_that_is_set_stays() -> None:
    own = {"MASTER_ADDR": "node06", "MASTER_PORT": "777", "SLURM_STEP_NODELIST": "?["}
    environ = {**SLURM_TASK, **own}
    assert world_size_of_rank(environ) == 4
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node06", "777")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a,b[1-2]", "a"),
        ("node[07-08,12],login1", "node07"),
        ("gpu[3,5-9]", "gpu3"),
        ("gpu-a[099]", "gpu-a099"),
        ("r[1-2]n[03,05-06]-ib0,s1", "r1n03-ib0"),
        ("127.0.0.[11-12]", "127.0.0.11"),
    ],
)
def test_the_ranks_meet_on_the_first_node_of_the_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "a[1-", "[]", "a]"])
def test_a_list_that_cannot_be_read_is_refused(nodes: str) -> None:
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        world_size_of_rank(
            {**SLURM_TASK, "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": nodes}
        )


def test_the_chosen_port_is_free_for_rank_0_and_kept_from_others() -> None:
    with store_socket({}) as listener, store_socket({}) as another:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and port != another.getsockname()[1]
        for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                for option in options:
                    other.setsockopt(socket.SOL_SOCKET, option, 1)
                other.bind(("", port))
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # a rank that starts before rank 0 waits until rank 0 listens


def test_a_port_that_is_given_and_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        given = {"MASTER_PORT": str(port)}
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}.*in use"), store_socket(given):
            pass


@pytest.mark.parametrize("text", ["0", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="allowed: 1 to 65535"), store_socket({"MASTER_PORT": text}):
        pass


def test_ranks_of_a_machine_share_its_cores_and_meet_on_the_loopback() -> None:
    assert rank_environment({}, 1, 2, 4321) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert rank_environment({}, 0, 10_000, 1)["OMP_NUM_THREADS"] == "1"
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth1"}
    assert not given.keys() & rank_environment(given, 0, 2, 1).keys()


@pytest.mark.parametrize(
    ("torchrun", "tasks", "node", "expected"),
    [
        ("2", "6", "0", 2),  # torchrun inside a task of srun
        (None, "6", "0", 6),
        (None, "4(x2),1", "1", 4),
        (None, "4(x2),1", "2", 1),
        (None, "4(x2),1", "3", None),
        (None, "4(x", "0", None),
        (None, None, None, None),
    ],
)
def test_ranks_of_a_node(
    torchrun: str | None, tasks: str | None, node: str | None, expected: int | None
) -> None:
    given = {
        "LOCAL_WORLD_SIZE": torchrun,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": node,
    }
    environ = {name: value for name, value in given.items() if value is not None}
    assert ranks_on_node(environ) == expected
