"""Fifteen bugs that other implementations shipped. Each is put in here, and has to be noticed.

The bugs that a configuration could ask for (1, 2, 7, 8, 11) are refused there:
tests/unit/config/test_objective_recipes.py. Some live outside the objectives, and are put in
elsewhere:

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
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import objectives as table
from gspo_megatron.objectives import losses, metrics, parts
from gspo_megatron.objectives.advantages import batch_std
from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.objectives.batches import inputs_of, make_inputs, make_objective, poisoned
from tests.unit.objectives.papers import PAPERS, expect
from tests.unit.objectives.test_oracle import (
    BOUNDS,
    Case,
    Part,
    differences,
    micro_batches,
    shards,
    whole,
)

GSPO, TOKEN, LUSPO, GMPO = map(Case, ("gspo", "gspo_token", "luspo", "gmpo"))
PENALTY = Case("gspo", {"kl": "k2", "kl_coefficient": 0.1}, {"with_reference": True})
GEOMETRIC = {"correction": "sequence_tis", **BOUNDS["sequence_tis"][0]}
WEIGHTED = [Case(name, GEOMETRIC, {"mismatch": 0.5}) for name in ("gspo", "grpo")]
EVERY = list(map(Case, PAPERS))


def notices(
    case: Case, divide: Callable[[LossInputs, Any], list[Part]], target: Any, name: str, bug: Any
) -> None:
    """The comparison of the table holds, and fails with `bug` as what `target` has by `name`."""
    inputs = poisoned(inputs_of(case.name, 1, **case.options), math.nan)
    expected = expect(case.name, inputs, **case.keys)

    def agrees() -> bool:
        try:
            parts = divide(inputs, make_objective(case.name, **case.keys))
            return not list(differences(expected, parts))
        except (AssertionError, RuntimeError):  # no graph is left, or shapes differ
            return False

    assert agrees()
    with mock.patch.object(target, name, bug):
        assert not agrees(), f"{case}: the bug goes unnoticed"


# --- The bugs ------------------------------------------------------------------------------------


def times_length(terms: Tensor, inputs: LossInputs, aggregation: str) -> tuple[Tensor, Tensor]:
    return aggregate_sequences(terms * inputs.sequence_lengths, inputs, aggregation)


def unspread(inputs: LossInputs, log_ratio: Tensor, means: Tensor) -> Tensor:
    rows = torch.arange(len(log_ratio)) % len(means)
    return means.detach()[rows] + (log_ratio - log_ratio.detach())


def of_another_sequence(*args: Any, **bounds: float) -> Tensor:
    return sequence_tis(*args, **bounds).roll(1)


def unmasked(inputs: LossInputs) -> Tensor:
    return inputs.logprobs - inputs.old_logprobs


def unmasked_divergence(self: losses.PolicyLoss, inputs: LossInputs) -> Tensor:
    return parts.divergence(self.section.kl, inputs.logprobs, inputs.reference_logprobs)


def sum_of_exponentials(inputs: LossInputs, *values: Tensor) -> Tensor:
    sums = sequence_sums(inputs, *(value.exp() for value in values))
    return (sums / inputs.sequence_lengths).log() * inputs.sequence_lengths


def last_token(inputs: LossInputs, *values: Tensor) -> Tensor:
    ends = torch.bincount(inputs.sequence_index).cumsum(0) - 1
    return torch.stack(values)[:, ends]


def by_the_range_alone(_: Any, ratio: Tensor, *args: Any, **bounds: float) -> parts.Clipped:
    right = min_clip(_, ratio, *args, **bounds)
    low, high = right.outside & (ratio < 1), right.outside & (ratio > 1)
    return dataclasses.replace(right, low=low, high=high)


def with_zeros(_: Any, ratio: Tensor, advantages: Tensor, **bounds: float) -> parts.Clipped:
    flags = min_clip(_, ratio, advantages.where(advantages != 0, 1.0), **bounds)
    right = min_clip(_, ratio, advantages, **bounds)
    return dataclasses.replace(flags, surrogate=right.surrogate)


def shares(*args: Any) -> dict[str, Tensor]:
    pairs = fractions(*args)
    return {key: metrics.pair(count / of, 1) for key, (count, of) in pairs.items()}


def of_the_sampled_token(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
    return policy_metrics(dataclasses.replace(inputs, entropy=-inputs.logprobs), log_ratio)


def detached(inputs: LossInputs, *values: Tensor) -> Tensor:
    return sequence_sums(inputs, *values).detach()


def of_this_shard(inputs: LossInputs, *values: Tensor) -> Tensor:
    return sequence_sums(dataclasses.replace(inputs, sum_over_shards=lambda x: x), *values)


def itself(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs - inputs.logprobs.detach()).where(inputs.mask > 0, 0.0)


aggregate_sequences, fractions = losses.aggregate_sequences, metrics._fractions
policy_metrics = metrics.policy_metrics
sequence_sums, sequence_tis, min_clip = parts.sequence_sums, parts.sequence_tis, parts.min_clip
wide = dataclasses.replace(table.RECIPES["gspo"], parameters={"clip_low": 0.2, "clip_high": 0.2})
FORMULAS = [
    (1, losses, "aggregate_sequences", times_length, [GSPO, LUSPO]),
    (2, table, "RECIPES", table.RECIPES | {"gspo": wide}, [GSPO]),
    (4, parts, "sequence_token_log_ratio", unspread, [TOKEN]),
    (4, parts, "sequence_tis", of_another_sequence, WEIGHTED),
    (5, parts, "token_log_ratio", unmasked, [GSPO, TOKEN, LUSPO, GMPO]),
    (5, losses.PolicyLoss, "_divergence", unmasked_divergence, [PENALTY]),
    (6, parts, "sequence_sums", sum_of_exponentials, [GSPO, TOKEN, LUSPO]),
    (6, parts, "sequence_sums", last_token, [GSPO, TOKEN, LUSPO]),
    (7, parts, "sequence_tis", parts.sequence_product_tis, WEIGHTED),
    (9, parts, "min_clip", by_the_range_alone, [GSPO, TOKEN, Case("grpo")]),
    (9, parts, "min_clip", with_zeros, [GSPO, TOKEN, Case("grpo")]),
    (10, metrics, "policy_metrics", of_the_sampled_token, [GSPO]),
    (13, parts, "token_log_ratio", itself, EVERY),
]
CUT = shards("one_shard_has_all", 2)
DIVISIONS = [
    (9, micro_batches, metrics, "_fractions", shares, [GSPO, TOKEN, Case("grpo")]),
    (12, CUT, parts, "sequence_sums", detached, [GSPO]),
    (12, shards("zigzag", 2), parts, "sequence_sums", of_this_shard, [GSPO]),
]
BUGS = [*((number, whole, *bug) for number, *bug in FORMULAS), *DIVISIONS]


@pytest.mark.parametrize(
    ("divide", "target", "name", "bug", "cases"),
    [bug for _, *bug in BUGS],
    ids=[f"{number:02d}-{getattr(bug, '__name__', name)}" for number, _, _, name, bug, _ in BUGS],
)
def test_a_bug_of_the_formulas_is_noticed(divide, target, name, bug, cases):
    for case in cases:
        notices(case, divide, target, name, bug)


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


@pytest.mark.parametrize("correction", ["token_tis", "icepop"])
def test_bug_08_token_weights_on_a_sequence_ratio(correction):
    """The configuration refuses them; where it has not been asked, the loss does."""
    with pytest.raises(AssertionError, match="token weights of a sequence"):
        make_objective("gspo", correction=correction)(make_inputs(1))


def test_bug_12_whitening_over_the_sequences_of_one_rank():
    rewards, groups = torch.tensor([1.0, 0.0, 5.0, 1.0]), torch.tensor([0, 0, 1, 1])
    by_rank = torch.cat([batch_std(rewards[rows], groups[rows]) for rows in ([0, 1], [2, 3])])
    assert not torch.allclose(by_rank, batch_std(rewards, groups))


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_bug_14_and_15_micro_batches_of_different_sizes(case):
    """The divisor is the mini-batch's: with one of each micro-batch, those with few sequences, or
    few tokens, weigh too much. (14, the routers' losses, is tested where this file's head says.)"""
    inputs = inputs_of(case.name, 1)
    objective = make_objective(case.name)

    def own_divisor(part: LossInputs) -> LossOutputs:
        # scaled so that equal micro-batches would come out right
        sequences, tokens = len(part.advantages) / len(inputs.advantages), len(part.mask)
        part.global_num_sequences = part.global_num_sequences * 3 * sequences
        part.global_num_tokens = part.global_num_tokens * 3 * tokens / len(inputs.mask)
        return objective(part)

    expected = expect(case.name, inputs)
    assert not list(differences(expected, micro_batches(inputs, objective)))
    assert list(differences(expected, micro_batches(inputs, own_divisor)))
