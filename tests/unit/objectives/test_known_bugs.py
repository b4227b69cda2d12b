"""Fifteen bugs that other implementations shipped, and the tests that notice each of them here.

Tests without a path are in this folder.

1. A sequence ratio in a loss that sums over tokens, which weighs it by length: test_oracle.py. A
configuration that asks for it is refused (tests/unit/config/test_objective_recipes.py, which also
has 2, 7, 8 and 11).
2. A clip range for tokens with GSPO, whose ratios never reach it: test_oracle.py compares the
recipe's numbers with the paper's.
3. A column of advantages becomes a square: below.
4. Weights of sequences used as weights of tokens: test_oracle.py (gspo_token, corrections).
5. Positions outside the mask in sums, lengths or gradients: every case of test_oracle.py has NaN,
infinities or large numbers there.
6. The mean of exponentials, or a sum in place of a mean: test_oracle.py.
7. A correction by a product over tokens with a ratio that is a mean: test_oracle.py.
8. Token weights on a sequence ratio: refused, below.
9. Clip fractions without the sign of the advantage, with groups of advantage 0, or as means of
micro-batches: test_oracle.py compares them as counts, whole and in micro-batches.
10. The entropy of the sampled token only: tests/unit/models/test_logprob_head.py compares it with
-sum_v p_v log p_v of the dense softmax, and test_oracle.py checks that this one is averaged.
11. A key that nothing reads: refused. test_oracle.py checks that each key changes the result.
12. Context parallelism: a shard without tokens, a collective that adds a gradient, sums of one
shard (the divisions of test_oracle.py), and whitening by one rank (below). Real ranks:
sequence_sums_not_reduced_over_cp in tests/parallel/test_mistakes.py, and test_layout_matrix.py.
13. A policy that is compared with itself, so that all ratios are 1: test_oracle.py.
14. Gradients of the routers' losses that are 10^4 times too large under context parallelism,
because of a loss callback with two values: aux_loss_scaled_by_tokens_of_the_shard in
tests/parallel/test_mistakes.py; tests/unit/rl/test_gradients.py computes them by hand.
15. Means over uneven micro-batches or ranks, averaged as if these were equal: the micro-batches of
test_oracle.py, and tests/parallel/test_mistakes.py (mean_of_micro_batch_means,
divisor_of_one_data_rank).
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from gspo_megatron.objectives import parts
from gspo_megatron.objectives.advantages import batch_std
from tests.unit.objectives.batches import inputs_of, make_inputs, make_objective


@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo", "cispo", "minirl"])
def test_bug_03_a_column_of_advantages_becomes_a_square(name):
    """[B] times [B, 1] is [B, B], whose mean looks like any other number."""
    inputs = inputs_of(name, 1)
    column = dataclasses.replace(inputs, advantages=inputs.advantages[:, None])
    assert (inputs.advantages * column.advantages).shape == (6, 6)
    objective = make_objective(name)
    with pytest.raises(AssertionError, match="not \\[num_sequences\\]"):
        objective(column)
    # a second check, if the first is missing
    with mock.patch.object(parts, "check_inputs"), pytest.raises(AssertionError):
        objective(column)


@pytest.mark.parametrize("correction", ["token_tis", "icepop"])
def test_bug_08_token_weights_on_a_sequence_ratio(correction):
    """The configuration refuses them. If it was not checked, the loss refuses them."""
    with pytest.raises(AssertionError, match="token weights of a sequence"):
        make_objective("gspo", correction=correction)(make_inputs(1))


def test_bug_12_whitening_over_the_sequences_of_one_rank():
    rewards, groups = torch.tensor([1.0, 0.0, 5.0, 1.0]), torch.tensor([0, 0, 1, 1])
    by_rank = torch.cat([batch_std(rewards[rows], groups[rows]) for rows in ([0, 1], [2, 3])])
    assert not torch.allclose(by_rank, batch_std(rewards, groups))
