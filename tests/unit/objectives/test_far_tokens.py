"""The loss of a batch in which the two policies' log-probs of one token differ by 200.

The loss is compared with the loops of papers.py in float64, in which exp(200) is finite. In
float32, exp(200) is infinite.
"""

from __future__ import annotations

import math

import pytest
import torch

from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import EXACT, inputs_of, make_objective, poisoned
from tests.unit.objectives.papers import expect
from tests.unit.objectives.test_oracle import BOUNDS

FAR = 200.0
# Rules that drop a token with a very large or small ratio, or give it a weight near 0.
NEW = ["dppo_tv", "dppo_kl", "ipo", "vespo"]


def far_inputs(name: str, delta: float, dtype: torch.dtype = torch.float64) -> LossInputs:
    """A batch whose first token has moved by `delta`, against the direction of its advantage.
    Values are -inf where the mask is 0."""
    inputs = inputs_of(name, 0, dtype=dtype)
    inputs.mask[0] = 1
    inputs.sequence_lengths[0] = inputs.mask[inputs.sequence_index == 0].sum()
    inputs.advantages[0] = math.copysign(0.7, delta)
    with torch.no_grad():
        inputs.old_logprobs[0] = -0.5 - max(delta, 0.0)
        inputs.logprobs[0] = -0.5 + min(delta, 0.0)
    return poisoned(inputs, -math.inf)


def assert_follows(name: str, inputs: LossInputs, **keys: object) -> None:
    outputs, expected = make_objective(name, **keys)(inputs), expect(name, inputs, **keys)
    outputs.loss.backward()
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)


@pytest.mark.parametrize("delta", [FAR, -FAR])
@pytest.mark.parametrize("name", NEW)
def test_an_objective_of_a_token_that_has_moved_far(name: str, delta: float) -> None:
    assert_follows(name, far_inputs(name, delta))
    single = far_inputs(name, delta, torch.float32)
    outputs = make_objective(name)(single)
    outputs.loss.backward()
    assert single.logprobs.grad is not None
    assert outputs.loss.isfinite() and single.logprobs.grad.isfinite().all()
    assert all(pair.isfinite().all() for pair in outputs.means.values())


@pytest.mark.parametrize("delta", [FAR, -FAR])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_correction_of_a_token_that_the_engine_saw_elsewhere(name: str, delta: float) -> None:
    keys = {"correction": name, **BOUNDS[name][0]}
    for dtype in (torch.float64, torch.float32):
        inputs = inputs_of("grpo", 0, dtype=dtype)
        inputs.mask[0] = 1
        inputs.sequence_lengths[0] = inputs.mask[inputs.sequence_index == 0].sum()
        assert inputs.rollout_logprobs is not None
        with torch.no_grad():
            inputs.old_logprobs[0] = -0.5 + min(delta, 0.0)
            inputs.logprobs[0] = inputs.old_logprobs[0] + 0.05
            inputs.rollout_logprobs[0] = -0.5 - max(delta, 0.0)
        inputs = poisoned(inputs, -math.inf)
        if dtype == torch.float64:
            assert_follows("grpo", inputs, **keys)
            continue
        outputs = make_objective("grpo", **keys)(inputs)
        outputs.loss.backward()
        assert inputs.logprobs.grad is not None
        assert outputs.loss.isfinite() and inputs.logprobs.grad.isfinite().all()
        assert all(pair.isfinite().all() for pair in outputs.means.values())
