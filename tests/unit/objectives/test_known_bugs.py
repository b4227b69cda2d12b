"""Fifteen bugs that other implementations shipped. Each is put in here, and has to be noticed.

Some live outside the objectives, and are put in elsewhere:

- 10, entropy of the sampled token alone: where logits become an entropy,
  tests/unit/models/test_logprob_head.py compares it with -sum_v p_v log p_v of the dense softmax.
- 12, context parallelism: tests/parallel/test_mistakes.py leaves out the reduction over its ranks
  (sequence_sums_not_reduced_over_cp), tests/parallel/test_layout_matrix.py runs updates whose
  shards hold no response token. Rewards are exchanged before advantages are taken, so no rank has a
  whitening of its own to reduce: tests/parallel/test_redistribute.py.
- 14, gradients of the routers' losses 10^4 times too large under context parallelism, from a loss
  callback of two values: tests/parallel/test_mistakes.py (aux_loss_scaled_by_tokens_of_the_shard),
  and tests/unit/rl/test_gradients.py has them by hand.
- 15, means over uneven ranks averaged as if equal: tests/parallel/test_mistakes.py
  (mean_of_micro_batch_means, divisor_of_one_data_rank).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import objectives as table
from gspo_megatron.objectives import losses, metrics, parts
from gspo_megatron.objectives.advantages import batch_std
from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    inputs_of,
    make_inputs,
    make_objective,
    micro_batch,
    problems,
    run_shards,
)
from tests.unit.objectives.papers import SPREADS, correction_weights, expect

Check = Callable[[], bool]


def agrees(name: str, objective: Any, inputs: LossInputs, **expected_with: Any) -> bool:
    """Whether loss and gradient are those of the paper's loops."""
    inputs.logprobs.grad = None
    outputs = objective(inputs)
    outputs.loss.backward()
    expected = expect(name, inputs, **expected_with)
    near = partial(torch.allclose, rtol=1e-9, atol=1e-12)
    return near(outputs.loss, expected.loss) and near(inputs.logprobs.grad, expected.gradient)


def of(name: str, weights: Any = None, **keys: Any) -> Check:
    """The check of an objective against its paper."""
    inputs = inputs_of(name, 1, mismatch=0.2, with_reference=True)
    return partial(agrees, name, make_objective(name, **keys), inputs, correction=weights)


def notices(check: Check, target: Any, name: str, bug: Any) -> None:
    """`check` holds, and fails with `bug` in the place of what `target`, a dict or another object,
    has under `name`."""
    assert check()
    patch = mock.patch.dict if isinstance(target, dict) else mock.patch.multiple
    with patch(target, **{name: bug}):
        assert not check(), "the bug goes unnoticed"
    assert check()


@pytest.mark.parametrize("power", [1, 2])
def test_bug_01_token_sums_weight_a_sequence_ratio_by_its_length(power):
    """A sequence ratio in a loss that sums over tokens: weights by length, or length squared."""
    native = losses.aggregate_sequences

    def summed(terms: Tensor, inputs: LossInputs, aggregation: str) -> tuple[Tensor, Tensor]:
        return native(terms * inputs.sequence_lengths**power, inputs, aggregation)

    notices(of("gspo"), losses, "aggregate_sequences", summed)
    notices(of("luspo"), losses, "aggregate_sequences", summed)
    (line,) = problems(name="gspo", aggregation="token_mean")
    assert "by its length" in line


def test_bug_02_a_clip_range_for_tokens_under_gspo():
    """0.2 is left as the default: a ratio of sequences never reaches it, and nothing is clipped."""
    inputs = make_inputs(1)
    wide = dataclasses.replace(
        table.RECIPES["gspo"], parameters={"clip_low": 0.2, "clip_high": 0.2}
    )
    notices(
        lambda: agrees("gspo", make_objective("gspo"), inputs),
        table,
        "RECIPES",
        table.RECIPES | {"gspo": wide},
    )
    for key in ("clip_low", "clip_high"):
        for value in (0.05, 0.2):
            (line,) = problems(name="gspo", **{key: value})
            assert line.startswith(f"objective.{key} = {value}: ") and "would clip few" in line
            assert problems(name="gspo", allow_wide_clip=True, **{key: value}) == []


