"""Corrections for responses that another engine sampled, against loops."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gspo_megatron.config.objectives import CORRECTIONS, TOKEN_CORRECTIONS
from gspo_megatron.objectives.parts import sequence_weights, token_weights
from tests.unit.objectives.batches import EXACT, inputs_of, make_inputs, make_objective, problems
from tests.unit.objectives.papers import correction_weights, expect

# Bounds, and the size of log pi_old - log pi_rollout at which they bind for a part of the weights.
BOUNDS = {
    "token_tis": ({"high": 2.0}, 0.5),
    "icepop": ({"low": 0.5, "high": 5.0}, 1.0),
    "sequence_tis": ({"high": 1.3}, 0.5),
    "sequence_mask": ({"low": 0.99, "high": 1.01}, 0.01),
    "sequence_product_tis": ({"high": 2.0}, 0.3),
    "k3_mask": ({"high": 0.4}, 0.7),  # so large that the order of the two policies matters
}
ON = {
    "token": ["grpo", "dapo", "dr_grpo", "cispo", "sapo"],
    "sequence": ["gspo", "gspo_token", "gmpo", "luspo", "grpo", "dapo", "minirl"],
    "sequence_product_tis": ["grpo", "reinforce_leave_one_out"],
}


def legal() -> list[tuple[str, str]]:
    kinds = dict.fromkeys(CORRECTIONS, "sequence") | dict.fromkeys(TOKEN_CORRECTIONS, "token")
    kinds["sequence_product_tis"] = "sequence_product_tis"
    weighted = {("minirl", "sequence_tis")}  # which weights by the rollout's ratio already
    return [(name, c) for c in BOUNDS for name in ON[kinds[c]] if (name, c) not in weighted]


def test_what_is_tested_is_all_and_legal():
    assert {"none", *BOUNDS} == CORRECTIONS.keys()
    for name, correction in legal():
        assert not problems(name=name, **section(correction)), (name, correction)


def section(correction: str) -> dict[str, float | str]:
    bounds = BOUNDS[correction][0]
    return {"correction": correction} | {f"correction_{side}": at for side, at in bounds.items()}


@pytest.mark.parametrize(("name", "correction"), legal())
def test_loss_gradient_and_metrics_equal_the_loops(name, correction):
    bounds, mismatch = BOUNDS[correction]
    objective = make_objective(name, **section(correction))
    cut = whole = 0
    for seed in range(3):
        inputs = inputs_of(name, seed, mismatch=mismatch)
        weights_of = partial(correction_weights, correction, **bounds)
        expected = expect(name, inputs, correction=weights_of)
        outputs = objective(inputs)
        outputs.loss.backward()
        torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
        torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)

        weights = expected.weights
        flat = [w for each in weights for w in each]
        if correction not in TOKEN_CORRECTIONS:
            flat = [each[0] for each in weights]
        count = len(flat)
        means = {key: pair.tolist() for key, pair in outputs.means.items()}
        assert means["correction/weight"] == pytest.approx([sum(flat), count])
        squares = sum(w * w for w in flat)
        assert means["correction/squared_weight"] == pytest.approx([squares, count])
        assert means["correction/dropped"] == [sum(w == 0 for w in flat), count]
        bounded = sum(w in (0.0, bounds["high"]) for w in flat)
        cut, whole = cut + bounded, whole + count
    assert 0 < cut < whole, "the bounds bind everywhere or nowhere"


def test_bounds_belong_to_what_is_kept():
    logs = torch.tensor([0.5, 1.0, 2.0, 2.5], dtype=torch.float64).log()
    ones = torch.ones(4, dtype=torch.float64)
    assert token_weights("icepop", logs, 2.0, 0.5).tolist() == pytest.approx([0.5, 1, 2, 0])
    assert token_weights("token_tis", logs, 2.0).tolist() == pytest.approx([0.5, 1, 2, 2])
    masked = sequence_weights("sequence_mask", logs, ones, 2.1, 0.6)
    assert masked.tolist() == [0, 1, 1, 0]


def test_k3_mask_bounds_the_divergence_of_the_rollouts_policy_from_the_old_one():
    """Tokens as often as the rollout's policy draws them: k3 is KL(rollout, old) to the digit."""
    rollout = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    old = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    kl = float((rollout * (rollout / old).log()).sum())
    tokens = torch.tensor([0, 0, 1, 2])
    inputs = make_inputs(1, lengths=(4,))
    inputs.mask.fill_(1)
    inputs.sequence_lengths.fill_(4)
    inputs.rollout_logprobs, inputs.old_logprobs = rollout.log()[tokens], old.log()[tokens]
    for bound, kept in ((kl * 1.0001, 1.0), (kl * 0.9999, 0.0)):
        objective = make_objective("gspo", correction="k3_mask", correction_high=bound)
        assert objective(inputs).means["correction/weight"].tolist() == [kept, 1.0]


@pytest.mark.parametrize("correction", BOUNDS)
def test_a_runaway_mismatch_stays_finite_and_weights_are_constants_to_the_gradient(correction):
    inputs = make_inputs(1, spread=0.4, dtype=torch.float32)
    inputs.rollout_logprobs[0] = -5000.0
    inputs.rollout_logprobs.requires_grad_()
    outputs = make_objective("grpo", **section(correction))(inputs)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss) and torch.isfinite(inputs.logprobs.grad).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    assert inputs.rollout_logprobs.grad is None or (inputs.rollout_logprobs.grad == 0).all()


def test_a_correction_without_the_rollouts_log_probs_is_refused():
    inputs = make_inputs(1)
    inputs.rollout_logprobs = None
    with pytest.raises(AssertionError, match="rollout's log-probs"):
        make_objective("gspo", correction="sequence_tis")(inputs)
