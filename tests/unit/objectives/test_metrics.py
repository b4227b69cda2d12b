"""Clip fractions, entropy, KL estimates and ratios against counting in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_megatron.objectives.parts import capped, min_clip
from tests.unit.objectives.batches import EVERY_OBJECTIVE, inputs_of, make_inputs, make_objective
from tests.unit.objectives.papers import expect

SIDES = {"binding": ("low", "high"), "low": ("low",), "high": ("high",)}


@pytest.mark.parametrize("seed", range(3))
@EVERY_OBJECTIVE
def test_clip_fractions_equal_counts_by_hand(seed, name):
    inputs = inputs_of(name, seed)
    expected = expect(name, inputs)
    means = make_objective(name)(inputs).means
    tokens = sum(len(sequence) for sequence in expected.binding)
    for figure, sides in SIDES.items():
        hits = [[side in sides for side in sequence] for sequence in expected.binding]
        check(means, figure, hits, tokens)
    check(means, "outside", expected.outside, tokens)


def check(means, figure: str, hits: list[list[bool]], tokens: int) -> None:
    in_sequences = [sum(any(sequence) for sequence in hits), len(hits)]
    in_tokens = [sum(sum(sequence) for sequence in hits), tokens]
    assert means[f"clip/sequence/{figure}"].tolist() == in_sequences, figure
    assert means[f"clip/token/{figure}"].tolist() == in_tokens, figure


def test_the_clip_binds_only_on_the_side_of_the_advantage():
    ratio = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
    clipped = min_clip(ratio, advantages, 0.2, 0.3)
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
    clipped = min_clip(ratio, advantages, 0.2, 0.27)
    clipped.surrogate.sum().backward()
    assert torch.equal(ratio.grad == 0, clipped.low | clipped.high)
    assert 20 < int((clipped.low | clipped.high).sum()) < 180


def test_clip_refuses_to_broadcast():
    with pytest.raises(AssertionError, match="broadcast"):
        min_clip(torch.ones(3), torch.ones(3, 1), 0.1, 0.1)


@EVERY_OBJECTIVE
def test_groups_with_zero_advantage_are_never_binding(name):
    inputs = make_inputs(1, spread=2.0)
    inputs.advantages.zero_()
    outputs = make_objective(name)(inputs)
    outputs.loss.backward()
    for level in ("sequence", "token"):
        for figure in ("binding", "low", "high"):
            assert outputs.means[f"clip/{level}/{figure}"][0] == 0
        if name != "sapo":  # it has no range to be outside of
            assert outputs.means[f"clip/{level}/outside"][0] > 0
    assert (inputs.logprobs.grad == 0).all()


def test_a_cap_changes_the_loss_for_advantages_of_both_signs():
    ratio = torch.tensor([9.0, 9.0, 9.0, 1.0])
    clipped = capped(ratio, torch.tensor([1.0, -1.0, 0.0, 1.0]), torch.full((4,), -2.0), 4.0)
    assert clipped.surrogate.tolist() == [-10.0, 10.0, 0.0, -2.0]
    assert clipped.high.tolist() == [True, True, False, False]
    assert clipped.outside.tolist() == [True, True, True, False]
    assert not clipped.low.any()


def test_gspo_weights_clipped_sequences_by_their_tokens():
    inputs = make_inputs(2, lengths=(30, 3), spread=0.0)
    inputs.advantages.copy_(torch.tensor([1.0, 1.0]))
    with torch.no_grad():
        inputs.logprobs[:30] += 0.01  # sequence 0 is above the range
    means = make_objective("gspo")(inputs).means
    assert means["clip/sequence/high"].tolist() == [1, 2]
    assert means["clip/token/high"].tolist() == inputs.sequence_lengths[[0]].tolist() + [
        float(inputs.sequence_lengths.sum())
    ]


@EVERY_OBJECTIVE
def test_entropy_and_kl_are_means_over_the_masked_tokens(name):
    inputs = make_inputs(3, spread=0.3)
    means = make_objective(name)(inputs).means
    sums = {"kl/k1": 0.0, "kl/k3": 0.0, "policy/entropy": 0.0}
    count = 0
    for t in range(len(inputs.mask)):
        if inputs.mask[t] == 1:
            difference = float(inputs.logprobs[t].detach() - inputs.old_logprobs[t])
            sums["kl/k1"] -= difference
            sums["kl/k3"] += math.exp(difference) - 1 - difference
            sums["policy/entropy"] += float(inputs.entropy[t].detach())
            count += 1
    for key, total in sums.items():
        assert means[key].tolist() == pytest.approx([total, count], rel=1e-10)


def test_k3_of_tiny_differences_keeps_its_digits_in_float32():
    inputs = make_inputs(4, spread=0.0, dtype=torch.float32)
    with torch.no_grad():
        inputs.old_logprobs.fill_(0.0)
        inputs.logprobs.fill_(1e-3)
    numerator, tokens = make_objective("gspo")(inputs).means["kl/k3"].tolist()
    # x^2/2 = 5e-7 is a few float32 units of 1: exp(x) - 1 - x would have no digit right.
    assert numerator / tokens == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


@EVERY_OBJECTIVE
def test_without_entropy_there_is_no_entropy_figure(name):
    inputs = inputs_of(name, 5)
    inputs.entropy = None
    assert "policy/entropy" not in make_objective(name)(inputs).means


@EVERY_OBJECTIVE
def test_ratios_are_the_geometric_ones_for_every_objective(name):
    inputs = make_inputs(6, spread=0.3)
    values = make_objective(name)(inputs).values
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    for i in range(len(inputs.advantages)):
        mine = [
            float(difference[t])
            for t in range(len(difference))
            if inputs.sequence_index[t] == i and inputs.mask[t] == 1
        ]
        expected = math.exp(sum(mine) / len(mine))
        assert float(values["ratio/sequence"][i]) == pytest.approx(expected, rel=1e-12)
    expected_tokens = [math.exp(d) for d, m in zip(difference, inputs.mask, strict=True) if m == 1]
    assert values["ratio/token"].tolist() == pytest.approx(expected_tokens, rel=1e-12)


@EVERY_OBJECTIVE
def test_figures_are_detached_pairs_and_vectors(name):
    outputs = make_objective(name)(inputs_of(name, 7, dtype=torch.float32))
    assert set(outputs.means) == {
        "loss",
        "kl/k1",
        "kl/k3",
        "policy/entropy",
        "ratio/weight",
        "ratio/squared_weight",
        *(
            f"clip/{level}/{figure}"
            for level in ("sequence", "token")
            for figure in ("binding", "outside", "low", "high")
        ),
    }
    assert set(outputs.values) == {"ratio/sequence", "ratio/token"}
    for pair in outputs.means.values():
        assert pair.shape == (2,) and pair.dtype == torch.float64 and not pair.requires_grad
    for values in outputs.values.values():
        assert values.dim() == 1 and not values.requires_grad


def test_the_divergence_from_the_reference_is_reported_by_two_estimates():
    inputs = make_inputs(8, spread=0.4, with_reference=True)
    means = make_objective("grpo", kl="k2", kl_coefficient=0.1)(inputs).means
    differences = [
        float(inputs.reference_logprobs[t] - inputs.logprobs[t].detach())
        for t in range(len(inputs.mask))
        if inputs.mask[t] == 1
    ]
    sums = {
        "kl/reference_k1": -sum(differences),
        "kl/reference_k3": sum(math.exp(d) - 1 - d for d in differences),
    }
    for key, total in sums.items():
        assert means[key].tolist() == pytest.approx([total, len(differences)], rel=1e-10), key
