"""Losses, gradients and metrics of the objectives against loops written from the papers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.types import LossInputs
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


# --- What is outside the mask has no effect, and lengths enter where the papers have them --------

LONGEST = 40  # of make_objective
OF_SEQUENCES = ["gspo", "gmpo", "luspo", "reinforce_leave_one_out"]


def weight_of_a_token(name: str, inputs: LossInputs, i: int) -> float:
    """d loss / d log pi of a token of response i with an advantage of 1, where all ratios are 1."""
    sequences = inputs.global_num_sequences
    return -{
        "dapo": 1 / inputs.global_num_tokens,
        "cispo": 1 / inputs.global_num_tokens,
        "dr_grpo": 1 / (sequences * LONGEST),
        "luspo": 1 / sequences,
        "minirl": 1 / sequences,
        "reinforce_leave_one_out": 1 / sequences,
    }.get(name, 1 / (sequences * float(inputs.sequence_lengths[i])))


def uniform(log_ratios: list[float], lengths: list[int], advantages: list[float]) -> LossInputs:
    """Sequences with the same log-ratio on all of their tokens."""
    counts = torch.tensor(lengths)
    new = torch.repeat_interleave(torch.tensor(log_ratios, dtype=torch.float64), counts)
    inputs = dataclasses.replace(
        make_inputs(0, tuple(lengths)),
        logprobs=new.requires_grad_(),
        old_logprobs=torch.zeros_like(new),
        rollout_logprobs=torch.zeros_like(new),
        mask=torch.ones_like(new),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_lengths=counts.double(),
    )
    return as_mini_batch(inputs)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 50.0])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@EVERY_OBJECTIVE
def test_what_stands_outside_the_mask_reaches_nothing(name, poison, kl):
    keys = {"kl": kl, "kl_coefficient": 0.1, "entropy_coefficient": 0.1, "correction": "k3_mask"}
    keys["off_policy_mask"] = 0.5 * SPREADS[name]
    of_tokens = name not in OF_SEQUENCES
    options = {"with_reference": True, "with_token_advantages": of_tokens}
    clean = inputs_of(name, 1, mismatch=0.03, **options)
    expected, expected_gradient = run(name, clean, **keys)
    holes = clean.mask == 0
    assert holes.any()
    signs = dict.fromkeys(("logprobs", "entropy", "rollout_logprobs", "token_advantages"), 1)
    signs |= {"old_logprobs": -1, "reference_logprobs": -1}
    changed = {
        field: getattr(clean, field).detach().masked_fill(holes, sign * poison)
        for field, sign in signs.items()
        if getattr(clean, field) is not None
    }
    poisoned = dataclasses.replace(clean, **changed)
    poisoned.logprobs.requires_grad_()
    poisoned.entropy.requires_grad_()

    outputs, gradient = run(name, poisoned, **keys)

    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(gradient, expected_gradient)
    assert (gradient[holes] == 0).all()
    assert torch.equal(poisoned.entropy.grad, clean.entropy.grad)
    for kind in ("means", "values"):
        for key, value in getattr(outputs, kind).items():
            assert torch.equal(value, getattr(expected, kind)[key]), key


@EVERY_OBJECTIVE
def test_a_fully_masked_sequence_counts_in_the_mean_and_adds_nothing(name):
    inputs = inputs_of(name, 2)
    gone = inputs.sequence_index == 2
    inputs.mask[gone] = 0
    inputs.sequence_lengths[2] = 0
    inputs.advantages[2] = 3.0
    kept = ~gone
    others = [0, 1, 3, 4, 5]
    without = choose(
        inputs,
        kept,
        advantages=inputs.advantages[others],
        sequence_lengths=inputs.sequence_lengths[others],
    )
    without.sequence_index -= (without.sequence_index > 2).long()

    outputs, gradient = run(name, inputs)
    expected, expected_gradient = run(name, without)  # with the same global counts

    torch.testing.assert_close(outputs.loss, expected.loss, **EXACT)
    torch.testing.assert_close(gradient[kept], expected_gradient, **EXACT)
    assert (gradient[gone] == 0).all()
    counted = float(name not in ("dapo", "cispo"))  # which have tokens as their divisor
    torch.testing.assert_close(
        outputs.means["loss"], expected.means["loss"] + torch.tensor([0.0, counted]), **EXACT
    )
    for key, pair in expected.means.items():
        if key != "loss":  # a sequence without tokens is not among those that could be clipped
            torch.testing.assert_close(outputs.means[key], pair, **EXACT)


@pytest.mark.parametrize("global_tokens", [0, 40])
@EVERY_OBJECTIVE
def test_a_batch_without_any_masked_token_gives_zero(name, global_tokens):
    """40: other micro-batches have some. 0: the whole mini-batch has none, and 0/0 is no loss."""
    inputs = inputs_of(name, 3)
    inputs.mask.zero_()
    inputs.sequence_lengths.zero_()
    inputs.global_num_tokens = global_tokens
    outputs, gradient = run(name, inputs, entropy_coefficient=0.1)
    assert outputs.loss == 0
    assert (gradient == 0).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    assert (outputs.values["ratio/sequence"] == 1).all()


@EVERY_OBJECTIVE
def test_ratios_of_the_old_policy_are_one_and_the_gradient_is_that_of_reinforce(name):
    lengths, advantages = [4, 1, 5], [1.0, -2.0, 0.5]
    inputs = uniform([0.0, 0.0, 0.0], lengths, advantages)
    outputs, gradient = run(name, inputs)
    assert (outputs.values["ratio/sequence"] == 1).all()
    assert (outputs.values["ratio/token"] == 1).all()
    weights = [weight_of_a_token(name, inputs, i) * advantages[i] for i in range(3)]
    expected = torch.tensor(weights, dtype=torch.float64)[inputs.sequence_index]
    torch.testing.assert_close(gradient, expected, **EXACT)


@EVERY_OBJECTIVE
def test_shapes_that_would_broadcast_are_refused(name):
    inputs = inputs_of(name, 5)
    wrong = {
        "advantages": inputs.advantages[:, None],
        "sequence_lengths": inputs.sequence_lengths[:, None],
        "old_logprobs": inputs.old_logprobs[:, None],
        "mask": inputs.mask[None],
        "logprobs": inputs.logprobs[:, None],
        "entropy": inputs.entropy[:1],
        "rollout_logprobs": inputs.rollout_logprobs[:, None],
        "reference_logprobs": inputs.old_logprobs[:1],
    }
    for field, tensor in wrong.items():
        with pytest.raises(AssertionError):
            make_objective(name)(dataclasses.replace(inputs, **{field: tensor}))


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_token_advantages_that_would_not_be_read_are_refused(name):
    with pytest.raises(AssertionError, match="token_advantages"):
        make_objective(name)(make_inputs(6, with_token_advantages=True))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("jump", [500.0, -500.0])
@EVERY_OBJECTIVE
def test_one_runaway_token_leaves_no_nan(name, advantage, jump):
    inputs = uniform([0.0, 0.0], [3, 2], [advantage, 1.0])
    for field in ("logprobs", "old_logprobs", "rollout_logprobs", "mask", "advantages"):
        setattr(inputs, field, getattr(inputs, field).detach().float())
    inputs.sequence_lengths = inputs.sequence_lengths.float()
    inputs.logprobs[0] = jump
    inputs.logprobs.requires_grad_()
    outputs, gradient = run(name, inputs)
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradient).all()
    expected = weight_of_a_token(name, inputs, 1)
    assert gradient[3:].tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
