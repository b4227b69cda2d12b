"""examples/evidence: the rules that judge the runs of frontier.py, and the task of these runs."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "evidence"))

import frontier
import long_addition
from frontier_figure import TABLES, Cell, cells, draw, edge, paired
from frontier_rule import (
    LAST,
    all_seeds,
    interval,
    largest_that_holds,
    last_good_checkpoint,
    lowest,
    outcome,
)
from long_addition import NUMBERS, careless_row, right_steps, row
from megatron.core.transformer.moe import moe_utils
from records import read
from scipy import stats
from vllm_engine import joined, widen_heads, with_void_rows

from gspo_megatron.types import Sample

EVIDENCE = Path(long_addition.__file__).parent


@pytest.fixture(autouse=True)
def no_losses_of_other_models() -> None:
    """Reset the auxiliary losses. Megatron-Core keeps them for the whole process, for the layers of
    the first model."""
    tracker = getattr(moe_utils, "get_moe_layer_wise_logging_tracker", dict)
    tracker().clear()


def curve(*parts: tuple[float, int]) -> list[float]:
    """Rewards from pairs of a value and the number of steps with it."""
    return [value for value, count in parts for _ in range(count)]


# The limits are computed by hand. A run that starts at a reward of 0.4 has converged if the mean of
# its last rewards is at least 0.7, and it has collapsed if this mean is below 0.2.
@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        (curve((0.4, 10), (0.7, LAST)), "converged"),
        (curve((0.4, 10), (0.69, LAST)), "stuck"),
        (curve((0.4, 10), (0.2, LAST)), "stuck"),
        (curve((0.4, 10), (0.19, LAST)), "collapsed"),
        (curve((0.4, 5), (0.0, 20), (0.9, LAST)), "converged"),  # falls and recovers
        (curve((0.4, 5), (0.9, 20), (0.0, LAST)), "collapsed"),  # rises and falls
        # the mean of the last steps, 0.72, decides
        (curve((0.9, 20), (0.0, 1), (0.9, LAST - 1)), "converged"),
    ],
)
def test_the_end_of_a_run_decides_its_outcome(rewards: list[float], ends: str) -> None:
    assert outcome(rewards, start=0.4) == ends


def test_outcome_is_measured_from_the_start() -> None:
    rewards = curve((0.61, 20))
    # with this start, a run has converged if its last rewards are at least 0.6
    assert outcome(rewards, start=0.2) == "converged"
    assert outcome(rewards, start=0.5) == "stuck"


def test_a_collapse_is_resumed_from_the_newest_checkpoint_that_was_still_good() -> None:
    # There are checkpoints at steps 10, 20 and 30. The mean of the five steps before step 20 is
    # 0.4; before step 30 it is lower.
    assert last_good_checkpoint(curve((0.4, 25), (0.1, 15)), start=0.4) == 20
    assert last_good_checkpoint(curve((0.4, 26), (0.39, 14)), start=0.4) == 20
    assert last_good_checkpoint(curve((0.5, 30), (0.0, 10)), start=0.4) == 30
    assert last_good_checkpoint(curve((0.3, 40)), start=0.4) == 0
    # The state after the last step is not a checkpoint.
    assert last_good_checkpoint(curve((0.4, 40)), start=0.4) == 30


def test_lowest_is_the_lowest_mean_of_five_steps() -> None:
    assert lowest(curve((0.4, 6), (0.0, 3), (0.4, 6))) == pytest.approx(0.16)


@pytest.mark.parametrize("count", [1, 2, 7, 11])
def test_bisection_finds_every_edge_with_few_questions(count: int) -> None:
    values = [2.0**n for n in range(count)]
    for number in range(count + 1):  # the first `number` values fulfil the condition
        asked: list[float] = []

        def holds(value: float, number: int = number, asked: list[float] = asked) -> bool:
            asked.append(value)
            return value in values[:number]

        assert largest_that_holds(values, holds) == (values[number - 1] if number else None)
        assert len(asked) <= count.bit_length()
        assert len(set(asked)) == len(asked)


def test_no_seed_is_run_after_the_first_that_fails() -> None:
    asked: list[int] = []

    def passes(seed: int) -> bool:
        asked.append(seed)
        return seed != 3

    assert not all_seeds(passes)
    assert asked == [1, 2, 3]
    assert all_seeds(lambda seed: True)


def test_intervals_are_those_of_clopper_and_pearson() -> None:
    # If no run or every run succeeds, the closed form is 1 - (alpha/2)^(1/n). The third value is
    # from a published table.
    assert interval(5, 5) == pytest.approx((0.025**0.2, 1.0))
    assert interval(0, 5) == pytest.approx((0.0, 1 - 0.025**0.2))
    assert interval(1, 10) == pytest.approx((0.0025, 0.4450), abs=5e-5)


def test_answers_of_the_task_are_sums() -> None:
    made = row(15, 23)
    assert made["prompt"] == "f-1MD="
    numbers = [made["answer"][at : at + 3] for at in range(0, len(made["answer"]), 3)]
    values = [10 * int(n[2]) + "abcdefghij".index(n[0]) for n in numbers]
    assert values == [(15 + 23 * k) % 100 for k in range(1, NUMBERS + 1)]
    # 5+3, 8+3 with a carry, 1+3, 4+3, 7+3 with a carry
    assert [n[1] for n in numbers[:5]] == list("-+--+")


def graded(response: str, prompt: str = "f-1MD=") -> float:
    return right_steps(Sample(prompt=prompt, answer="", response=response, truncated=False))


def test_reward_counts_the_numbers_that_follow_from_the_one_before() -> None:
    right = row(15, 23)["answer"]
    assert graded(right) == 1.0
    assert graded("") == 0.0
    assert graded(right[:30]) == pytest.approx(10 / NUMBERS)
    assert graded(right + "a") == pytest.approx(NUMBERS / (NUMBERS + 1))
    # A group of characters that is no number makes itself and the next number wrong.
    assert graded("9" + right[1:]) == pytest.approx((NUMBERS - 2) / NUMBERS)
    # A wrong carry makes only its own number wrong, because the next number depends on units and
    # tens.
    assert graded(right[:1] + "+" + right[2:]) == pytest.approx((NUMBERS - 1) / NUMBERS)
    # A wrong sum makes one number wrong, if the later numbers continue from it.
    goes_on = "a-0" + row(0, 23)["answer"][: 3 * (NUMBERS - 1)]
    assert graded(goes_on) == pytest.approx((NUMBERS - 1) / NUMBERS)


def test_careless_answers_have_the_stated_share_of_mistakes() -> None:
    source = random.Random(1)
    rows = [careless_row(n % 100, 1 + n % 99, source) for n in range(400)]
    share = sum(graded(r["answer"], r["prompt"]) for r in rows) / len(rows)
    # With 8,400 numbers, the standard error is 0.005.
    assert share == pytest.approx(1 - long_addition.MISTAKES, abs=0.02)


def cell(value: float, outcomes: str) -> Cell:
    """A cell with one run for each letter: c (converged), s (stuck) or x (collapsed)."""
    named = {"c": "converged", "s": "stuck", "x": "collapsed"}
    return Cell(value, [{"outcome": named[letter]} for letter in outcomes])


def test_an_edge_needs_all_seeds_and_no_failure_below_it() -> None:
    row = [cell(1, "c"), cell(2, "ccccc"), cell(3, "cc"), cell(4, "cs"), cell(5, "ccccc")]
    good, bad = edge(row, "converged")
    # Values 1 and 3 have too few seeds, and value 5 is above a failure.
    assert good is row[1]
    assert bad is row[3]
    assert edge(row, "not collapsed") == (row[4], None)
    assert edge([cell(1, "x")], "not collapsed")[0] is None


def test_runs_are_compared_with_those_of_the_same_value_and_seed() -> None:
    def line(value: float, seed: int, reward: float) -> dict[str, float]:
        return {"value": value, "seed": seed, "reward": reward}

    right = [line(1, 1, 0.5), line(1, 2, 0.7), line(2, 1, 0.1), line(2, 3, 0.9)]
    left = [line(2, 1, 0.3), line(1, 2, 0.9), line(1, 1, 0.4), line(3, 1, 0.0)]
    count, gap, low, high = paired(left, right, lambda each: each["reward"])
    # By hand: the differences are 0.2, 0.2 and -0.1, and Student's t is 4.303 for two degrees of
    # freedom.
    assert (count, gap) == (3, pytest.approx(0.1))
    error = math.sqrt(0.03 / 3)
    assert (low, high) == pytest.approx((0.1 - 4.3027 * error, 0.1 + 4.3027 * error), abs=1e-4)


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_a_step_gets_the_responses_of_older_weights(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "STEPS", 6)
    loop = SimpleNamespace(updates=0)
    loop.roll_out = lambda step: (step, loop.updates)
    frontier.Ahead(loop, staleness)
    found = []
    for step in range(1, 7):
        found.append(loop.roll_out(step))
        loop.updates += 1
    assert found == [(step, max(0, step - 1 - staleness)) for step in range(1, 7)]


def test_wider_heads_compute_the_same(tmp_path: Path) -> None:
    """transformers computes both models, and knows nothing of the construction."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,  # makes attention far from uniform
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.5, 2.0)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 32, (2, 20))
    with torch.no_grad():
        before = model(tokens).logits
        widen_heads(tmp_path)
        wide = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path).eval()
        assert wide.config.head_dim == 32
        torch.testing.assert_close(wide(tokens).logits, before, rtol=1e-4, atol=1e-4)
    assert float(before.std()) > 1


