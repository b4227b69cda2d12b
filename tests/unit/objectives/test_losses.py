"""Losses and gradients of the objectives against loops written from the papers."""

from __future__ import annotations

import itertools

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
