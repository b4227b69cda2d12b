"""Fifteen bugs that other implementations shipped, and the tests that notice each of them here.

Tests without a path are in this folder.

 1. A sequence ratio in a loss that sums over tokens, so that long sequences have more weight:
    test_oracle.py. The configuration is also refused
    (tests/unit/config/test_objective_recipes.py, as for bugs 2, 7, 8 and 11).
 2. A clip range for token ratios with GSPO, whose sequence ratios never reach it: test_oracle.py
    compares the recipe's numbers with the paper's.
 3. A column of advantages that broadcasts to a square: below.
 4. Weights of sequences that are used as weights of tokens: test_oracle.py (gspo_token,
    corrections).
 5. Positions outside the mask that enter sums, lengths or gradients: every case of test_oracle.py
    has NaN, infinities or large numbers there.
 6. The mean of exponentials in place of the exponential of a mean, or a sum in place of a mean:
    test_oracle.py.
 7. A correction that is a product over tokens, with a ratio that is a geometric mean:
    test_oracle.py.
 8. Token weights on a sequence ratio: refused, below.
 9. Clip fractions that ignore the sign of the advantage, count groups of advantage 0, or are means
    over micro-batches: test_oracle.py compares them as counts, of whole batches and of
    micro-batches.
10. The entropy of the sampled token only: tests/unit/models/test_logprob_head.py compares the
    entropy with -sum_v p_v log p_v of a dense softmax, and test_oracle.py checks that the loss
    averages this entropy.
11. A key that nothing reads: refused. test_oracle.py checks that each key changes the result.
12. Context parallelism: a shard without tokens, a collective that adds a gradient, or sums over one
    shard only (test_oracle.py divides its batches over shards), and whitening on one rank (each
    rank gets the rewards of all ranks: tests/parallel/test_redistribute.py). With real ranks:
    sequence_sums_not_reduced_over_cp in tests/parallel/test_mistakes.py, and test_layout_matrix.py.
13. A policy that is compared with itself, so that all ratios are 1: test_oracle.py.
14. Gradients of the routers' losses that are 10^4 times too large under context parallelism,
    because a loss callback returns two values: aux_loss_scaled_by_tokens_of_the_shard in
    tests/parallel/test_mistakes.py. tests/unit/rl/test_gradients.py computes them by hand.
15. Means over micro-batches or ranks of different sizes that are averaged with equal weights: the
    micro-batches of test_oracle.py, and tests/parallel/test_mistakes.py
    (mean_of_micro_batch_means, divisor_of_one_data_rank).
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from gspo_megatron.objectives import parts
from tests.unit.objectives.batches import inputs_of, make_inputs, make_objective


@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo", "cispo", "minirl"])
def test_bug_03_a_column_of_advantages_becomes_a_square(name):
    """[B] times [B, 1] is [B, B]. Its mean looks like any other number."""
    inputs = inputs_of(name, 1)
    column = dataclasses.replace(inputs, advantages=inputs.advantages[:, None])
    assert (inputs.advantages * column.advantages).shape == (6, 6)
    objective = make_objective(name)
    with pytest.raises(AssertionError, match="not \\[num_sequences\\]"):
        objective(column)
    # There is a second check, in case the first is missing.
    with mock.patch.object(parts, "check_inputs"), pytest.raises(AssertionError):
        objective(column)


@pytest.mark.parametrize("correction", ["token_tis", "icepop"])
def test_bug_08_token_weights_on_a_sequence_ratio(correction):
    """The configuration refuses these corrections. Without that check, the loss refuses them."""
    with pytest.raises(AssertionError, match="token weights of a sequence"):
        make_objective("gspo", correction=correction)(make_inputs(1))
