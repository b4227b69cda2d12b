"""The parts of objectives, alone and as a configuration puts them together."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from gspo_megatron.config.objectives import CORRECTIONS, TOKEN_CORRECTIONS
from gspo_megatron.objectives.parts import (
    divergence,
    dual_clip,
    sequence_weights,
    token_weights,
)
from tests.unit.objectives.batches import (
    EXACT,
    as_mini_batch,
    assert_is,
    inputs_of,
    make_inputs,
    make_objective,
    problems,
    run,
)
from tests.unit.objectives.papers import NUMBERS, SPREADS, correction_weights, expect

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


# --- Corrections for responses that another engine sampled, against loops ------------------------

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
