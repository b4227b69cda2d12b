"""Tests of examples/evidence. They compare its estimators with gradients of known bias and noise,
its laboratory with enumerations, and its page with the recorded results."""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.platform.groups import stop_processes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "evidence"))

import draw
import estimators
import frontier_figure
import gradients
import laboratory
import quick
import records
from estimators import GROUPS, effective_share, figures, mean_interval, ratio_figures
from laboratory import GROUP, PROMPT_TOKENS, RESPONSES, VOCABULARY, Laboratory, Setting

# A policy with two possible tokens: pi(1) = sigmoid(theta). A response has LENGTH independent
# tokens, and its reward is the share of ones. The policy OLD samples the responses, and the policy
# NEW is trained on them.
LENGTH, OLD, NEW = 3, -0.3, 0.8


def chance(theta: float) -> float:
    return 1 / (1 + math.exp(-theta))


def everything(theta: float) -> list[tuple[float, int]]:
    """The probability of every response, and its number of ones."""
    p = chance(theta)
    ones = [sum(y) for y in itertools.product((0, 1), repeat=LENGTH)]
    return [(p**n * (1 - p) ** (LENGTH - n), n) for n in ones]


def gradient(ones: int, weight: str) -> float:
    """w (R - 1/2) d log pi / d theta at NEW, for a response with the importance weight w."""
    score = ones - LENGTH * chance(NEW)
    log_ratio = ones * math.log(chance(NEW) / chance(OLD))
    log_ratio += (LENGTH - ones) * math.log((1 - chance(NEW)) / (1 - chance(OLD)))
    weights = {
        "none": 1.0,
        "sequence": math.exp(log_ratio / LENGTH),
        "product": math.exp(log_ratio),
    }
    return weights[weight] * (ones / LENGTH - 0.5) * score


def moments(theta: float, weight: str) -> tuple[float, float]:
    """The mean and variance of `gradient` over the responses of the policy `theta`, by
    enumeration."""
    mean = sum(p * gradient(n, weight) for p, n in everything(theta))
    square = sum(p * gradient(n, weight) ** 2 for p, n in everything(theta))
    return mean, square - mean**2


def drawn(theta: float, weights: tuple[str, ...], groups: int, size: int, seed: int) -> np.ndarray:
    """The mean gradients [weights, groups] of groups of `size` responses. All weights use the same
    groups."""
    rng = np.random.default_rng(seed)
    ones = rng.binomial(LENGTH, chance(theta), (groups, size))
    tables = [[gradient(n, weight) for n in range(LENGTH + 1)] for weight in weights]
    return np.array(tables)[:, ones].mean(2)


WEIGHTS = ("none", "sequence", "product")


@functools.cache
def measured(groups: int, size: int, seed: int) -> dict[str, dict[str, list[float]]]:
    own = dict(zip(WEIGHTS, drawn(OLD, WEIGHTS, groups, size, 2 * seed), strict=True))
    (true,) = drawn(NEW, ("none",), 2 * groups, size, 2 * seed + 1)
    return figures(own, true, base="sequence", unbiased="product", seed=seed)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_bias_and_noise_are_those_computed_by_hand(weight: str) -> None:
    size, groups = 8, 10_000
    found = {name: values[0] for name, values in measured(groups, size, 1)[weight].items()}
    (mean, variance), (true, true_variance) = moments(OLD, weight), moments(NEW, "none")
    if weight == "product":  # only this weight is unbiased
        assert mean == pytest.approx(true, rel=1e-12)
        assert found["projection"] == pytest.approx(1.0, abs=1e-9)
    # The standard error of the mean over all responses, relative to the true gradient.
    error = math.sqrt((variance + true_variance / 2) / (size * groups)) / true
    assert found["plain"] == pytest.approx(mean / true, abs=4 * error)
    assert found["projection"] == pytest.approx(mean / true, abs=4 * error)
    of_batch = variance / (size * GROUPS)
    assert found["noise"] == pytest.approx(of_batch / true**2, rel=0.1)
    assert found["signal"] == pytest.approx(mean**2 / of_batch, rel=0.15)
    base, base_variance = moments(OLD, "sequence")
    assert found["difference"] == pytest.approx((mean - base) / true, abs=4 * error)
    expected = mean**2 / variance / (base**2 / base_variance)
    assert found["signal_ratio"] == pytest.approx(expected, rel=0.1)


