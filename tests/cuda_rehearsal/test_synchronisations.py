"""The number of times that the host waits for the device. After each wait the queue of a GPU's
kernels is empty, so the GPU is idle for 10 to 50 microseconds, and longer if the kernels are small.
The budget allows only the waits that are needed."""

from __future__ import annotations

import pytest

from tests.cuda_rehearsal.conftest import MakeConfig
from tests.cuda_rehearsal.host import Host
from tests.cuda_rehearsal.tasks import Figures, measure

# The allowed numbers of waits: for each sampled token, sequence, micro-batch of a pass, or step.
# The first number of a pair counts the waits in the package's own lines. The second number also
# counts the waits in Megatron-Core, for four layers. Without Transformer Engine each layer waits
# seven times.
BUDGET = {
    # A token itself causes 0.31 waits. The other waits are those of the call, divided by its 16
    # tokens.
    "generation": (0.95, 0.95),
    "packing": (0.0, 0.0),
    "scoring": (0.6, 16.0),
    "training": (3.0, 36.0),
    "metrics": (11.0, 11.0),
}
# The allowed numbers of float64 elements. Such elements are the probabilities from which tokens are
# sampled (64 rows of 48 tokens), sums of losses and metrics, and sketches of the ratios.
MOST_DOUBLES = {
    "generation": 3500,
    "packing": 30,
    "scoring": 0,
    "training": 2200,
    "metrics": 1600,
}
RUN = {
    # Runs on GPUs use bf16. In fp32, the grouped product would need the counts of tokens on the
    # host.
    "training__precision": "bf16",
    "training__micro_batch_tokens": 64,
    "rollout__max_response_tokens": 16,
    "rollout__prompts_per_step": 16,
}


@pytest.fixture(scope="module")
def figures(host: Host, make_config: MakeConfig) -> dict[str, Figures]:
    found = host.on(make_config(**RUN), measure)
    assert found.keys() == BUDGET.keys()
    return found


@pytest.mark.parametrize("part", BUDGET)
def test_waits_are_within_the_budget(figures: dict[str, Figures], part: str) -> None:
    ours, everything = BUDGET[part]
    print(part, figures[part])
    assert figures[part].ours() <= ours
    assert figures[part].all() <= everything


@pytest.mark.parametrize("part", BUDGET)
def test_float64_is_of_sums_alone(figures: dict[str, Figures], part: str) -> None:
    print(part, figures[part].doubles / figures[part].size)
    assert figures[part].doubles <= MOST_DOUBLES[part] * figures[part].size
