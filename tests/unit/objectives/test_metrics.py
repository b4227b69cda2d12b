"""Clip fractions, entropy, KL estimates and ratios against counting in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    inputs_of,
    make_inputs,
    make_objective,
)
from tests.unit.objectives.papers import expect


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