@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo", "cispo", "minirl"])
def test_bug_03_a_column_of_advantages_becomes_a_square(name):
    """[B] times [B, 1] is [B, B], and its mean is a number like any other."""
    inputs = inputs_of(name, 1)
    column = dataclasses.replace(inputs, advantages=inputs.advantages[:, None])
    assert (inputs.advantages * column.advantages).shape == (6, 6)
    objective = make_objective(name)
    with pytest.raises(AssertionError, match="not \\[num_sequences\\]"):
        objective(column)
    # a second line of defence, where the first is lost
    with mock.patch.object(parts, "check_inputs"), pytest.raises(AssertionError):
        objective(column)


def test_bug_04_weights_of_sequences_taken_for_those_of_tokens():
    """The packed path forgot to spread a sequence's weight over its tokens."""

    def unspread(inputs: LossInputs, log_ratio: Tensor, means: Tensor) -> Tensor:
        rows = torch.arange(len(log_ratio)) % len(means)
        return means.detach()[rows] + (log_ratio - log_ratio.detach())

    notices(of("gspo_token"), parts, "sequence_token_log_ratio", unspread)
    correct = partial(correction_weights, "sequence_tis", high=1.3)
    keys = {"correction": "sequence_tis", "correction_high": 1.3}
    # weights of the first sequences alone, as an index that was lost gives them
    native = parts.sequence_weights
    notices(
        of("grpo", correct, **keys),
        parts,
        "sequence_weights",
        lambda *args, **kwargs: native(*args, **kwargs).roll(1),
    )


def test_bug_05_positions_outside_the_mask_in_the_sequence_mean():
    """Masked or padded positions leaked into the sum, into the length or into the gradient."""

    def unmasked(inputs: LossInputs) -> Tensor:
        return inputs.logprobs - inputs.old_logprobs

    for name in ("gspo", "gspo_token", "luspo", "gmpo", "reinforce_leave_one_out"):
        notices(of(name), parts, "token_log_ratio", unmasked)

    inputs = make_inputs(1)
    everything = torch.bincount(inputs.sequence_index).double()
    leaked = dataclasses.replace(inputs, sequence_lengths=everything)
    assert not agrees("gspo", make_objective("gspo"), leaked)

    inputs = make_inputs(1, with_reference=True)
    inputs.reference_logprobs[inputs.mask == 0] = math.nan
    objective = make_objective("gspo", kl="k2", kl_coefficient=0.1)
    check = partial(agrees, "gspo", objective, inputs, kl=("k2", 0.1))

    def unmasked_divergence(self: losses.Surrogate, inputs: LossInputs) -> Tensor:
        return parts.divergence(self.section.kl, inputs.logprobs, inputs.reference_logprobs)

    notices(check, losses.Surrogate, "_divergence", unmasked_divergence)


def test_bug_06_means_of_exponentials_and_lengths_without_sums():
    """The exponential of a mean, not the mean of exponentials; of a mean, not of one token / L."""
    native = parts.sequence_sums

    def sum_of_exponentials(inputs: LossInputs, *values: Tensor) -> Tensor:
        sums = native(inputs, *(value.exp() for value in values))
        return (sums / inputs.sequence_lengths).log() * inputs.sequence_lengths

    def last_token(inputs: LossInputs, *values: Tensor) -> Tensor:
        ends = torch.bincount(inputs.sequence_index).cumsum(0) - 1
        return torch.stack(values)[:, ends]

    for bug in (sum_of_exponentials, last_token):
        for name in ("gspo", "gspo_token", "luspo"):
            notices(of(name), parts, "sequence_sums", bug)


def test_bug_07_a_product_over_tokens_beside_a_mean_over_them():
    """exp(sum) corrects what exp(mean) is the ratio of: 17 times less at the first update."""
    length = 300
    sums, lengths = torch.tensor([-math.log(17.0)]), torch.tensor([float(length)])
    weight = parts.sequence_weights("sequence_tis", sums, lengths, 2.0)
    product = parts.sequence_weights("sequence_product_tis", sums, lengths, 2.0)
    assert weight.item() == pytest.approx(17 ** (-1 / length), rel=1e-6)
    assert product.item() == pytest.approx(1 / 17, rel=1e-6)

    native = parts.sequence_weights
    correct = partial(correction_weights, "sequence_tis", high=2.0)
    notices(
        of("gspo", correct, correction="sequence_tis"),
        parts,
        "sequence_weights",
        lambda name, *args, **kwargs: native("sequence_product_tis", *args, **kwargs),
    )
    for name in ("gspo", "gspo_token", "luspo", "gmpo"):
        (line,) = problems(name=name, correction="sequence_product_tis")
        assert "scales the update down" in line


