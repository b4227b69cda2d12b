"""The parts of objectives, alone and as a configuration puts them together."""

from __future__ import annotations

import itertools

import pytest
import torch

from gspo_megatron.objectives.parts import (
    divergence,
    dual_clip,
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
