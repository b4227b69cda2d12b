"""The number of a machine among the machines of a job, from the variables that each scheduler
sets."""

from __future__ import annotations

import pytest

from gspo_megatron.errors import UserError
from gspo_megatron.process.launcher import rank_environment
from gspo_megatron.process.nodes import Node, node_of_job, wait_for_master, world_size_on
from gspo_megatron.process.ranks import world_size_of_rank

# The variables that each scheduler sets on the second of two pods or nodes with 8 GPUs each.
PYTORCHJOB = {  # training-operator 1.9: RANK is the pod's number, WORLD_SIZE counts processes
    "MASTER_ADDR": "gspo-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "16",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PYTHONUNBUFFERED": "1",
}
TRAINJOB = {  # Kubeflow Trainer 2
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "gspo-node-0-0.gspo",
    "PET_MASTER_PORT": "29500",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
SLURM_TASK = {  # SkyPilot on a Slurm cluster
    "SLURM_JOB_ID": "45123",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        (PYTORCHJOB, Node(1, 2, 8, "gspo-master-0", 23456, "PET_NNODES")),
        (TRAINJOB, Node(1, 2, None, "gspo-node-0-0.gspo", 29500, "PET_NNODES")),
        (SKYPILOT, Node(1, 2, 8, "10.0.0.4", 29500, "SKYPILOT_NODE_IPS")),
        (SKYPILOT | SLURM_TASK, Node(1, 2, 8, "10.0.0.4", 29500, "SKYPILOT_NODE_IPS")),
        (
            SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"},
            Node(1, 2, None, "10.0.0.4", 29500, "SKYPILOT_NODE_IPS"),
        ),
        ({"PET_NNODES": "1"}, Node(0, 1, None, "", 29500, "PET_NNODES")),
        ({}, None),
        ({"PET_NNODES": ""}, None),
    ],
)
def test_the_place_of_a_machine(environ: dict[str, str], node: Node | None) -> None:
    assert node_of_job(environ) == node
    if node is not None:
        # RANK is set, but this process is not a rank
        assert world_size_of_rank(dict(environ)) is None


@pytest.mark.parametrize("environ", [PYTORCHJOB, TRAINJOB, SKYPILOT])
def test_ranks_of_torchrun_and_of_our_launcher_have_no_such_place(environ: dict[str, str]) -> None:
    of_torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    rank = environ | of_torchrun | address
    assert node_of_job(rank) is None
    assert world_size_of_rank(rank) == 16


def test_the_first_pod_of_a_pytorchjob_may_be_told_localhost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gspo-master-0")
    first = PYTORCHJOB | {"PET_NODE_RANK": "0", "RANK": "0", "MASTER_ADDR": "localhost"}
    node = node_of_job(first)
    assert node is not None and node.master == "gspo-master-0"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (TRAINJOB | {"PET_NNODES": "2:4"}, "PET_NNODES = '2:4': a changing number of machines"),
        (TRAINJOB | {"PET_NNODES": "two"}, "PET_NNODES = 'two' in the environment: not an integer"),
        (TRAINJOB | {"PET_NODE_RANK": ""}, "PET_NODE_RANK = '' in the environment: not an integer"),
        (TRAINJOB | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK = 2: must be below the 2 machines"),
        (TRAINJOB | {"PET_MASTER_ADDR": ""}, "PET_NNODES = 2: PET_MASTER_ADDR must be set too"),
        (TRAINJOB | {"PET_MASTER_PORT": "tcp://10.0.0.1:80"}, "PET_MASTER_PORT = 'tcp://"),
        (TRAINJOB | {"PET_MASTER_PORT": "99999"}, "PET_MASTER_PORT = '99999' .*: 1 to 65535"),
        (PYTORCHJOB | {"MASTER_PORT": "0"}, "^MASTER_PORT = '0' .* allowed: 1 to 65535"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "5"}, "SKYPILOT_NODE_RANK = 5: must be below the 2"),
    ],
)
def test_senseless_variables_are_refused(environ: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        node_of_job(environ)


@pytest.mark.parametrize("no_gpus", ["", "-1", "NoDevFiles"])  # the last is Slurm's
def test_ranks_on_each_machine(no_gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", no_gpus)
    given, unsaid = Node(1, 2, 8, "a", 1, "PET_NNODES"), Node(1, 2, None, "a", 1, "PET_NNODES")
    assert world_size_on(given, None, 4) == 16
    assert world_size_on(given, 3, 4) == 6
    assert world_size_on(unsaid, None, 4) == 4
    with pytest.raises(UserError, match="2 machines; the layout takes 3 ranks"):
        world_size_on(unsaid, None, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert world_size_on(unsaid, None, 4) == 6


def test_what_a_rank_on_the_second_machine_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    added = rank_environment({}, 3, 16, 0, Node(1, 2, 8, "first", 29500, "PET_NNODES"))
    threads = added.pop("OMP_NUM_THREADS")
    assert int(threads) >= 1
    assert added == {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "first",
        "MASTER_PORT": "29500",
    }


def test_a_name_that_never_comes_is_told() -> None:
    node = Node(1, 2, 8, "no-such-host.invalid", 29500, "PET_NNODES")
    with pytest.raises(UserError, match="this machine, number 1 of 2, knows no such name after"):
        wait_for_master(node, seconds=0.1)
