"""The parts of objectives, alone and as a configuration puts them together."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import build_objective
from gspo_megatron.objectives.parts import (
    capped,
    divergence,
    dual_clip,
    kept_by_off_policy_mask,
    min_clip,
)
from tests.unit.objectives.batches import (
    EXACT,
    as_mini_batch,
    assert_is,
    inputs_of,
    make_inputs,
    make_objective,
    run,
)
from tests.unit.objectives.papers import NUMBERS, SPREADS, expect

# One objective for each aggregation, and for each kind of ratio.
AGGREGATIONS = ["gspo", "gspo_token", "gmpo", "grpo", "dapo", "dr_grpo", "luspo", "minirl"]


def completed(objective, outputs) -> dict[str, float]:
    return objective.complete(
        {key: float(pair[0] / pair[1]) for key, pair in outputs.means.items() if pair[1]}
    )


def test_the_clip_binds_only_on_the_side_of_the_advantage():
    ratio = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
    clipped = min_clip(None, ratio, advantages, 0.2, 0.3)
    assert clipped.low.tolist() == [False, True, False, False, False, False, False]
    assert clipped.high.tolist() == [False, False, False, True, False, False, False]
    assert clipped.outside.tolist() == [True] * 6 + [False]
    torch.testing.assert_close(
        clipped.surrogate, torch.tensor([0.5, -0.8, 0.0, 1.3, -2.0, 0.0, 1.0])
    )


def test_binding_is_where_the_gradient_is_cut():
    generator = torch.Generator().manual_seed(0)
    ratio = (0.6 * torch.randn(200, generator=generator)).exp().requires_grad_()
    advantages = torch.randn(200, generator=generator)
    clipped = min_clip(None, ratio, advantages, 0.2, 0.27)
    clipped.surrogate.sum().backward()
    assert torch.equal(ratio.grad == 0, clipped.low | clipped.high)
    assert 20 < int((clipped.low | clipped.high).sum()) < 180


def test_clip_refuses_to_broadcast():
    with pytest.raises(AssertionError, match="broadcast"):
        min_clip(None, torch.ones(3), torch.ones(3, 1), 0.1, 0.1)


def test_a_cap_changes_the_loss_for_advantages_of_both_signs():
    ratio = torch.tensor([9.0, 9.0, 9.0, 1.0])
    inputs = make_inputs(0, lengths=(4,))
    inputs.mask, inputs.logprobs = torch.ones(4), torch.full((4,), -2.0)
    clipped = capped(inputs, ratio, torch.tensor([1.0, -1.0, 0.0, 1.0]), 4.0)
    assert clipped.surrogate.tolist() == [-10.0, 10.0, 0.0, -2.0]
    assert clipped.high.tolist() == [True, True, False, False]
    assert clipped.outside.tolist() == [True, True, True, False]
    assert not clipped.low.any()


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
    inputs = inputs_of("grpo", 0, with_reference=True)
    outputs = make_objective("grpo", kl="k3", kl_coefficient=0.7, kl_in="reward")(inputs)
    assert_is(outputs, inputs, expect("grpo", inputs))
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
    run(name, inputs)  # without the bonus
    assert inputs.entropy.grad is None


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


def test_a_mask_and_a_correction_keep_their_metrics_apart():
    inputs, keys = inputs_of("grpo", 2), {"correction": "token_tis", "correction_high": 1.05}
    means = make_objective("grpo", off_policy_mask=0.1, **keys)(inputs).means
    alone = make_objective("grpo", **keys)(inputs).means
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


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_with_the_numbers_of_its_paper(name):
    objective = make_objective(name)
    assert objective.name == name
    assert objective.function.recipe.parameters == NUMBERS[name]
    assert not objective.needs_reference
    assert not objective.needs_entropy_gradient


def test_overrides_reach_the_objective():
    inputs = make_inputs(0, spread=1e-2)
    narrow = make_objective("gspo")(inputs)
    wide = make_objective("gspo", clip_low=0.5, clip_high=0.5)(inputs)
    assert narrow.means["clip/sequence/outside"][0] > 0
    assert wide.means["clip/sequence/outside"][0] == 0


@pytest.mark.parametrize(
    ("name", "part", "value", "same_as"),
    [
        ("grpo", "aggregation", "token_sum", None),
        ("grpo", "ratio", "sequence", "gspo"),
        ("grpo", "ratio", "sequence_token", "gspo_token"),
        ("gspo", "ratio", "token", "grpo"),
        ("gspo", "rule", "geometric_clip", "gmpo"),
        ("grpo", "rule", "soft_gate", "sapo"),
    ],
)
def test_a_part_in_place_of_the_recipes_own(name, part, value, same_as):
    inputs = make_inputs(1, spread=0.4)
    changed = make_objective(name, **{part: value})(inputs).loss
    assert changed != make_objective(name)(inputs).loss
    if same_as is not None:
        torch.testing.assert_close(changed, make_objective(same_as)(inputs).loss)


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "token_sum"])
def test_aggregations_of_token_terms(name, aggregation):
    """By hand from the gradients of a single aggregation, whose weights are known."""
    inputs = inputs_of(name, 2)
    sequences, tokens = inputs.global_num_sequences, inputs.global_num_tokens
    weights = {
        "sequence_mean": 1 / (sequences * inputs.sequence_lengths[inputs.sequence_index]),
        "token_mean": 1 / tokens,
        "token_sum": 1 / sequences,
    }[aggregation]
    _, by_constant = run(name, inputs, aggregation="constant_length")
    _, found = run(name, inputs, aggregation=aggregation)
    torch.testing.assert_close(found, by_constant * (sequences * 40) * weights)


def test_the_longest_response_is_the_divisor_of_dr_grpo():
    section = ObjectiveSection(name="dr_grpo")
    inputs = make_inputs(0, spread=0.4)
    short = build_objective(section, max_response_tokens=10)(inputs).loss
    long = build_objective(section, max_response_tokens=1000)(inputs).loss
    torch.testing.assert_close(short, 100 * long)


@pytest.mark.parametrize(
    ("keys", "reference", "entropy"),
    [
        ({}, False, False),
        ({"kl": "k3", "kl_coefficient": 0.1}, True, False),
        ({"kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"}, True, False),
        ({"entropy_coefficient": 0.01}, False, True),
    ],
)
def test_what_the_trainer_has_to_provide(keys, reference, entropy):
    objective = make_objective("gspo", **keys)
    assert (objective.needs_reference, objective.needs_entropy_gradient) == (reference, entropy)


def test_a_divergence_without_the_reference_is_refused():
    with pytest.raises(AssertionError, match="reference policy"):
        make_objective("gspo", kl="k3", kl_coefficient=0.1)(make_inputs(0))
