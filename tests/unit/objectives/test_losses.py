"""Losses and gradients of the objectives against loops written from the papers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gspo_megatron.objectives import get_objective

# Float64 on both sides: only the order of additions differs.
EXACT = {"rtol": 1e-10, "atol": 1e-13}


def mean(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1])


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_loops_of_the_paper(
    seed, name_and_spread, make_inputs, reference
):
    name, spread = name_and_spread
    objective = get_objective(name)
    inputs = make_inputs(seed, spread=spread)
    expected = reference(name, inputs, **objective.defaults)

    outputs = objective(inputs)
    outputs.loss.backward()

    torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)


def test_the_random_batches_make_both_sides_of_the_clip_bind(
    name_and_spread, make_inputs, reference
):
    name, spread = name_and_spread
    sides: set[str] = set()
    harmless = False
    for seed in range(5):
        inputs = make_inputs(seed, spread=spread)
        expected = reference(name, inputs, **get_objective(name).defaults)
        sides.update(itertools.chain(*expected.binding))
        pairs = zip(
            itertools.chain(*expected.binding), itertools.chain(*expected.outside), strict=True
        )
        harmless |= any(outside and not side for side, outside in pairs)
    assert sides == {"", "low", "high"}
    assert harmless, "no ratio is outside the range on the side that the clip leaves alone"


@pytest.mark.parametrize("name", ["gspo_token", "grpo"])
def test_advantages_of_single_tokens_equal_the_loops_of_the_paper(name, make_inputs, reference):
    objective = get_objective(name)
    for seed in range(3):
        spread = 1e-3 if name == "gspo_token" else 0.4
        inputs = make_inputs(seed, spread=spread, with_token_advantages=True)
        expected = reference(name, inputs, **objective.defaults)

        outputs = objective(inputs)
        outputs.loss.backward()

        torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
        torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(seed, make_inputs):
    sequence, token = make_inputs(seed), make_inputs(seed)
    sequence_outputs = get_objective("gspo")(sequence)
    token_outputs = get_objective("gspo_token")(token)
    sequence_outputs.loss.backward()
    token_outputs.loss.backward()

    torch.testing.assert_close(sequence_outputs.loss, token_outputs.loss, **EXACT)
    torch.testing.assert_close(sequence.logprobs.grad, token.logprobs.grad, **EXACT)
    assert sequence_outputs.means.keys() == token_outputs.means.keys()
    for name, pair in sequence_outputs.means.items():
        torch.testing.assert_close(pair, token_outputs.means[name], **EXACT)


def test_float32_follows_float64(name_and_spread, make_inputs, reference):
    name, spread = name_and_spread
    inputs = make_inputs(11, spread=spread, dtype=torch.float32)
    objective = get_objective(name)
    expected = reference(name, inputs, **objective.defaults)
    outputs = objective(inputs)
    outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    # A ratio near 1 is good to 1e-7; the terms are of order 1 and have both signs.
    torch.testing.assert_close(outputs.loss.detach().double(), expected.loss, rtol=0, atol=3e-7)
    torch.testing.assert_close(
        inputs.logprobs.grad.double(), expected.gradient, rtol=1e-5, atol=1e-7
    )


def test_reported_loss_is_the_loss_when_the_micro_batch_is_the_whole_mini_batch(
    name_and_spread, make_inputs
):
    name, spread = name_and_spread
    inputs = make_inputs(2, spread=spread)
    inputs.global_num_sequences = len(inputs.advantages)
    outputs = get_objective(name)(inputs)
    assert mean(outputs.means["loss"]) == pytest.approx(outputs.loss.item(), rel=1e-12)


def test_micro_batches_add_up_to_the_whole_batch(name_and_spread, make_inputs):
    name, spread = name_and_spread
    whole = make_inputs(3, spread=spread)
    whole.global_num_sequences = len(whole.advantages)
    whole_outputs = get_objective(name)(whole)
    whole_outputs.loss.backward()

    loss = 0.0
    gradient = torch.zeros_like(whole.logprobs)
    means = {key: torch.zeros(2, dtype=torch.float64) for key in whole_outputs.means}
    for first, last in ((0, 1), (1, 4), (4, 6)):  # uneven on purpose
        mine = (whole.sequence_index >= first) & (whole.sequence_index < last)
        part = dataclasses.replace(
            whole,
            logprobs=whole.logprobs[mine].detach().requires_grad_(),
            old_logprobs=whole.old_logprobs[mine],
            mask=whole.mask[mine],
            entropy=whole.entropy[mine],
            sequence_index=whole.sequence_index[mine] - first,
            advantages=whole.advantages[first:last],
            sequence_lengths=whole.sequence_lengths[first:last],
        )
        outputs = get_objective(name)(part)
        outputs.loss.backward()
        loss += outputs.loss.detach()
        gradient[mine] += part.logprobs.grad
        for key, pair in outputs.means.items():
            means[key] += pair

    torch.testing.assert_close(loss, whole_outputs.loss.detach(), **EXACT)
    torch.testing.assert_close(gradient, whole.logprobs.grad, **EXACT)
    for key, pair in whole_outputs.means.items():
        torch.testing.assert_close(means[key], pair, **EXACT)


def test_order_of_tokens_and_gaps_between_sequences_do_not_matter(name_and_spread, make_inputs):
    name, spread = name_and_spread
    inputs = make_inputs(4, spread=spread)
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(0))
    shuffled = dataclasses.replace(
        inputs,
        **{
            key: getattr(inputs, key)[order].detach()
            for key in ("logprobs", "old_logprobs", "mask", "sequence_index", "entropy")
        },
    )
    shuffled.logprobs.requires_grad_()
    objective = get_objective(name)
    first, second = objective(inputs), objective(shuffled)
    first.loss.backward()
    second.loss.backward()
    torch.testing.assert_close(first.loss, second.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad[order], shuffled.logprobs.grad, **EXACT)
