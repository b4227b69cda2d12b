"""What is outside the mask has no effect, and lengths enter exactly where the papers have them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gspo_megatron.objectives import get_objective
from gspo_megatron.types import LossInputs

EXACT = {"rtol": 1e-10, "atol": 1e-13}  # float64, other orders of additions


def run(name: str, inputs: LossInputs):
    outputs = get_objective(name)(inputs)
    outputs.loss.backward()
    return outputs, inputs.logprobs.grad


def uniform(log_ratios: list[float], lengths: list[int], advantages: list[float]) -> LossInputs:
    """Sequences with the same log-ratio on all of their tokens."""
    counts = torch.tensor(lengths)
    new = torch.repeat_interleave(torch.tensor(log_ratios, dtype=torch.float64), counts)
    return LossInputs(
        logprobs=new.requires_grad_(),
        old_logprobs=torch.zeros_like(new),
        mask=torch.ones_like(new),
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths)), counts),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_lengths=counts.double(),
        global_num_sequences=len(lengths),
        global_num_tokens=sum(lengths),
        sum_over_shards=lambda vector: vector,
        is_primary_shard=True,
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 50.0])
def test_what_stands_outside_the_mask_reaches_nothing(name_and_spread, make_inputs, poison):
    name, spread = name_and_spread
    clean = make_inputs(1, spread=spread)
    expected, expected_gradient = run(name, clean)
    holes = clean.mask == 0
    assert holes.any()
    poisoned = dataclasses.replace(
        clean,
        logprobs=clean.logprobs.detach().masked_fill(holes, poison).requires_grad_(),
        old_logprobs=clean.old_logprobs.masked_fill(holes, -poison),
        entropy=clean.entropy.masked_fill(holes, poison),
    )

    outputs, gradient = run(name, poisoned)

    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(gradient, expected_gradient)
    assert (gradient[holes] == 0).all()
    for kind in ("means", "values"):
        for key, value in getattr(outputs, kind).items():
            assert torch.equal(value, getattr(expected, kind)[key]), key


def test_a_fully_masked_sequence_counts_in_the_mean_and_adds_nothing(name_and_spread, make_inputs):
    name, spread = name_and_spread
    inputs = make_inputs(2, spread=spread)
    gone = inputs.sequence_index == 2
    inputs.mask[gone] = 0
    inputs.sequence_lengths[2] = 0
    inputs.advantages[2] = 3.0
    kept = ~gone
    without = make_inputs(2, spread=spread)
    without = dataclasses.replace(
        without,
        logprobs=without.logprobs[kept].detach().requires_grad_(),
        old_logprobs=without.old_logprobs[kept],
        mask=without.mask[kept],
        entropy=without.entropy[kept],
        sequence_index=without.sequence_index[kept] - (without.sequence_index[kept] > 2).long(),
        advantages=without.advantages[[0, 1, 3, 4, 5]],
        sequence_lengths=without.sequence_lengths[[0, 1, 3, 4, 5]],
    )

    outputs, gradient = run(name, inputs)
    expected, expected_gradient = run(name, without)  # with the same global_num_sequences

    torch.testing.assert_close(outputs.loss, expected.loss, **EXACT)
    torch.testing.assert_close(gradient[kept], expected_gradient, **EXACT)
    assert (gradient[gone] == 0).all()
    torch.testing.assert_close(
        outputs.means["loss"], expected.means["loss"] + torch.tensor([0.0, 1.0]), **EXACT
    )
    for key, pair in expected.means.items():
        if key != "loss":  # a sequence without tokens is not among those that could be clipped
            torch.testing.assert_close(outputs.means[key], pair, **EXACT)


def test_a_batch_without_any_masked_token_gives_zero(name_and_spread, make_inputs):
    name, spread = name_and_spread
    inputs = make_inputs(3, spread=spread)
    inputs.mask.zero_()
    inputs.sequence_lengths.zero_()
    outputs, gradient = run(name, inputs)
    assert outputs.loss == 0
    assert (gradient == 0).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    assert (outputs.values["ratio/sequence"] == 1).all()


def test_sequences_weigh_the_same_whatever_their_length(name_and_spread):
    name, _ = name_and_spread
    outputs, gradient = run(name, uniform([0.0, 0.0], [2, 50], [1.0, 1.0]))
    assert float(gradient[:2].sum()) == pytest.approx(float(gradient[2:].sum()), rel=1e-12)
    assert float(gradient.sum()) == pytest.approx(-1.0, rel=1e-12)
    assert outputs.loss.item() == pytest.approx(-1.0, rel=1e-12)


def test_gspo_gives_every_token_of_a_sequence_the_same_weight(make_inputs):
    inputs = make_inputs(4, spread=1e-5)  # nothing is clipped
    _, gradient = run("gspo", inputs)
    for i in range(len(inputs.advantages)):
        mine = gradient[(inputs.sequence_index == i) & (inputs.mask > 0)]
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), **EXACT)


def test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio():
    # Neither the mean of the exponentials (1.5431) nor the exponential of the sum.
    inputs = uniform([0.0], [2], [1.0])
    inputs.logprobs = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    outputs, _ = run("gspo", inputs)
    assert float(outputs.values["ratio/sequence"]) == pytest.approx(1.0, rel=1e-12)
    inputs.logprobs = torch.tensor([0.3, 0.1], dtype=torch.float64, requires_grad=True)
    outputs, _ = run("gspo", inputs)
    assert float(outputs.values["ratio/sequence"]) == pytest.approx(math.exp(0.2), rel=1e-12)


def test_ratios_of_the_old_policy_are_one_and_the_gradient_is_that_of_reinforce(name_and_spread):
    name, _ = name_and_spread
    outputs, gradient = run(name, uniform([0.0, 0.0, 0.0], [4, 1, 5], [1.0, -2.0, 0.5]))
    assert (outputs.values["ratio/sequence"] == 1).all()
    assert (outputs.values["ratio/token"] == 1).all()
    expected = torch.tensor([1 / 4] * 4 + [-2.0] + [0.5 / 5] * 5, dtype=torch.float64) / -3
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_shapes_that_would_broadcast_are_refused(name_and_spread, make_inputs):
    name, spread = name_and_spread
    inputs = make_inputs(5, spread=spread)
    wrong = {
        "advantages": inputs.advantages[:, None],
        "sequence_lengths": inputs.sequence_lengths[:, None],
        "old_logprobs": inputs.old_logprobs[:, None],
        "mask": inputs.mask[None],
        "logprobs": inputs.logprobs[:, None],
        "entropy": inputs.entropy[:1],
    }
    for field, tensor in wrong.items():
        with pytest.raises(AssertionError):
            get_objective(name)(dataclasses.replace(inputs, **{field: tensor}))


def test_gspo_refuses_token_advantages_that_it_would_not_read(make_inputs):
    with pytest.raises(AssertionError, match="token_advantages"):
        get_objective("gspo")(make_inputs(6, with_token_advantages=True))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_one_runaway_token_leaves_no_nan(name_and_spread, advantage):
    name, _ = name_and_spread
    inputs = uniform([0.0, 0.0], [3, 2], [advantage, 1.0])
    new = torch.tensor([500.0, 0.0, 0.0, 0.0, 0.0])
    inputs = dataclasses.replace(
        inputs,
        logprobs=new.requires_grad_(),
        old_logprobs=torch.zeros(5),
        mask=torch.ones(5),
        advantages=inputs.advantages.float(),
        sequence_lengths=inputs.sequence_lengths.float(),
    )
    outputs, gradient = run(name, inputs)
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradient).all()
    assert (gradient[3:] == -0.25).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
