"""Learning rates of RL: the configuration counts steps, the schedule counts optimizer updates."""

from __future__ import annotations

import pytest

from gspo_megatron.models.optimizer import build_trainer
from gspo_megatron.rl.loop import learning_rates
from tests.unit.models.one_rank import tiny_config
from tests.unit.routing.steps import moe_policy, update, updater_for

pytestmark = pytest.mark.usefixtures("one_rank")

PEAK, STEPS, MINI_BATCHES, WARMUP = 1e-3, 5, 3, 2


def rate_of(number: int) -> float:
    """Of optimizer update `number`, from 0: up over WARMUP steps, then linearly down to 0."""
    warmup, total = WARMUP * MINI_BATCHES, STEPS * MINI_BATCHES
    if number < warmup:
        return PEAK * (number + 1) / warmup
    return PEAK * (total - number) / (total - warmup)


def test_the_rate_of_a_step_is_that_of_its_last_update() -> None:
    config = tiny_config(
        objective={"mini_batches": MINI_BATCHES},
        optimizer={"learning_rate": PEAK, "warmup_steps": WARMUP, "decay": "linear"},
        training={"steps": STEPS},
    )
    policy = moe_policy()
    updater = updater_for(policy, {})
    updater.trainer = build_trainer(policy, config.optimizer, learning_rates(config))
    rates = [update(updater)["lr"] for _ in range(STEPS)]
    last = [rate_of(step * MINI_BATCHES + MINI_BATCHES - 1) for step in range(STEPS)]
    assert rates == pytest.approx(last, rel=1e-6)
