"""Losses and gradients of the objectives against loops written from the papers."""

from __future__ import annotations

import itertools

import pytest
import torch

from gspo_megatron.config.objectives import RECIPES
from tests.unit.objectives.papers import PAPERS, SPREADS, expect

# Float64 on both sides: only the order of additions differs.
EXACT = {"rtol": 1e-10, "atol": 1e-13}
OF_TOKENS = ["gspo_token", "grpo", "dapo", "dr_grpo", "cispo", "sapo", "minirl"]
# On which sides a rule cuts; SAPO's cuts nowhere.
SIDES = {name: {"", "low", "high"} for name in RECIPES} | {"cispo": {"", "high"}, "sapo": {""}}


def mean(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1])


def assert_is(outputs, inputs, expected) -> None:
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)
    assert float(expected.gradient.abs().max()) > 1e-3  # the comparison is not of zeros


def test_every_objective_has_its_paper_and_its_spread():
    assert RECIPES.keys() == PAPERS.keys() == SPREADS.keys()


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_loops_of_the_paper(
    seed, name_and_spread, make_inputs, make_objective
):
    name, spread = name_and_spread
    inputs = make_inputs(seed, spread=spread)
    # by the recipe's own numbers on one side, by the paper's on the other
    assert_is(make_objective(name)(inputs), inputs, expect(name, inputs))


def test_the_random_batches_make_both_sides_of_the_clip_bind(name_and_spread, make_inputs):
    name, spread = name_and_spread
    sides: set[str] = set()
    signs: set[int] = set()
    harmless = False
    for seed in range(5):
        inputs = make_inputs(seed, spread=spread)
        signs |= set(inputs.advantages.sign().int().tolist())
        expected = expect(name, inputs)
        sides.update(itertools.chain(*expected.binding))
        pairs = zip(
            itertools.chain(*expected.binding), itertools.chain(*expected.outside), strict=True
        )
        harmless |= any(outside and not side for side, outside in pairs)
        assert (inputs.mask == 0).any()
    assert signs == {-1, 0, 1}
    assert sides == SIDES[name]
    assert harmless or len(sides) < 3, "no ratio is outside on the side that the clip leaves alone"


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_single_tokens_equal_the_loops_of_the_paper(
    name, seed, make_inputs, make_objective
):
    inputs = make_inputs(seed, spread=SPREADS[name], with_token_advantages=True)
    assert_is(make_objective(name)(inputs), inputs, expect(name, inputs))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(seed, make_inputs, make_objective):
    sequence, token = make_inputs(seed), make_inputs(seed)
    sequence_outputs = make_objective("gspo")(sequence)
    token_outputs = make_objective("gspo_token")(token)
    sequence_outputs.loss.backward()
    token_outputs.loss.backward()

    torch.testing.assert_close(sequence_outputs.loss, token_outputs.loss, **EXACT)
    torch.testing.assert_close(sequence.logprobs.grad, token.logprobs.grad, **EXACT)
    assert sequence_outputs.means.keys() == token_outputs.means.keys()
    for name, pair in sequence_outputs.means.items():
        if name.startswith("ratio/"):  # over sequences in the one, over tokens in the other
            continue
        torch.testing.assert_close(pair, token_outputs.means[name], **EXACT)


def test_luspo_is_gspo_with_every_sequence_times_its_length(make_inputs, make_objective):
    plain, weighted = make_inputs(1), make_inputs(1)
    make_objective("gspo")(plain).loss.backward()
    make_objective("luspo")(weighted).loss.backward()
    lengths = plain.sequence_lengths[plain.sequence_index]
    torch.testing.assert_close(weighted.logprobs.grad, plain.logprobs.grad * lengths, **EXACT)


def test_float32_follows_float64(name_and_spread, make_inputs, make_objective):
    name, spread = name_and_spread
    inputs = make_inputs(11, spread=spread, dtype=torch.float32)
    expected = expect(name, inputs)
    outputs = make_objective(name)(inputs)
    outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    # A ratio near 1 is good to 1e-7; terms that are sums over a sequence are of order 10.
    torch.testing.assert_close(outputs.loss.detach().double(), expected.loss, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(
        inputs.logprobs.grad.double(), expected.gradient, rtol=1e-5, atol=1e-7
    )


def test_reported_loss_is_the_loss_when_the_micro_batch_is_the_whole_mini_batch(
    name_and_spread, make_inputs, make_objective
):
    name, spread = name_and_spread
    inputs = make_inputs(2, spread=spread)
    inputs.global_num_sequences = len(inputs.advantages)
    inputs.global_num_tokens = int(inputs.mask.sum())
    outputs = make_objective(name)(inputs)
    assert mean(outputs.means["loss"]) == pytest.approx(outputs.loss.item(), rel=1e-12)


def test_micro_batches_add_up_to_the_whole_batch(
    name_and_spread, make_inputs, make_objective, choose
):
    name, spread = name_and_spread
    objective = make_objective(name)
    whole = make_inputs(3, spread=spread)
    whole_outputs = objective(whole)
    whole_outputs.loss.backward()

    loss = 0.0
    gradient = torch.zeros_like(whole.logprobs)
    means = {key: torch.zeros(2, dtype=torch.float64) for key in whole_outputs.means}
    for first, last in ((0, 1), (1, 4), (4, 6)):  # uneven on purpose
        mine = (whole.sequence_index >= first) & (whole.sequence_index < last)
        part = choose(
            whole,
            mine,
            advantages=whole.advantages[first:last],
            sequence_lengths=whole.sequence_lengths[first:last],
        )
        part.sequence_index -= first
        outputs = objective(part)
        outputs.loss.backward()
        loss += outputs.loss.detach()
        gradient[mine] += part.logprobs.grad
        for key, pair in outputs.means.items():
            means[key] += pair

    torch.testing.assert_close(loss, whole_outputs.loss.detach(), **EXACT)
    torch.testing.assert_close(gradient, whole.logprobs.grad, **EXACT)
    for key, pair in whole_outputs.means.items():
        torch.testing.assert_close(means[key], pair, **EXACT)


def test_order_of_tokens_and_gaps_between_sequences_do_not_matter(
    name_and_spread, make_inputs, make_objective, choose
):
    name, spread = name_and_spread
    inputs = make_inputs(4, spread=spread)
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(0))
    shuffled = choose(inputs, order)
    objective = make_objective(name)
    first, second = objective(inputs), objective(shuffled)
    first.loss.backward()
    second.loss.backward()
    torch.testing.assert_close(first.loss, second.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad[order], shuffled.logprobs.grad, **EXACT)
