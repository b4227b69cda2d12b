"""What is added to a recipe, against loops: dual clip, divergence, entropy, off-policy mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gspo_megatron.objectives.parts import divergence, dual_clip, kept_by_off_policy_mask
from tests.unit.objectives.batches import (
    EXACT,
    as_mini_batch,
    assert_is,
    inputs_of,
    make_inputs,
    make_objective,
)
from tests.unit.objectives.papers import NUMBERS, SPREADS, expect

# One objective for each aggregation, and for each kind of ratio.
AGGREGATIONS = ["gspo", "gspo_token", "gmpo", "grpo", "dapo", "dr_grpo", "luspo", "minirl"]


def completed(objective, outputs) -> dict[str, float]:
    return objective.complete(
        {key: float(pair[0] / pair[1]) for key, pair in outputs.means.items() if pair[1]}
    )


@pytest.mark.parametrize(
    ("name", "bound"), [("gspo", 1.001), ("gspo_token", 1.001), ("grpo", 1.5), ("dapo", 1.5)]
)
def test_dual_clip_equals_the_loops(name, bound):
    numbers = NUMBERS[name] | {"dual_clip": bound}
    objective = make_objective(name, rule="dual_clip", **numbers)
    differs = 0
    for seed in range(5):
        inputs = inputs_of(name, seed)
        expected = expect(name, inputs, numbers=numbers)
        outputs = objective(inputs)
        assert_is(outputs, inputs, expected)
        differs += not torch.equal(expected.gradient, expect(name, inputs).gradient)
        high = sum(side == "high" for side in itertools.chain(*expected.binding))
        assert outputs.means["clip/token/high"][0] == high
        assert outputs.means["clip/token/outside"][0] == sum(itertools.chain(*expected.outside))
    assert differs >= 2, "the bound hardly ever binds"


def test_dual_clip_binds_for_negative_advantages_above_the_bound_alone():
    ratio = torch.tensor([5.0, 5.0, 5.0, 2.0, 0.5, 1.1], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, 0.0, -1.0, -1.0, -1.0])
    clipped = dual_clip(None, ratio, advantages, 0.2, 0.3, dual_clip=3.0)
    clipped.surrogate.sum().backward()
    torch.testing.assert_close(
        clipped.surrogate.detach(), torch.tensor([-3.0, 1.3, 0.0, -2.0, -0.8, -1.1])
    )
    assert ratio.grad.tolist() == [0, 0, 0, -1, 0, -1]
    assert clipped.high.tolist() == [True, True, False, False, False, False]
    assert clipped.low.tolist() == [False] * 4 + [True, False]
    assert clipped.outside.tolist() == [True] * 5 + [False]


def test_a_dual_clip_inside_the_range_counts_as_outside_where_it_binds():
    clipped = dual_clip(None, torch.tensor([1.2]), torch.tensor([-1.0]), 0.2, 0.3, dual_clip=1.1)
    assert clipped.surrogate.tolist() == pytest.approx([-1.1])
    assert clipped.high.item() and clipped.outside.item()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_divergence_in_the_loss_equals_the_loops(name, kind):
    objective = make_objective(name, kl=kind, kl_coefficient=0.7)
    assert objective.needs_reference
    for seed in range(3):
        inputs = as_mini_batch(inputs_of(name, seed, with_reference=True))
        expected = expect(name, inputs, kl=(kind, 0.7))
        outputs = objective(inputs)
        assert_is(outputs, inputs, expected)
        assert float((expected.loss - expect(name, inputs).loss).abs()) > 1e-6
        # the reported loss is the whole of it
        assert completed(objective, outputs)["loss"] == pytest.approx(float(expected.loss))


def test_divergence_in_the_reward_leaves_the_loss_alone():
    objective = make_objective("grpo", kl="k3", kl_coefficient=0.7, kl_in="reward")
    inputs = make_inputs(0, spread=0.4, with_reference=True)
    outputs = objective(inputs)
    assert_is(outputs, inputs, expect("grpo", inputs))
    assert objective.needs_reference
    assert "kl/penalty" not in outputs.means
    assert "kl/reference_k3" in outputs.means


def test_estimators_at_a_worked_example():
    new, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    for kind, value in expected.items():
        assert divergence(kind, new, reference).item() == pytest.approx(value, rel=1e-6), kind


def test_estimators_are_means_of_the_divergence():
    """Over all tokens of a vocabulary, weighted by pi: k1 and k3 are exact, k2's gradient is."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    new = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4, 1.0], dtype=torch.float64), 0)
    exact = (new.exp() * (new - reference)).sum()
    weights = new.exp().detach()
    for kind in ("k1", "k3"):
        estimate = (weights * divergence(kind, new, reference)).sum()
        torch.testing.assert_close(estimate, exact, **EXACT)
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    gradients = {
        kind: torch.autograd.grad(
            (weights * divergence(kind, new, reference)).sum(), logits, retain_graph=True
        )[0]
        for kind in ("k1", "k2")
    }
    torch.testing.assert_close(gradients["k2"], wanted, **EXACT)
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(wanted), **EXACT)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_entropy_bonus_equals_the_loops_with_its_gradient(name):
    objective = make_objective(name, entropy_coefficient=0.3)
    assert objective.needs_entropy_gradient
    inputs = as_mini_batch(inputs_of(name, 1))
    expected = expect(name, inputs, entropy_coefficient=0.3)
    outputs = objective(inputs)
    assert_is(outputs, inputs, expected)
    torch.testing.assert_close(inputs.entropy.grad, expected.entropy_gradient, **EXACT)
    assert (inputs.entropy.grad[inputs.mask > 0] < 0).all()  # more entropy, less loss
    assert completed(objective, outputs)["loss"] == pytest.approx(float(expected.loss))