def test_the_control_variate_takes_away_noise() -> None:
    expected = moments(OLD, "sequence")[0] / moments(NEW, "none")[0]
    found = [measured(100, 8, seed)["sequence"] for seed in range(40)]
    plain, controlled = (
        np.array([each[name][0] - expected for each in found]) for name in ("plain", "projection")
    )
    # The reference value comes from 200 groups, so it has noise, too. The control variate cannot
    # remove this noise.
    assert controlled.std() < 0.8 * plain.std()
    assert abs(controlled.mean()) < 4 * controlled.std() / math.sqrt(len(found))


def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "RESAMPLES", 200)
    mean, variance = moments(OLD, "sequence")
    true, size = moments(NEW, "none")[0], 8
    expected = {
        "plain": mean / true,
        "projection": mean / true,
        "noise": variance / size / GROUPS / true**2,
        "difference": 0.0,
    }
    held = dict.fromkeys(expected, 0)
    for seed in range(100):
        found = measured(100, size, seed)["sequence"]
        for name in held:
            value, low, high = found[name]
            assert low <= value <= high
            held[name] += low <= expected[name] <= high
    # With many groups, about 95 of 100 intervals contain the true value. The seeds are fixed.
    # The objective is compared with itself, so the difference is exactly 0.
    assert held.pop("difference") == 100
    assert all(85 <= count <= 100 for count in held.values()), held


def test_an_objective_that_clips_everything_has_no_signal() -> None:
    own = dict(zip(WEIGHTS, drawn(OLD, WEIGHTS, 50, 8, 1), strict=True))
    own["nothing"] = np.zeros(50)
    (true,) = drawn(NEW, ("none",), 50, 8, 2)
    found = figures(own, true, base="sequence", unbiased="product")["nothing"]
    assert found["projection"] == [0, 0, 0] and found["noise"] == [0, 0, 0]
    assert math.isnan(found["signal"][0])


def test_intervals_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


def test_log_ratios_follow_the_formula_of_correlated_terms() -> None:
    rng = np.random.default_rng(0)
    length, common, own = 16, 0.03, 0.1
    ratios = rng.normal(0, common, (20_000, 1)) + rng.normal(0, own, (20_000, length))
    found = ratio_figures(ratios)
    deviation = math.hypot(common, own)
    correlation = common**2 / deviation**2
    assert found["token_deviation"] == pytest.approx(deviation, rel=0.01)
    assert found["correlation"] == pytest.approx(correlation, rel=0.1)
    predicted = deviation * math.sqrt((1 + (length - 1) * correlation) / length)
    assert found["sequence_deviation"] == pytest.approx(predicted, rel=0.02)
    assert found["independent_deviation"] == pytest.approx(deviation / 4, rel=0.01)


