"""The place of this machine in a job of several machines without Slurm: a pod of Kubernetes or a
node of SkyPilot. There, the launcher on each machine starts the ranks of this machine, and these
ranks join the ranks of the other machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_megatron.addresses import addresses_of
from gspo_megatron.errors import UserError

_PORT = 29500  # torchrun's default
# torchrun and our launcher set this variable for ranks. Schedulers that start one process on each
# machine do not set it.
_RANK_VARIABLE = "LOCAL_RANK"
# Limit of the wait for the name of a pod that has not started yet. Without a gang scheduler, pods
# start minutes apart.
NAME_SECONDS = 900.0
_QUIET_SECONDS = 10.0  # a longer wait is printed


@dataclass(frozen=True)
class Node:
    """The place of a machine among the machines of a job."""

    number: int  # counts from 0
    count: int
    ranks: int | None  # ranks on each machine; None: the scheduler does not say
    master: str  # a name or address of machine 0
    port: int
    count_variable: str  # the variable that gave `count`, for messages

    def first_rank(self, world_size: int) -> int:
        """Return the number of the first rank of this machine."""
        return self.number * (world_size // self.count)


def node_of_job(environ: Mapping[str, str]) -> Node | None:
    """Return the place of this machine, if a scheduler started this process once on each machine.

    This function reads the variables of torchrun's options (PET_NNODES and others), which
    Kubeflow's PyTorchJob and TrainJob and deploy/kubernetes/jobset.yaml set, or the variables of
    SkyPilot. In a rank this function returns None, because the rank's launcher has read the
    variables already. Raises UserError if variables are missing or have wrong values.
    """
    if _RANK_VARIABLE in environ:
        return None
    if environ.get("SKYPILOT_NODE_IPS", "").split():
        node, variable = _node_of_skypilot(environ), "SKYPILOT_NODE_RANK"
    elif environ.get("PET_NNODES"):
        node, variable = _node_of_torchrun(environ), "PET_NODE_RANK"
    else:
        return None
    if node.number >= node.count:
        raise UserError(
            f"{variable} = {node.number}: must be below the {node.count} machines of "
            f"{node.count_variable}"
        )
    return node


def _node_of_skypilot(environ: Mapping[str, str]) -> Node:
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    gpus = number_in(environ, "SKYPILOT_NUM_GPUS_PER_NODE", default=0)
    port = port_in(environ, default=_PORT)
    number = number_in(environ, "SKYPILOT_NODE_RANK")
    return Node(number, len(addresses), gpus or None, addresses[0], port, "SKYPILOT_NODE_IPS")


def _node_of_torchrun(environ: Mapping[str, str]) -> Node:
    # In a PyTorchJob, RANK is the number of the pod, so it is not read here.
    if ":" in environ["PET_NNODES"]:
        raise UserError(
            f"PET_NNODES = {environ['PET_NNODES']!r}: a changing number of machines; allowed: one "
            "number, or torchrun with pretrain_scripts/"
        )
    count = number_in(environ, "PET_NNODES")
    number = number_in(environ, "PET_NODE_RANK", default=0 if count == 1 else None)
    text = environ.get("PET_NPROC_PER_NODE") or environ.get("PET_N_PROC_PER_NODE", "")
    ranks = int(text) if text.isascii() and text.isdigit() else None  # other values: auto, gpu, cpu
    master = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")
    port_name = "PET_MASTER_PORT" if environ.get("PET_MASTER_PORT") else "MASTER_PORT"
    if not master and count > 1:
        raise UserError(
            f"PET_NNODES = {count}: PET_MASTER_ADDR must be set too, to a name or address of "
            "machine 0, so that the ranks find each other"
        )
    if number == 0 and count > 1 and master in ("localhost", "127.0.0.1"):
        master = socket.gethostname()  # some releases of PyTorchJob set localhost here
    port = port_in(environ, port_name, default=_PORT)
    return Node(number, count, ranks or None, master, port, "PET_NNODES")


def world_size_on(node: Node, nproc: int | None, layout: int) -> int:
    """Return the number of ranks on all machines. nproc: the number that the user wants on each
    machine; layout: the number of ranks that the layout needs at least.

    Without `nproc`, the number comes from the scheduler, else from the GPUs of this machine, else
    from the layout. Raises UserError if the machines cannot share the layout's ranks equally.
    """
    per_node = nproc or node.ranks or _gpus_here()
    if per_node is None:
        per_node, rest = divmod(layout, node.count)
        if rest:
            raise UserError(
                f"{node.count_variable}: {node.count} machines; the layout takes {layout} ranks, "
                f"which {node.count} machines cannot share; give --nproc, the ranks on each"
            )
    return per_node * node.count


def wait_for_master(node: Node, seconds: float = NAME_SECONDS) -> None:
    """Wait until the name of machine 0 has an address: the DNS of Kubernetes knows a pod only some
    time after its start. Raises UserError if that takes longer than `seconds`."""
    begin, is_printed = time.monotonic(), False
    while not addresses_of(node.master):
        wait = time.monotonic() - begin
        if wait > seconds:
            raise UserError(
                f"{node.master}: this machine, number {node.number} of {node.count}, knows no such "
                f"name after {wait:.0f} s; does machine 0 run, and does a headless service name "
                "its pods?"
            )
        if wait > _QUIET_SECONDS and not is_printed:
            is_printed = True
            print(f"waiting for the name {node.master}", file=sys.stderr, flush=True)
        time.sleep(0.5)


def _gpus_here() -> int | None:
    """Return the number of GPUs that this process may use; None if there are none."""
    visible = visible_gpus()
    if visible is not None:
        return len(visible) or None
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) or None


def visible_gpus() -> list[str] | None:
    """Return the names of the GPUs in CUDA_VISIBLE_DEVICES; None if the variable is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [each.strip() for each in text.split(",") if each.strip()]
    return [] if names[:1] in (["-1"], ["NoDevFiles"]) else names  # Slurm writes the latter


def number_in(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number from the environment. Raises UserError."""
    text = environ.get(name)
    if not text and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set in the environment, and is needed")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name} = {text!r} in the environment: not an integer from 0")
    return int(text)


def port_in(
    environ: Mapping[str, str], name: str = "MASTER_PORT", default: int | None = None
) -> int:
    """Return a port from the environment. Raises UserError."""
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise UserError(f"{name} = {text!r} in the environment: allowed: 1 to 65535")
    return int(text)
