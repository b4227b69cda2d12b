"""Losses, gradients and metrics of the objectives against loops written from the papers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gspo_megatron.config.objectives import RECIPES
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    EXACT,
    as_mini_batch,
    assert_is,
    choose,
    inputs_of,
    make_inputs,
    make_objective,
    micro_batch,
    run,
)
from tests.unit.objectives.papers import PAPERS, SPREADS, expect

OF_TOKENS = ["gspo_token", "grpo", "dapo", "dr_grpo", "cispo", "sapo", "minirl"]
# On which sides a rule cuts; SAPO's cuts nowhere.
SIDES = {name: {"", "low", "high"} for name in RECIPES} | {"cispo": {"", "high"}, "sapo": {""}}


def test_every_objective_has_its_paper_and_its_spread():
    assert RECIPES.keys() == PAPERS.keys() == SPREADS.keys()


@pytest.mark.parametrize("seed", range(5))
@EVERY_OBJECTIVE
def test_loss_and_gradient_equal_the_loops_of_the_paper(seed, name):
    inputs = inputs_of(name, seed)
    # by the recipe's own numbers on one side, by the paper's on the other
    assert_is(make_objective(name)(inputs), inputs, expect(name, inputs))


@EVERY_OBJECTIVE
def test_the_random_batches_make_both_sides_of_the_clip_bind(name):
    found: set[tuple[str, bool]] = set()
    signs: set[int] = set()
    for seed in range(5):
        inputs = inputs_of(name, seed)
        signs |= set(inputs.advantages.sign().int().tolist())
        expected = expect(name, inputs)
        chain = itertools.chain.from_iterable
        found |= set(zip(chain(expected.binding), chain(expected.outside), strict=True))
        assert (inputs.mask == 0).any()
    assert signs == {-1, 0, 1}
    assert {side for side, _ in found} == SIDES[name]
    # a ratio is outside on the side that the clip leaves alone
    assert ("", True) in found or name in ("cispo", "sapo")


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_single_tokens_equal_the_loops_of_the_paper(name, seed):
    inputs = inputs_of(name, seed, with_token_advantages=True)
    assert_is(make_objective(name)(inputs), inputs, expect(name, inputs))


@EVERY_OBJECTIVE
def test_float32_follows_float64(name):
    inputs = inputs_of(name, 11, dtype=torch.float32)
    expected = expect(name, inputs)
    outputs, gradient = run(name, inputs)
    assert outputs.loss.dtype == torch.float32
    # A ratio near 1 is good to 1e-7; terms that are sums over a sequence are of order 10.
    torch.testing.assert_close(outputs.loss.detach().double(), expected.loss, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(gradient.double(), expected.gradient, rtol=1e-5, atol=1e-7)


@EVERY_OBJECTIVE
def test_the_reported_loss_is_the_loss_when_the_micro_batch_is_the_whole_mini_batch(name):
    outputs = make_objective(name)(as_mini_batch(inputs_of(name, 2)))
    numerator, denominator = outputs.means["loss"].tolist()
    assert numerator / denominator == pytest.approx(outputs.loss.item(), rel=1e-12)


@EVERY_OBJECTIVE
def test_micro_batches_add_up_to_the_whole_batch(name):
    whole = inputs_of(name, 3)
    expected, expected_gradient = run(name, whole)
    uneven = ((0, 1), (1, 4), (4, 6))
    found, gradients = zip(*(run(name, micro_batch(whole, *rows)) for rows in uneven), strict=True)
    loss = sum(outputs.loss.detach() for outputs in found)
    torch.testing.assert_close(loss, expected.loss.detach(), **EXACT)
    torch.testing.assert_close(torch.cat(gradients), expected_gradient, **EXACT)
    for key, pair in expected.means.items():
        torch.testing.assert_close(sum(outputs.means[key] for outputs in found), pair, **EXACT)


@EVERY_OBJECTIVE
def test_order_of_tokens_and_gaps_between_sequences_do_not_matter(name):
    inputs = inputs_of(name, 4)
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(0))
    first, gradient = run(name, inputs)
    second, shuffled = run(name, choose(inputs, order))
    torch.testing.assert_close(first.loss, second.loss, **EXACT)
    torch.testing.assert_close(gradient[order], shuffled, **EXACT)


# --- Clip fractions, entropy, KL estimates and ratios against counting in plain Python ------------


@pytest.mark.parametrize("seed", range(3))
@EVERY_OBJECTIVE
def test_clip_fractions_equal_counts_by_hand(seed, name):
    inputs = inputs_of(name, seed)
    expected = expect(name, inputs)
    means = make_objective(name)(inputs).means
    tokens = sum(len(sequence) for sequence in expected.binding)
    hits = {
        key: [[side in sides for side in sequence] for sequence in expected.binding]
        for key, sides in {"binding": ("low", "high"), "low": ("low",), "high": ("high",)}.items()
    }
    for key, flags in (hits | {"outside": expected.outside}).items():
        in_sequences = [sum(any(sequence) for sequence in flags), len(flags)]
        assert means[f"clip/sequence/{key}"].tolist() == in_sequences, key
        assert means[f"clip/token/{key}"].tolist() == [sum(map(sum, flags)), tokens], key


@EVERY_OBJECTIVE
def test_entropy_and_divergences_are_means_over_the_masked_tokens(name):
    inputs = make_inputs(3, spread=0.3, with_reference=True)
    means = make_objective(name)(inputs).means
    rows = [t for t, each in enumerate(inputs.mask.tolist()) if each == 1]
    new, old, reference, entropy = (
        [tensor.tolist()[t] for t in rows]
        for tensor in (
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.reference_logprobs,
            inputs.entropy,
        )
    )
    moved = [n - o for n, o in zip(new, old, strict=True)]
    left = [r - n for r, n in zip(reference, new, strict=True)]
    sums = {
        "kl/k1": -sum(moved),
        "kl/k3": sum(math.exp(d) - 1 - d for d in moved),
        "kl/reference_k1": -sum(left),
        "kl/reference_k3": sum(math.exp(d) - 1 - d for d in left),
        "policy/entropy": sum(entropy),
    }
    for key, total in sums.items():
        assert means[key].tolist() == pytest.approx([total, len(rows)], rel=1e-10), key
    inputs.entropy = None
    assert "policy/entropy" not in make_objective(name)(inputs).means


def test_k3_of_tiny_differences_keeps_its_digits_in_float32():
    inputs = make_inputs(4, spread=0.0, dtype=torch.float32)
    with torch.no_grad():
        inputs.old_logprobs.fill_(0.0)
        inputs.logprobs.fill_(1e-3)
    numerator, tokens = make_objective("gspo")(inputs).means["kl/k3"].tolist()
    # x^2/2 = 5e-7 is a few float32 units of 1: exp(x) - 1 - x would have no digit right.
    assert numerator / tokens == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


@EVERY_OBJECTIVE
def test_ratios_are_the_geometric_ones_for_every_objective(name):
    inputs = make_inputs(6, spread=0.3)
    values = make_objective(name)(inputs).values
    difference = (inputs.logprobs - inputs.old_logprobs).tolist()
    masked = list(
        zip(inputs.sequence_index.tolist(), difference, inputs.mask.tolist(), strict=True)
    )
    by_sequence = [[d for s, d, m in masked if s == i and m == 1] for i in range(6)]
    expected = [math.exp(sum(logs) / len(logs)) for logs in by_sequence]
    assert values["ratio/sequence"].tolist() == pytest.approx(expected, rel=1e-12)
    expected = [math.exp(log) for logs in by_sequence for log in logs]
    assert values["ratio/token"].tolist() == pytest.approx(expected, rel=1e-12)


@EVERY_OBJECTIVE
def test_metrics_are_detached_pairs_and_vectors(name):
    outputs = make_objective(name)(inputs_of(name, 7, dtype=torch.float32))
    names = {"loss", "kl/k1", "kl/k3", "policy/entropy", "ratio/weight", "ratio/squared_weight"}
    for key in ("binding", "outside", "low", "high"):
        names |= {f"clip/sequence/{key}", f"clip/token/{key}"}
    assert set(outputs.means) == names
    assert set(outputs.values) == {"ratio/sequence", "ratio/token"}
    for pair in outputs.means.values():
        assert pair.shape == (2,) and pair.dtype == torch.float64 and not pair.requires_grad
    for values in outputs.values.values():
        assert values.dim() == 1 and not values.requires_grad