def test_an_engines_responses_become_flat() -> None:
    tokens = joined([[1, 2], [3]], np.array([4, 5, 6]), np.array([1, 2]))
    assert tokens.tolist() == [1, 2, 4, 3, 5, 6]
    # The experts of all tokens, except the last token of each sequence.
    routes = np.arange(1, 5)[:, None, None]
    assert with_void_rows(routes, np.array([3, 3])).flatten().tolist() == [1, 2, 0, 3, 4, 0]


def test_quoted_tables_are_those_of_the_kept_lines() -> None:
    text = (EVIDENCE.parents[1] / "docs" / "stability_frontier.md").read_text(encoding="utf-8")
    records = read(EVIDENCE / "results" / "frontier.jsonl")
    for name, table in TABLES.items():
        quoted = text.partition(f"<!-- table {name} -->")[2].partition("<!-- end -->")[0]
        assert quoted.strip().split("\n") == table(records), name


def test_the_answer_quotes_the_kept_lines() -> None:
    text = (EVIDENCE.parents[1] / "docs" / "stability_frontier.md").read_text(encoding="utf-8")
    answer = " ".join(text.partition("**Answer.**")[2].partition("![Map")[0].split())
    records = read(EVIDENCE / "results" / "frontier.jsonl")

    def row(axis: str, arm: str) -> list[Cell]:
        return cells(records, axis, arm)

    def largest(axis: str, arm: str) -> float:
        found = edge(row(axis, arm), "converged")[0]
        assert found is not None
        return found.value

    def counts(axis: str, arm: str, value: float, outcome: str = "converged") -> str:
        (found,) = (cell for cell in row(axis, arm) if cell.value == value)
        return f"{found.count(outcome)} of {len(found.lines)}"

    rate, noisy = "learning rate", "learning rate, noisy routers"
    exact = [(rate, arm) for arm in ("gspo", "grpo", "gspo+r2", "grpo+r2")]
    assert {largest(*pair) for pair in exact} == {5.7e-4}
    assert {largest(noisy, arm) for arm in ("gspo", "grpo", "gspo+r3", "grpo+r3")} == {5.7e-4}
    assert largest(rate, "gspo, no clip") == 4e-4
    assert "5.7e-4 for GSPO and for GRPO" in answer and "GSPO converges up to 4e-4 only" in answer
    assert edge(row("staleness", "gspo"), "converged")[0].value == 2
    for quote in (
        f"({counts('mini-batches', 'grpo', 64)} seeds of GRPO and "
        f"{counts('mini-batches', 'gspo', 64)} of GSPO converge with 64)",
        f"4 steps old, {counts('staleness', 'grpo', 4)} seeds of GRPO and "
        f"{counts('staleness', 'gspo', 4)} of GSPO converge",
        f"({counts(rate, 'gspo, no clip', 5.7e-4)} seeds at 5.7e-4)",
        f"at 5.7e-4 {counts(rate, 'grpo, tight clip', 5.7e-4)} seeds converge",
    ):
        assert quote in answer, quote
    lost = [counts(rate, arm, 1.6e-3, "collapsed") for arm in ("grpo", "gspo")]
    assert lost == ["5 of 5", "1 of 5"]
    assert "all 5 seeds of GRPO collapse and 1 of 5 of GSPO" in answer
    p = stats.fisher_exact([[5, 0], [1, 4]]).pvalue
    assert f"p = {p:.3f}" in answer
    for value in (1.1e-3, 1.6e-3):
        ends = [next(c for c in row(rate, a) if c.value == value).ends for a in ("gspo", "grpo")]
        assert f"{np.mean(ends[0]) - np.mean(ends[1]):.2f}" == "0.17"
    assert "higher by 0.17 at 1.1e-3 and at 1.6e-3" in answer