def test_effective_sample_sizes() -> None:
    assert effective_share(np.log([1.0, 1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert effective_share(np.log([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_share(np.array([1000.0, 0.0])) == pytest.approx(0.5)


# --- The laboratory -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Laboratory]:
    """A laboratory with responses of two tokens."""
    found = Laboratory(Setting(2, seed=1))
    yield found
    stop_processes()


def uphill(small: Laboratory) -> torch.Tensor:
    """The direction of an estimated policy gradient, as gradients.py computes it."""
    return gradients.policy_gradient(small, count=2, scale=1.0)[0]


def test_slopes_are_the_gradients_step(small: Laboratory) -> None:
    batches = [small.draw() for _ in range(2)]
    small.remember(batches)
    small.record_routes(batches, "now")
    direction = uphill(small)
    slopes = small.slopes(batches, "now", direction)
    for batch, slope in zip(batches, slopes, strict=True):
        c = slope.sign()  # with these signs, the terms of the sum do not cancel
        whole = small.gradient(batch, c, "now")
        # The tolerance is for a central difference, whose steps change fp32 log-probs by 0.02.
        assert float((c * slope).sum(1).mean()) == pytest.approx(float(whole @ direction), rel=2e-3)
        # The router's own routes give the same result.
        torch.testing.assert_close(small.gradient(batch, c), whole)


def test_the_policy_gradient_is_the_slope_of_the_mean_reward(small: Laboratory) -> None:
    """All responses of two tokens to one prompt are enumerated. The slope of their mean reward is
    compared with estimates from samples."""
    before = 7  # the last token of the prompt, which decides the right first token
    prompt = torch.full((RESPONSES, PROMPT_TOKENS), before)
    generator = torch.Generator().manual_seed(3)
    direction = uphill(small)
    size = 0.003 / float(direction.norm())

    def mean_reward() -> float:
        """The mean reward with the current weights. It uses the probability of each first token,
        and the probability of a right second token after it."""
        first = torch.arange(VOCABULARY)
        grid = torch.stack([first.repeat(2), torch.zeros(RESPONSES, dtype=torch.long)], dim=1)
        wide, weights = small.widened(
            small.batch_of(torch.cat([prompt, grid], 1), torch.zeros(RESPONSES, 2))
        )
        logprobs = small.logprobs([wide], "now")[0].double().view(RESPONSES, 2, -1)
        chances = (2 * weights.view_as(logprobs)[..., 1:]).sum(-1)  # [responses, 2]
        reach = logprobs[:VOCABULARY, 0, 0].exp()
        assert float(reach.sum()) == pytest.approx(1.0, abs=1e-5)
        return float((chances[0, 0] + (reach * chances[:VOCABULARY, 1]).sum()) / 2)

    sides = []
    for sign in (1, -1):
        with small._moved(sign * size * direction):
            sides.append(mean_reward())
    exact = (sides[0] - sides[1]) / (2 * size)

    grid = torch.arange(VOCABULARY).repeat(2)
    probe = torch.cat([prompt, torch.stack([grid, grid], 1)], 1)
    batch = small.batch_of(probe, torch.zeros(RESPONSES, 2))
    small.record_routes([batch], "now")
    reach = small.logprobs([batch], "now")[0, :VOCABULARY, 0].double().exp()
    steps = []
    for _ in range(30):
        first = torch.multinomial(reach, RESPONSES, replacement=True, generator=generator)
        # The second token is not used.
        tokens = torch.cat([prompt, torch.stack([first, first], 1)], 1)
        wide, weights = small.widened(small.batch_of(tokens, torch.zeros(RESPONSES, 2)))
        slopes = small.slopes([wide], "now", direction)[0]
        steps.append(float((slopes * weights).sum(1).mean()))
    error = np.std(steps) / math.sqrt(len(steps))
    assert np.mean(steps) == pytest.approx(exact, abs=4 * error + 0.02 * abs(exact))
    assert abs(exact) > 6 * error  # the slope is so large that a wrong estimate would fail the test


def test_coefficients_are_those_of_the_papers(small: Laboratory) -> None:
    rng = torch.Generator().manual_seed(2)
    now, old = (-1.5 + 0.3 * torch.randn(4, 2, generator=rng) for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])
    arms = gradients.arms_of("none", 2)
    log_w = (now - old).double()
    weights = {
        "gspo unclipped": log_w.mean(1, keepdim=True).exp().expand(4, 2),
        "grpo unclipped": log_w.exp(),
        "product unclipped": log_w.sum(1, keepdim=True).exp().expand(4, 2),
    }
    for name, weight in weights.items():
        objective = gradients.objective_of(arms[name].section, 2)
        found, cut = gradients.coefficients(objective, now, old, old, advantages)
        wanted = weight * advantages[:, None].double() / 2
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert cut == 0


def test_a_response_is_compared_with_the_others_of_its_group() -> None:
    values = torch.arange(2.0 * RESPONSES, dtype=torch.float64).view(2, RESPONSES)
    others = laboratory.others_mean(values)
    assert float(others[1, 3]) == pytest.approx(float(values[1, [0, 1, 2, 4, 5, 6, 7]].mean()))
    assert float(others[0, 9]) == pytest.approx(float(values[0, [8, *range(10, 16)]].mean()))
    assert GROUP == 8


# --- The page -------------------------------------------------------------------------------------


def test_the_pages_tables_are_those_of_the_kept_lines() -> None:
    tables = draw.all_tables()
    pages = [path.read_text(encoding="utf-8") for path in draw.PAGES]
    for name in tables:
        assert sum(f"<!-- table {name} -->" in page for page in pages) == 1, name
    for page in pages:
        assert draw.filled(page, tables) == page, "run examples/evidence/draw.py"


def test_the_signals_of_a_seed_are_averaged_as_logarithms() -> None:
    def line(seed: int, updates: int, signal: float, length: int = 8) -> dict[str, Any]:
        arms = {"a": {"signal_ratio": [signal]}, "b": {"signal_ratio": [2.0]}}
        return {"setting": {"seed": seed, "length": length}, "updates": updates, "arms": arms}

    lines = [line(1, 1, 2.0), line(1, 4, 8.0), line(2, 16, 16.0)]
    # The mean must ignore these lines: 8 updates, and another length.
    others = [line(1, 8, 100.0), line(1, 1, 100.0, length=32)]
    found = draw.by_seed(lines + others, 8, "a", "b")
    assert np.exp(found) == pytest.approx([2.0, 8.0])  # sqrt(1 * 4), and 8
    # The wanted values are computed by hand from the mean of log 2 and log 8, and from Student's t
    # for one degree of freedom, 12.706.
    half = 12.706 * math.log(4) / 2
    wanted = [4.0, 4 / math.exp(half), 4 * math.exp(half)]
    assert draw.exponentials(found) == pytest.approx(wanted, rel=1e-3)


def test_the_text_quotes_numbers_of_the_tables() -> None:
    page = draw.PAGE.read_text(encoding="utf-8")
    tables = "\n".join(itertools.chain.from_iterable(draw.all_tables().values()))
    known = set(re.findall(r"\d+(?:\.\d+)?", tables))
    text = page.partition("<!-- quotes -->")[2].partition("<!-- end of quotes -->")[0]
    text = re.sub(r"`[^`]*`", "", text)  # text in backquotes is a setting, not a quoted number
    quoted = re.findall(r"(?<![\w.])\d+\.\d+|\d+(?=%)", text)
    assert len(quoted) > 10
    assert not [number for number in quoted if number not in known]


def test_the_answers_quote_their_own_figures() -> None:
    """Each answer must quote the numbers of its own lines, not numbers of any other line."""
    lines, engine, moved, runs = (
        records.read(records.RESULTS / f"{name}.jsonl")
        for name in ("gradients", "likelihoods", "volatility", "frontier")
    )

    def of(arm: str, length: int, updates: int) -> str:
        return (
            f"{draw.of_arm(draw.select(lines, 'none', length, updates), arm, 'projection')[0]:.2f}"
        )

    def over(arm: str, base: str) -> list[str]:
        found = (draw.by_seed(lines, n, arm, base) for n in (8, 32, 128))
        return [f"{draw.exponentials(each)[0]:.2f}" for each in found]

    def cut(arm: str) -> str:
        return draw.percent(draw.clipped(draw.select(lines, "none", 128, 1), arm))

    def outside(length: str) -> str:
        here = [each["lengths"][length] for each in engine if each["dtype"] == "bfloat16"]
        return f"{100 * draw.interval([each['outside_paper'] for each in here])[0]:.0f}%"

    def change(experts: int, rate: float) -> str:
        return f"{100 * draw.changed(moved, experts, rate, 1).mean():.1f}%"

    def ends(axis: str, value: float, left: str, right: str) -> tuple[float, ...]:
        of_arms = (
            [r for r in runs if (r["axis"], r["arm"]) == (axis, arm) and r["value"] <= value]
            for arm in (left, right)
        )
        return frontier_figure.paired(*of_arms, frontier_figure.end_of)[1:]

    far = draw.select(lines, "none", 128, 16)
    old = [r for r in runs if r["axis"] == frontier_figure.OLD_AXIS]
    assert {r["outcome"] for r in old} == {"converged"}
    gspo, grpo = (ends("learning rate", 5.7e-4, f"{arm}+r2", arm) for arm in ("gspo", "grpo"))
    shifts = [
        ends(frontier_figure.OLD_AXIS, 1, f"{arm}: rollout", f"{arm}: recompute")
        for arm in ("gspo", "grpo")
    ]
    assert all(low < 0 < high for _, low, high in (*shifts, gspo, grpo))
    lower = [
        -ends(frontier_figure.OLD_AXIS, 1, f"{arm}: rollout", f"{arm}: recompute")[0]
        for arm in ("gspo", "gspo 3e-4", "grpo")
    ]
    base, tokens = "gspo unclipped", "grpo unclipped"
    page = " ".join(draw.PAGE.read_text(encoding="utf-8").split())
    for quote in (
        "ratios has {}, {} and {} of the signal-to-noise".format(*over(tokens, base)),
        "by a factor of {}, {} and {}, and".format(*over(f"{tokens} + r2", tokens)),
        f"leaves {of('grpo', 32, 16)} of the step along the policy gradient, GSPO's ±0.1/√L "
        f"{of('gspo ±0.1/√L', 32, 16)}:",
        f"all {len(old)} runs",
        f"log-probs GSPO ends {shifts[0][0]:+.3f} and GRPO {shifts[1][0]:+.3f} from",
        f"GRPO's allows a loss of {-shifts[1][1]:.3f}.",
        "(GSPO by {:.3f}, with the paper's range by {:.3f}, GRPO by {:.3f})".format(*lower),
        f"share of {draw.percent(draw.ratio(far, 'product_sample_share'))} for 128 tokens",
        f"({cut('gspo ±0.1/√L')} against {cut('grpo')}, with 128 tokens after one update)",
        f"({change(8, 1e-3)} of 8 experts at 0.001)",
        f"from {change(8, 1e-4)} (8 experts, 0.0001) to {change(128, 3e-3)} (128 experts, 0.003)",
        f"{draw.ratio(far, 'sequence_deviation'):.4f} measured and "
        f"{draw.ratio(far, 'independent_deviation'):.4f} predicted",
        f"({of(base, 32, 16)} and {of(tokens, 32, 16)} for 32 tokens",
        f"{of('gspo ±0.1/√L', 8, 16)} and {of('grpo', 8, 16)} are left of GSPO's and GRPO's",
        f"keeps {of('gmpo', 128, 16)} of the step",
        "GSPO with r2 ends {:+.3f} ({:+.3f} to {:+.3f})".format(*gspo),
        "GRPO {:+.3f} ({:+.3f} to {:+.3f})".format(*grpo),
        f"more than {-min(gspo[1], grpo[1]):.3f} of the reward is excluded",
        f"{outside('8')} of the responses of 8 tokens and {outside('256')} of the responses of "
        "256 tokens lie outside",
    ):
        assert quote in page, quote


def test_every_figure_is_drawn_from_the_kept_lines(tmp_path: Path) -> None:
    draw.draw_all(tmp_path)
    for name in draw.FIGURES:
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        kept = draw.PICTURES / f"{name}.png"
        assert 5_000 < kept.stat().st_size < 150_000
        assert f"(evidence/{name}.png)" in draw.PAGE.read_text(encoding="utf-8")
    assert (tmp_path / "frontier.png").stat().st_size > 20_000


def test_a_table_has_the_numbers_of_its_lines() -> None:
    lines = [
        {
            "setting": {"experts": 8, "learning_rate": 0.001},
            "changed_experts": {"1": shares, "4": shares, "16": shares},
        }
        for shares in ([0.1, 0.2], [0.3, 0.4])
    ]
    assert draw.volatility_table(lines)[2:] == [
        "| 8 | 0.001 | 2 | 25.0 | 15.0 · 35.0 | 20.0 · 30.0 | 25 | 25 |"
    ]


def test_the_kept_lines_say_how_they_were_made() -> None:
    for name in ("gradients", "likelihoods", "volatility"):
        lines = records.read(records.RESULTS / f"{name}.jsonl")
        assert lines
        for line in lines:
            assert line["setting"]["seed"] > 0 and line["seconds"] > 0 and line["code"]


def test_quick_finds_what_lies_outside(capsys: pytest.CaptureFixture[str]) -> None:
    line = records.read(records.RESULTS / "volatility.jsonl")[0]
    assert quick.outside("volatility", line, line) == 0
    moved = {**line, "changed_experts": {"1": [s + 0.05 for s in line["changed_experts"]["1"]]}}
    assert quick.outside("volatility", moved, line) == len(line["changed_experts"]["1"])
    assert "OUTSIDE" in capsys.readouterr().out
    for name in ("gradients", "likelihoods", "volatility"):
        first = records.read(records.RESULTS / f"{name}.jsonl")[0]
        assert quick.kept_line(name, first) == first
        assert quick.outside(name, first, first) == 0
