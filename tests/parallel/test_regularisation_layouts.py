"""With corrections, a divergence from a reference, or an entropy bonus, the update is the same on
every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo_megatron.verify.results import StepResult, compare
from tests.parallel.models import NO_ROUTER_LOSSES, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP64_TOLERANCE,
    assert_same_update,
    update,
    update_away_from_the_reference,
)

SECTIONS: dict[str, dict[str, Any]] = {
    "kl in the loss": {"name": "gspo", "kl": "k3", "kl_coefficient": 0.3},
    "kl in the reward": {"name": "grpo", "kl": "k1", "kl_coefficient": 0.3, "kl_in": "reward"},
    "offloaded reference": {
        "name": "dapo",
        "kl": "k2",
        "kl_coefficient": 0.3,
        "reference_offload": True,
    },
    "entropy bonus": {"name": "gspo", "entropy_coefficient": 0.2},
    "sequence correction": {
        "name": "gspo",
        "correction": "sequence_tis",
        "correction_high": 0.9995,
    },
    "token correction": {"name": "dr_grpo", "correction": "icepop"},
    "mask by divergence": {
        "name": "gspo_token",
        "correction": "k3_mask",
        "correction_high": 1.8e-4,
    },
    "two corrections": {
        "name": "dapo",
        "correction": ["worst_token_mask", "token_tis"],
        "correction_low": {"worst_token_mask": 0.995},
        "correction_high": {"worst_token_mask": 1.005, "token_tis": 1.001},
    },
    "unbiased kl": {"name": "gspo", "kl": "k3_unbiased", "kl_coefficient": 0.3},
    "off-policy mask": {"name": "gspo", "off_policy_mask": 1e-4},
}


# A correction sees no more of the model than log-probs, so its layout cuts the sequences and the
# batch. The other layouts also cut the vocabulary and the layers.
FEW = {
    name: ("dp=2,cp=2",)
    if {"correction", "off_policy_mask"} & section.keys()
    else ("tp=2,cp=2", "pp=2,vpp=2,ep=2")
    for name, section in SECTIONS.items()
}
ALL = ("dp=2", "tp=2,cp=2", "pp=2,vpp=2,ep=2")


@pytest.fixture(scope="module")
def updates_without(pool: Pool) -> Callable[[dict[str, Any]], StepResult]:
    """The update on one rank with a section that several tests compare with."""
    kept: dict[str, StepResult] = {}

    def run_once(section: dict[str, Any]) -> StepResult:
        key = str(section)
        if key not in kept:
            kept[key] = run(pool, "tp=1", section)
        return kept[key]

    return run_once


def run(pool: Pool, layout: str, section: dict[str, Any]) -> StepResult:
    config = odd_moe(layout, section, training={"precision": "fp64"}, **NO_ROUTER_LOSSES)
    return update(pool, config, update_away_from_the_reference)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [*FEW.items(), *(pytest.param(name, ALL, marks=pytest.mark.full) for name in SECTIONS)],
)
def test_update_is_that_of_one_rank_and_differs_from_the_plain_one(
    pool: Pool,
    updates_without: Callable[[dict[str, Any]], StepResult],
    name: str,
    layouts: tuple[str, ...],
) -> None:
    section = SECTIONS[name]
    alone = run(pool, "tp=1", section)
    plain = {"name": section["name"]}
    if "correction" in section:  # only with a correction does the trainer compute the old log-probs
        plain |= {"correction": "sequence_mask", "correction_low": 1e-9, "correction_high": 1e9}
    distances = compare(updates_without(plain).gradients, alone.gradients)
    # If the option had no effect, the difference in float64 would be 1e-15.
    assert distances[0][1] > 1e-5, "the option does nothing"
    for layout in layouts:
        assert_same_update(run(pool, layout, section), alone, FP64_TOLERANCE)
