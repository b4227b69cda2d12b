"""The table of suites that is printed in the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_megatron.evaluation.scores import ProblemResponses, suite_figures
from gspo_megatron.observe.metrics_files import MetricsWriter
from gspo_megatron.observe.suite_table import print_suites


@pytest.mark.parametrize(
    ("is_wrong", "told"), [(False, "1 problem left out"), (True, "counted as wrong")]
)
def test_it_says_how_many_rewards_failed_and_what_became_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_wrong: bool, told: str
) -> None:
    rewards = ([1.0, 0.0], [1.0, float("nan")])
    problems = [
        ProblemResponses(r, [x == 1.0 for x in r], [None] * 2, [False] * 2, [3, 3]) for r in rewards
    ]
    metrics: dict[str, object] = {"step": 0}
    for name, found in (
        ("a[red]", suite_figures(problems, 2, failed_is_wrong=is_wrong)),
        ("whole", suite_figures(problems[:1], 2)),
    ):
        metrics |= {f"evaluation/{name}/{key}": value for key, value in found.items()}
    with MetricsWriter(tmp_path) as writer:
        writer.write(metrics)
    print_suites(tmp_path)
    out = capsys.readouterr().out
    assert f"\na[red]: 1 call of the reward failed: {told}\n" in out
    assert out.count("failed") == 1
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["a[red]"])
    # no interval: there is only one problem, or all problems have the same mean
    assert "–" in row
    assert row[1:4] == (["2", "2", "0.500"] if is_wrong else ["1", "2", "0.500"])
