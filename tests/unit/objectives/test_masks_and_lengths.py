"""What is outside the mask has no effect, and lengths enter exactly where the papers have them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    EXACT,
    as_mini_batch,
    choose,
    inputs_of,
    make_inputs,
    make_objective,
    run,
)
from tests.unit.objectives.papers import SPREADS

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
