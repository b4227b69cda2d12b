"""Reads from the environment which rank of a run this process is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from gspo_megatron.errors import UserError
from gspo_megatron.process.keeper import end_with_parent
from gspo_megatron.process.nodes import Node, node_of_job, number_in, port_in, world_size_on

if TYPE_CHECKING:
    from gspo_megatron.config.stages import AnyConfig

# Set by our launcher for the ranks that it starts.
LAUNCHER_PID = "GSPO_PARENT_PID"
FAILURE_DESCRIPTOR = "GSPO_FAILURE_FD"

# torchrun sets this variable for its ranks: torch's store is held by torchrun. A vLLM server with
# this variable would wait for such a store for ever, instead of making its own.
_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"

# If a layout needs more ranks than this, and more than the machine has cores, the ranks are started
# on one machine only if --nproc is given. Without --nproc, the user may have started a cluster's
# layout on a login node by mistake.
RANKS_WITHOUT_ASKING = 16

_failure_descriptor: int | None = None
_own_variables: set[str] = set()


def join_launcher() -> None:
    """Take over the file to which this rank writes its failure, and let the kernel end the rank
    when the launcher is killed. Call it early in a rank that our launcher started; in other
    processes it does nothing. Raises SystemExit if the launcher has ended already."""
    global _failure_descriptor
    # The variable is removed from the environment, because processes that this rank starts are no
    # ranks.
    launcher = os.environ.pop(LAUNCHER_PID, None)
    descriptor = os.environ.pop(FAILURE_DESCRIPTOR, None)
    if descriptor is not None:
        _failure_descriptor = int(descriptor)
        os.set_inheritable(_failure_descriptor, False)
    if launcher is None:
        return
    if sys.platform == "linux":
        end_with_parent()
    if os.getppid() != int(launcher):  # the launcher died before the call above
        raise SystemExit("the launcher of this rank has ended")


def set_for_this_process(name: str, value: str) -> None:
    """Set an environment variable, unless it is set already. It does not reach the processes that
    get `environment_of_children`."""
    if name not in os.environ:
        os.environ[name] = value
        _own_variables.add(name)


def environment_of_children() -> dict[str, str]:
    """Return the environment without the variables that are for this process alone."""
    left_out = {*_own_variables, _OF_TORCHRUN}
    return {name: text for name, text in os.environ.items() if name not in left_out}


def failure_descriptor() -> int | None:
    """Return the descriptor to which this rank writes its failure for the launcher. Later calls
    return None. In a process that our launcher did not start, all calls return None."""
    global _failure_descriptor
    descriptor, _failure_descriptor = _failure_descriptor, None
    return descriptor


def world_size_of_rank(environ: MutableMapping[str, str]) -> int | None:
    """Return the number of ranks if torchrun or srun made this process one of them, else None.

    In a task of srun, this adds torchrun's variables to `environ`. If MASTER_ADDR is not set, it
    becomes the first node of the Slurm step. If MASTER_PORT is not set, it is computed from the
    job's number. A process that a scheduler has started once on each machine is not a rank; it
    starts the ranks (process/nodes.py). Raises UserError if variables are missing or contradict
    each other, or if the node list is unreadable.
    """
    if node_of_job(environ) is not None:
        return None
    if "RANK" not in environ and _is_slurm_task(environ):
        environ["RANK"] = environ["SLURM_PROCID"]
        environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
        if "SLURM_LOCALID" in environ:
            environ.setdefault("LOCAL_RANK", environ["SLURM_LOCALID"])
        if not environ.get("MASTER_ADDR"):
            nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
            environ["MASTER_ADDR"] = first_host(nodes)
        if not environ.get("MASTER_PORT"):
            # All ranks of a job must compute the same port, but two jobs on a node need different
            # ports. Linux gives the ports from 32768 on to programs that ask for any port.
            environ["MASTER_PORT"] = str(20000 + number_in(environ, "SLURM_JOB_ID") % 12000)
    names = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not names:
        return None
    if len(names) == 1:
        raise UserError(
            f"{names[0]} = {environ[names[0]]}: only one of RANK and WORLD_SIZE is set in the "
            "environment; set both, as torchrun does, or neither"
        )
    rank, world_size = number_in(environ, "RANK"), number_in(environ, "WORLD_SIZE")
    if rank >= world_size:
        raise UserError(f"RANK = {rank}: must be below WORLD_SIZE = {world_size}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and world_size > 1:
        raise UserError(
            f"WORLD_SIZE = {world_size}: {' and '.join(missing)} must be set too, so that the "
            "ranks find each other"
        )
    if world_size > 1:
        port_in(environ)
    return world_size


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several. A batch script, which runs only once,
    also has SLURM_PROCID and SLURM_NTASKS; but only processes of srun have a step number. The shell
    of salloc may be a step of its own, with a single task and the job's SLURM_NTASKS."""
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return all(name in environ for name in needed) and number_in(environ, tasks) > 1


def ranks_on_node(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this node: torchrun's LOCAL_WORLD_SIZE, else the entry for this
    node in Slurm's list of tasks, such as "4(x2),1". None if the environment has neither."""
    if "LOCAL_WORLD_SIZE" in environ:
        return int(environ["LOCAL_WORLD_SIZE"])
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def first_host(nodes: str) -> str:
    """Return the first name in a Slurm node list, such as node07 for node[07-08,12],login1.

    Raises UserError if the list has no name.
    """
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]  # split at commas outside of brackets
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)  # the first number in brackets
    if not host or "[" in host or "]" in host:
        raise UserError(
            f"MASTER_ADDR is not set, and the first node in Slurm's list {nodes!r} is not clear; "
            "set MASTER_ADDR to the first node of the job"
        )
    return host


def decide_world_size(
    config: AnyConfig, nproc: int | None, env_size: int | None, node: Node | None = None
) -> int:
    """Return the number of ranks of the run. `env_size`: the number of ranks in the environment, if
    this process is already a rank. `node`: the place of this machine, if `nproc` ranks start on
    each of several machines.

    Raises UserError if `nproc` contradicts `env_size`, or if one machine would start many ranks and
    `nproc` is None.
    """
    if env_size is not None:
        if nproc not in (None, env_size):
            raise UserError(
                f"--nproc {nproc}: this process is already one of {env_size} ranks (WORLD_SIZE in "
                "the environment); do not give --nproc under torchrun or srun"
            )
        return env_size
    if node is not None:
        return world_size_on(node, nproc, config.world_size_hint())
    if nproc is not None:
        return nproc
    world_size = config.world_size_hint()
    if world_size > max(RANKS_WITHOUT_ASKING, os.cpu_count() or 1):
        raise UserError(
            f"layout {config.layout()}: takes {world_size} ranks, which are many for one machine; "
            f"start them with srun or torchrun, or give --nproc {world_size} to start all of them "
            "here"
        )
    return world_size
