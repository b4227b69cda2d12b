"""A run with the real command whose reward is a judge that compares the responses of a group."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import write_config
from tests.e2e.resuming import make_small, records, train
from tests.unit.rewards.judges import Answer, Judge

pytestmark = pytest.mark.slow

STEPS = 2
QUESTION = re.compile(r"<<(.*?)>> <<(.*?)>>", re.DOTALL)


def value(response: str) -> int:
    return zlib.crc32(response.encode()) % 97


def right(question: str) -> str:
    """The answer of a judge that slightly prefers the response that is shown first, and that gives
    no verdict about some pairs."""
    [(first, second)] = QUESTION.findall(question)
    difference = value(first) + 20 - value(second)
    said = "A" if difference > 0 else "B"
    return "Hm." if (value(first) + value(second)) % 11 == 0 else f"Verdict: {said}"


@contextlib.contextmanager
def judging(answer: Answer) -> Iterator[Judge]:
    judge = Judge(answer)
    try:
        yield judge
    finally:
        judge.close()


def config_in(toy: Path, folder: Path) -> Path:
    folder.mkdir()
    options = {"mode": "pairs", "url": "http://127.0.0.1:1/v1", "model": "judge", "seconds": 20.0}
    options |= {"template": "{prompt} <<{first}>> <<{second}>>", "comparisons": 4}
    return make_small(
        write_config(toy, folder),
        data={"eval_prompts": None},
        reward={"import_path": None, "name": "llm_judge", "options": options, "retries": 1},
        training={"steps": STEPS},
        checkpoint={"interval": 10},
    )


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run on two ranks."""
    path = config_in(toy, tmp_path_factory.mktemp("undisturbed") / "whole")
    with judging(right) as judge:
        train(path, "parallel.layout=dp=2", f"reward.options.url={judge.url}")
    return path.parent / "run"


def test_win_rates_are_rewards_and_figures_are_metrics(undisturbed: Path) -> None:
    steps = records(undisturbed)
    assert [record["step"] for record in steps] == [*range(1, STEPS + 1)]
    for record in steps:
        # the two win rates of a pair add up to 1
        assert record["reward/mean"] == pytest.approx(0.5)
        assert 0 < record["reward/consistent"] <= 1
        assert 0 <= record["reward/ties"] < 1 and 0 <= record["reward/unreadable"] < 0.5
    assert any(record["reward/unreadable"] > 0 for record in steps)
    assert any(record["reward/std"] > 0.1 for record in steps)


def test_what_cannot_be_compared_is_refused(toy: Path, tmp_path: Path) -> None:
    path = config_in(toy, tmp_path / "refused")
    words = ("rollout.group_size=6", f"data.eval_prompts={toy / 'test.jsonl'}")
    result = train(path, *words, expect=2)
    assert result.stderr.splitlines() == [
        "data.eval_prompts: reward llm_judge cannot score a single response, and each of these "
        "prompts gets only one; allowed: null; evaluation.suites have rewards of their own",
        "reward.options.comparisons = 4: does not connect the 6 responses of a group; allowed: at "
        "least 5, or 0 for all 15 pairs",
    ]
