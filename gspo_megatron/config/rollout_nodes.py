"""The nodes of a job that only serve rollouts. The job's batch script names them in the
environment."""

from __future__ import annotations

import os

from gspo_megatron.addresses import ROLLOUT_NODES as VARIABLE


def rollout_nodes() -> list[str]:
    """Return the names of the nodes that only serve rollouts. If the list is empty, servers run on
    the node of rank 0."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]
