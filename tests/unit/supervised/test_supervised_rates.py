"""The learning rate of a supervised stage in each update, compared with the formula of the
curve."""

from __future__ import annotations

import math

import pytest

from gspo_megatron.config import check_config, parse_config
from gspo_megatron.config.stages import PretrainingConfig
from gspo_megatron.models.optimizer import Schedule, build_trainer, zero_gradients
from tests.unit.models.one_rank import tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS, WARM_UP, LAST, PEAK, FLOOR = 12, 3, 4, 2e-3, 1e-4
CURVES = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


def rates(**optimizer: object) -> list[float]:
    """The learning rates of all updates of a run, from Megatron-Core's scheduler."""
    optimizer |= {"learning_rate": PEAK, "min_learning_rate": FLOOR, "warmup_steps": WARM_UP}
    data = {"tokenizer": "t", "train": ["a"]}
    config = parse_config(
        {"data": data, "training": {"steps": STEPS}, "optimizer": optimizer},
        schema=PretrainingConfig,
    )
    check_config(config, 1)
    policy = tiny_policy()
    trainer = build_trainer(policy, config.optimizer, Schedule.of(config.optimizer, STEPS))
    found = []
    for _ in range(STEPS):
        zero_gradients(policy.chunks, trainer.optimizer)
        found.append(trainer.update()[1])
    return found


def expected(number: int, first: int, curve: str) -> float:
    """The learning rate of the update `number`. Numbers begin with 0. The decay begins after the
    update `first`."""
    if number < WARM_UP:
        return PEAK * (number + 1) / WARM_UP  # the rate of the first update is above 0
    done = max(0.0, (number - first) / (STEPS - first))
    return FLOOR + (PEAK - FLOOR) * CURVES[curve](done)


@pytest.mark.parametrize("curve", CURVES)
def test_wsd_is_constant_until_its_last_steps(curve: str) -> None:
    found = rates(decay="wsd", wsd_steps=LAST, wsd_decay=curve)
    assert found == pytest.approx([expected(n, STEPS - LAST, curve) for n in range(STEPS)])
    assert found[WARM_UP - 1 : STEPS - LAST + 1] == [PEAK] * (STEPS - LAST + 2 - WARM_UP)


@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_other_decays_take_all_that_follows_the_warm_up(curve: str) -> None:
    assert rates(decay=curve) == pytest.approx([expected(n, WARM_UP, curve) for n in range(STEPS)])