def test_without_a_bonus_the_entropy_carries_no_gradient():
    objective = make_objective("gspo")
    inputs = make_inputs(1)
    objective(inputs).loss.backward()
    assert inputs.entropy.grad is None and not objective.needs_entropy_gradient


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "gmpo", "luspo"])
def test_off_policy_mask_equals_the_loops(name):
    bound = 0.3 * SPREADS[name]
    objective = make_objective(name, off_policy_mask=bound)
    dropped = 0
    for seed in range(4):
        inputs = inputs_of(name, seed)
        expected = expect(name, inputs, off_policy_mask=bound)
        outputs = objective(inputs)
        assert_is(outputs, inputs, expected)
        gone = [weights[0] == 0 for weights in expected.weights]
        assert outputs.means["off_policy/dropped"].tolist() == [sum(gone), len(gone)]
        dropped += sum(gone)
    assert 2 <= dropped <= 20, "of 24 sequences"


def test_off_policy_mask_keeps_what_is_rewarded_and_what_is_near():
    means = torch.tensor([-0.5, -0.5, -0.5, 0.5, -0.1])  # of log pi - log pi_old
    advantages = torch.tensor([1.0, 0.0, -1.0, -1.0, -1.0])
    kept = kept_by_off_policy_mask(means, advantages, bound=0.2)
    assert kept.tolist() == [True, True, False, True, True]


def test_a_mask_and_a_correction_keep_their_figures_apart():
    objective = make_objective(
        "grpo", correction="token_tis", correction_high=1.05, off_policy_mask=0.1
    )
    inputs = make_inputs(2, spread=0.4)
    means = objective(inputs).means
    alone = make_objective("grpo", correction="token_tis", correction_high=1.05)(inputs).means
    for key in ("correction/weight", "correction/squared_weight", "correction/dropped"):
        torch.testing.assert_close(means[key], alone[key], **EXACT)
    assert means["off_policy/dropped"][1] == len(inputs.advantages)
    assert "off_policy/dropped" not in alone


def test_effective_sample_share_is_that_of_its_formula():
    objective = make_objective("grpo", correction="token_tis")
    inputs = make_inputs(3, spread=0.4, mismatch=0.5)
    outputs = objective(inputs)
    masked = inputs.mask > 0
    ratios = outputs.values["ratio/token"]
    weights = (inputs.old_logprobs - inputs.rollout_logprobs).exp().clamp(max=2.0)[masked]
    metrics = completed(objective, outputs)
    for key, w in (("ratio", ratios), ("correction", weights)):
        expected = float(w.sum() ** 2 / (len(w) * w.square().sum()))
        assert metrics[f"{key}/effective_sample_share"] == pytest.approx(expected, rel=1e-12)
        assert metrics[f"{key}/weight"] == pytest.approx(float(w.mean()), rel=1e-12)
        assert f"{key}/squared_weight" not in metrics
