"""The running mean and standard deviation of the scores of a reward model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gspo_megatron.rewards.moments import RunningMoments


@pytest.mark.parametrize("offset", [0.0, -3.0, 1e4])
def test_they_are_those_of_all_scores_so_far(offset: float) -> None:
    source = np.random.default_rng(1)
    batches = [offset + source.normal(size=n) for n in (3, 1, 16, 40)]
    moments = RunningMoments({})
    for number, batch in enumerate(batches, start=1):
        moments.add(batch)
        whole = np.concatenate(batches[:number])
        assert moments.count == len(whole)
        assert moments.mean == pytest.approx(whole.mean(), rel=1e-12, abs=1e-12)
        assert moments.std == pytest.approx(whole.std(), rel=1e-9, abs=1e-9)
    given = np.array([offset, offset + 1.5, np.nan])
    found = moments.normalize(given)
    whole = np.concatenate(batches)
    assert found[:2] == pytest.approx((given[:2] - whole.mean()) / whole.std(), rel=1e-8)
    assert np.isnan(found[2])


def test_they_go_on_to_the_last_bit_from_what_a_checkpoint_has() -> None:
    source = np.random.default_rng(2)
    first, second = source.normal(size=33) / 3, source.normal(size=17) * 1e3
    whole = RunningMoments({})
    whole.add(first)
    saved = json.loads(json.dumps(whole.kept))
    whole.add(second)
    resumed = RunningMoments(saved)
    resumed.add(second)
    assert resumed.kept == whole.kept and resumed.kept is saved


def test_equal_scores_and_none_at_all_are_no_division_by_zero() -> None:
    moments = RunningMoments({})
    moments.add([])
    assert (moments.count, moments.mean, moments.std) == (0, 0, 0)
    assert moments.normalize(np.array([2.0])).tolist() == [0.0]
    moments.add([0.1, 0.1, 0.1])
    assert moments.normalize(np.array([0.1, 0.7, np.nan])).tolist()[:2] == [0.0, 0.0]