@pytest.mark.parametrize("correction", table.TOKEN_CORRECTIONS)
def test_bug_08_token_weights_on_a_sequence_ratio(correction):
    """With token-level weights the terms of GSPO are no longer constant within a response."""

    def constant_within_responses(correction: str) -> bool:
        inputs = make_inputs(1, spread=1e-5, mismatch=0.3)
        make_objective("gspo_token", correction=correction)(inputs).loss.backward()
        rows = [
            inputs.logprobs.grad[(inputs.sequence_index == i) & (inputs.mask > 0)]
            for i in range(len(inputs.advantages))
        ]
        return all(torch.allclose(row, row[:1].expand_as(row), rtol=1e-3) for row in rows)

    assert constant_within_responses("sequence_tis")
    assert not constant_within_responses(correction)  # which is why it is refused:
    for name in ("gspo", "gspo_token", "luspo", "gmpo"):
        (line,) = problems(name=name, correction=correction)
        assert "would vary within it" in line
    with pytest.raises(AssertionError, match="token weights of a sequence"):
        make_objective("gspo", correction=correction)(make_inputs(1))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_bug_09_clip_fractions(name):
    """Without the sign of the advantage, with groups of advantage 0, or as micro-batch means."""
    inputs = inputs_of(name, 1)
    objective = make_objective(name)
    keys = [f"clip/token/{key}" for key in ("binding", "outside", "low", "high")]

    def counts_are_right() -> bool:
        both = [objective(micro_batch(inputs, *rows)).means for rows in ((0, 1), (1, 6))]
        found = sum(torch.stack([means[key] for key in keys]) for means in both)
        expected = expect(name, inputs)
        sides = [side for row in expected.binding for side in row]
        outside = [out for row in expected.outside for out in row]
        low, high = sides.count("low"), sides.count("high")
        counts = [low + high, sum(outside), low, high]
        return found.tolist() == [[count, len(sides)] for count in counts]

    native = parts.min_clip

    def by_the_range_alone(_: Any, ratio: Tensor, *args: Any, **bounds: float) -> parts.Clipped:
        right = native(_, ratio, *args, **bounds)
        return dataclasses.replace(
            right, low=right.outside & (ratio < 1), high=right.outside & (ratio > 1)
        )

    def with_zeros(_: Any, ratio: Tensor, advantages: Tensor, **bounds: float) -> parts.Clipped:
        return native(_, ratio, advantages.where(advantages != 0, 1.0), **bounds)

    for bug in (by_the_range_alone, with_zeros):
        notices(counts_are_right, parts.RULES, "min_clip", bug)

    fractions = metrics._fractions

    def shares(*args: Any) -> dict[str, Tensor]:
        pairs = fractions(*args)
        return {key: metrics.pair(count / of, 1) for key, (count, of) in pairs.items()}

    notices(counts_are_right, metrics, "_fractions", shares)


def test_bug_10_entropy_of_the_sampled_token():
    """-log pi of the sampled token is an estimate with the noise of sampling, not the entropy."""
    inputs = make_inputs(1)
    objective = make_objective("gspo")

    def is_the_entropy() -> bool:
        total, count = objective(inputs).means["policy/entropy"].tolist()
        masked = inputs.mask > 0
        return count == masked.sum() and math.isclose(total, inputs.entropy.detach()[masked].sum())

    native = metrics.policy_metrics

    def of_the_sampled_token(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
        return native(dataclasses.replace(inputs, entropy=-inputs.logprobs), log_ratio)

    notices(is_the_entropy, metrics, "policy_metrics", of_the_sampled_token)


@pytest.mark.parametrize("rule", table.RULES)
def test_bug_11_a_knob_that_nothing_reads(rule):
    """A configured dual clip constant changed nothing: what is not read is refused, and what is
    said to be read changes the gradient."""
    name = {"geometric_clip": "gmpo", "masked": "minirl"}.get(rule, "grpo")
    read = table.RULES[rule][0]
    for key in table._NUMBERS:
        if key not in read:
            (line,) = problems(name=name, rule=rule, **{key: 1.5 if key != "clip_low" else 0.5})
            assert line.startswith(f"objective.{key} = ") and "nothing reads it" in line

    def reads(key: str) -> bool:
        inputs = make_inputs(1, spread=1.0)
        gradients = []
        for value in (None, 1.5 if key != "clip_low" else 0.5):
            inputs.logprobs.grad = None
            make_objective(name, rule=rule, **{key: value})(inputs).loss.backward()
            gradients.append(inputs.logprobs.grad)
        return not torch.equal(*gradients)

    for key in read:
        assert reads(key), key
    fixed = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "log_clip": 0.4}
    fixed |= {"tau_positive": 1.0, "tau_negative": 1.0}
    target, function = (parts.RULES, rule)
    if rule == "geometric_clip":
        target, function = (vars(parts), "clip_log_ratio")
    native = target[function]

    def deaf(*tensors: Any, **numbers: float) -> parts.Clipped:
        return native(*tensors, **{key: fixed[key] for key in numbers})

    for key in read:
        notices(partial(reads, key), target, function, deaf)