def test_the_map_is_drawn_from_the_kept_lines(tmp_path: Path) -> None:
    records = read(EVIDENCE / "results" / "frontier.jsonl")
    assert draw(records, tmp_path / "frontier.png").stat().st_size > 20_000


def test_kept_outcomes_follow_from_the_kept_rewards() -> None:
    for line in read(EVIDENCE / "results" / "frontier.jsonl"):
        assert line["outcome"] == outcome(line["rewards"], line["rewards"][0]), line
        assert (line["heals"] is not None) == (line["outcome"] == "collapsed"), line


@pytest.mark.parametrize("arm", ["gspo+r3", "grpo+r2"])
def test_a_run_measures_what_one_update_changes(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small change is proportional to the learning rate, because each weight changes in
    proportion to it. Each token uses all 8 experts here. Otherwise some tokens would change their
    experts, and log-probs would jump."""
    monkeypatch.setattr(frontier, "STEPS", 1)
    long_addition.make_data(tmp_path)
    laboratory = frontier.Laboratory(tmp_path / "results.jsonl", tmp_path / "scratch")
    own = [
        *("model.checkpoint_path=null", "model.preset=tiny", "model.megatron={moe_router_topk: 8}"),
        *(f"data.prompts={tmp_path}/train.jsonl", f"data.eval_prompts={tmp_path}/test.jsonl"),
        f"data.tokenizer={tmp_path}/tokenizer.model",
        *("rollout.prompts_per_step=2", "rollout.max_response_tokens=8"),
        *("objective.mini_batches=2", "training.evaluation_prompts=1"),
        "reward.import_path=long_addition:right_steps",
    ]
    reached = []
    for rate in (1e-5, 2e-5):
        overrides = [*own, *frontier.ARMS[arm], f"optimizer.learning_rate={rate}"]
        monkeypatch.setattr(long_addition, "right_steps", lambda sample: len(set(sample.response)))
        reached.append(laboratory.train(overrides, seed=1))
    first, second = (line["update_change"] for line in reached)
    assert second == pytest.approx(2 * first, rel=0.02)
    assert reached[1]["update_k3"] == pytest.approx(4 * reached[0]["update_k3"], rel=0.05)
    # k3 is half of the mean square, and the mean square is at least the square of the mean.
    assert 2 * reached[0]["update_k3"] > first**2 > 0
    assert len(reached[0]["rewards"]) == 1
