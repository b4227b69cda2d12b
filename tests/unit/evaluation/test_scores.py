"""The figures of a suite, compared with brute force, with exact distributions, and with the papers'
formulas."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from gspo_megatron.evaluation.scores import (
    ProblemResponses,
    majority_at_k,
    pass_at_k,
    powers_of_two,
    suite_figures,
)
from gspo_megatron.observe.intervals import bootstrap_interval, share_interval
from gspo_megatron.observe.suite_table import suite_text


def answers(correct: str, given: str | None = None, lengths: int = 3) -> ProblemResponses:
    """Responses to the problem "10n": a correct one, a wrong one, and one whose reward failed."""
    rewards = [math.nan if c == "n" else float(c) for c in correct]
    read = [None if a == "-" else a for a in given or correct]
    n = len(correct)
    return ProblemResponses(rewards, [c == "1" for c in correct], read, [False] * n, [lengths] * n)


def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_response() -> None:
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            responses = [1] * c + [0] * (n - c)
            subsets = list(itertools.combinations(responses, k))
            expected = Fraction(sum(map(max, subsets)), len(subsets))
            assert pass_at_k(c, n, k) == pytest.approx(float(expected), abs=1e-15)


def test_pass_at_k_is_the_product_form_of_the_codex_paper() -> None:
    for n, c in itertools.product((10, 100, 200), (0, 1, 3, 7, 10)):
        for k in (1, 10):
            wrong = np.arange(n - c + 1, n + 1)
            product = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / wrong)
            assert pass_at_k(c, n, k) == pytest.approx(product, rel=1e-12)
    # (195·194·…·186)/(200·199·…·191), reduced by hand to (190·189·…·186)/(200·…·196)
    odds = math.prod(range(186, 191)) / math.prod(range(196, 201))
    assert pass_at_k(5, 200, 10) == pytest.approx(1 - odds, rel=1e-12)


@pytest.mark.parametrize("given", [(-1, 2, 1), (3, 2, 1), (1, 2, 3), (1, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(given: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*given)


def test_majority_is_the_mean_over_all_ways_to_break_ties() -> None:
    """The test takes every list of 5 responses, each with the answer a (right), b, c or none.
    If several answers are most frequent, each of them is equally likely to win."""
    for given in itertools.product("abc-", repeat=5):
        counts = Counter(answer for answer in given if answer != "-")
        top = [a for a in counts if counts[a] == max(counts.values())]
        expected = Fraction(top.count("a"), len(top)) if top else Fraction(0)
        found = majority_at_k(
            [answer == "a" for answer in given], [None if a == "-" else a for a in given]
        )
        assert found == pytest.approx(float(expected))


def test_the_interval_has_the_quantiles_of_the_exact_bootstrap_distribution() -> None:
    """If each problem is either right or wrong, the number of right problems among resampled
    problems has a binomial distribution."""
    for problems, right in ((30, 9), (100, 50), (500, 480)):
        low, high = bootstrap_interval([1.0] * right + [0.0] * (problems - right))
        exact = stats.binom.ppf([0.025, 0.975], problems, right / problems) / problems
        assert (low, high) == pytest.approx(exact, abs=1.01 / problems)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random, truth = np.random.default_rng(0), 0.5
    inside = 0
    for _ in range(60):
        low, high = bootstrap_interval(random.beta(2.0, 2.0, size=50).tolist())
        inside += low <= truth <= high
    assert 51 <= inside <= 60


def test_the_interval_of_equal_problems_is_a_point_and_the_same_every_time() -> None:
    assert bootstrap_interval([0.25]) == (0.25, 0.25)
    assert bootstrap_interval([1.0, 1.0]) == (1.0, 1.0)
    values = [0.0, 0.5, 1.0, 0.25]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    low, high = bootstrap_interval(values)
    assert low < np.mean(values) < high


def test_figures_of_two_problems_by_hand() -> None:
    found = suite_figures([answers("1100", "aabc", 10), answers("0001", "xx-y", 20)], samples=4)
    assert found["mean"] == found["pass_at_1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    # If two of four responses are right, pass@2 is 1 − 1/6. If one of four is right, it is 1 − 3/6.
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert found["pass_at_4"] == 1.0
    assert found["maj_at_4"] == pytest.approx((1 + 0) / 2)
    assert found["length"] == 15 and found["truncated"] == 0 and found["problems"] == 2
    assert found["ci_low"] == 0.25 and found["ci_high"] == 0.5
    assert found["failed"] == 0


def test_a_problem_with_a_failed_reward_is_left_out_and_counted() -> None:
    found = suite_figures([answers("11"), answers("0n"), answers("nn")], samples=2)
    assert found["mean"] == 1.0 and found["problems"] == 1 and found["failed"] == 3
    with pytest.raises(ValueError, match="no problem has 2 responses"):
        suite_figures([answers("1n")], samples=2)


def test_a_failed_reward_may_count_as_wrong() -> None:
    problems = [answers("11"), answers("1n", "ab"), answers("nn", "cc")]
    found = suite_figures(problems, samples=2, failed_is_wrong=True)
    assert found["problems"] == 3 and found["failed"] == 3 and found["left_out"] == 0
    assert found["mean"] == found["pass_at_1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["pass_at_2"] == pytest.approx(2 / 3)
    # The answers "b" and "c" belong to responses whose rewards failed, so they have no vote.
    assert found["maj_at_2"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no problem has 2 responses"):
        suite_figures([answers("nn")], samples=2, failed_is_wrong=True)


def test_the_line_of_a_suite_says_what_failed_and_what_became_of_it() -> None:
    problems = [answers("11"), answers("0n"), answers("nn")]
    left_out = suite_text(suite_figures(problems, samples=2))
    assert left_out.endswith("3 calls of the reward failed: 2 problems left out")
    wrong = suite_text(suite_figures(problems, samples=2, failed_is_wrong=True))
    assert wrong.endswith("3 calls of the reward failed: counted as wrong")
    assert "failed" not in suite_text(suite_figures([answers("10")], samples=2))


@pytest.mark.parametrize("count", [1, 5, 8, 40, 1000])
def test_the_interval_of_a_share_is_wilsons(count: int) -> None:
    for right in {0, 1, count // 3, count}:
        result = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
        assert share_interval(right / count, count) == pytest.approx(tuple(result), abs=1e-12)
    with pytest.raises(ValueError, match="0 trials"):
        share_interval(0.5, 0)


def test_partial_rewards_have_a_mean_that_is_not_their_accuracy() -> None:
    half = ProblemResponses([0.5, 1.0], [False, True], [None, None], [True, False], [4, 2])
    found = suite_figures([half], samples=2)
    assert (found["mean"], found["pass_at_1"], found["truncated"]) == (0.75, 0.5, 0.5)
    assert not any(name.startswith("maj") for name in found)


def test_problems_of_one_mean_have_no_interval() -> None:
    """If all problems have the same mean, the bootstrap would give an interval of width 0. But
    other problems may have other means."""
    assert suite_text(suite_figures([answers("00")] * 3, samples=2)).startswith(
        "mean@2 0.000, pass"
    )
    found = suite_text(suite_figures([answers("00"), answers("11")], samples=2))
    assert found.startswith("mean@2 0.500 (0.000 to 1.000), pass")


def test_powers_of_two_end_with_all_samples() -> None:
    assert [powers_of_two(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
