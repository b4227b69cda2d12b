"""How many ranks run on a node, as torchrun and Slurm say it."""

from __future__ import annotations

import pytest

from gspo_megatron.platform.devices import ranks_on_node


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