def test_bug_12_shards_of_a_sequence():
    """A shard without response tokens skips the backward pass; the collective takes the gradient
    with it; whitening sees the sequences of one rank."""
    whole = make_inputs(1)
    objective = make_objective("gspo")
    objective(whole).loss.backward()
    expected = whole.logprobs.grad.clone()
    owner = 1 + torch.arange(len(whole.mask)) % 2  # shard 0 has no token

    def shards_add_up() -> bool:
        found = torch.zeros_like(expected)
        for shard, (inputs, outputs) in enumerate(run_shards(whole, owner, objective)):
            if not outputs.loss.requires_grad:
                return False
            outputs.loss.backward()
            found[owner == shard] = inputs.logprobs.grad
        return torch.allclose(found, expected, rtol=1e-9)

    native = parts.sequence_sums

    def detached(inputs: LossInputs, *values: Tensor) -> Tensor:
        return native(inputs, *values).detach()

    def of_this_shard(inputs: LossInputs, *values: Tensor) -> Tensor:
        return native(dataclasses.replace(inputs, sum_over_shards=lambda x: x), *values)

    for bug in (detached, of_this_shard):
        notices(shards_add_up, parts, "sequence_sums", bug)
    rewards, groups = torch.tensor([1.0, 0.0, 5.0, 1.0]), torch.tensor([0, 0, 1, 1])
    by_rank = torch.cat([batch_std(rewards[rows], groups[rows]) for rows in ([0, 1], [2, 3])])
    assert not torch.allclose(by_rank, batch_std(rewards, groups))


@EVERY_OBJECTIVE
def test_bug_13_on_policy_taken_for_off_policy(name):
    """An example compares the policy with itself: all ratios are 1, and the metrics say so."""

    def itself(inputs: LossInputs) -> Tensor:
        difference = inputs.logprobs - inputs.logprobs.detach()
        return difference.where(inputs.mask > 0, 0.0)

    notices(of(name), parts, "token_log_ratio", itself)

    def says_off_policy(inputs: LossInputs) -> bool:
        outputs = make_objective(name)(inputs)
        ones = [(values == 1).all() for values in outputs.values.values()]
        return not (all(ones) and outputs.means["kl/k3"][0] == 0)

    inputs = inputs_of(name, 1)
    notices(lambda: says_off_policy(inputs), parts, "token_log_ratio", itself)


def test_bug_14_and_15_micro_batches_of_different_sizes():
    """The divisor is the mini-batch's: with one of each micro-batch, those with few sequences, or
    few tokens, weigh too much. (14, the routers' losses, is tested where this file's head says.)"""
    whole = make_inputs(1, spread=0.4)
    pieces = [(0, 1), (1, 6)]

    def adds_up(name: str, own_divisor: bool) -> bool:
        objective = make_objective(name)
        found = torch.zeros_like(whole.logprobs)
        for first, last in pieces:
            mine = (whole.sequence_index >= first) & (whole.sequence_index < last)
            part = micro_batch(whole, first, last)
            if own_divisor:  # scaled so that equal micro-batches would come out right
                ratio = len(pieces) * (last - first) / len(whole.advantages)
                part.global_num_sequences = whole.global_num_sequences * ratio
                tokens = float(part.mask.sum() / whole.mask.sum())
                part.global_num_tokens = whole.global_num_tokens * len(pieces) * tokens
            objective(part).loss.backward()
            found[mine] = part.logprobs.grad
        return torch.allclose(found, expect(name, whole).gradient)

    for name in SPREADS:
        assert adds_up(name, own_divisor=False), name
        assert not adds_up(name, own_divisor=True), name
