"""The recipes of examples/evaluation. They read rows in the published formats and judge
responses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.load import parse_suites, suites_of_file
from gspo_megatron.config.schema import SuiteSection, suite_key
from gspo_megatron.data.formats import field_map
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.rewards.registry import check_answers, suite_rewards
from gspo_megatron.types import Prompt, Sample
from tests.programs import ROOT, run_program

FOLDER = ROOT / "examples" / "evaluation"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MATH = [name for name in RECIPES if name not in ("livecodebench", "codeforces")]
CODEFORCES = FOLDER / "codeforces.py"


def read(name: str, *overrides: str) -> tuple[SuiteSection, list[Prompt]]:
    """A recipe of the example, and its prompts, which are read from the example's folder `rows`."""
    suites: dict[str, Any] = suites_of_file(str(FOLDER / f"{name}.yaml"))
    rows = FOLDER / "rows" / f"{name}.jsonl"
    words = [f"evaluation.suites.{name}.prompts={rows}", *overrides]
    suite = parse_suites(suites, words).suites[name]
    return suite, load_prompts(rows, field_map(suite, suite_key(name)), chat_template=True)


def test_there_is_a_recipe_for_each_file_of_rows() -> None:
    assert sorted(path.stem for path in (FOLDER / "rows").iterdir()) == RECIPES
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.yaml`" in readme for name in RECIPES)


@pytest.mark.parametrize("name", MATH)
def test_right_answers_are_right_and_others_wrong(name: str) -> None:
    suite, prompts = read(name)
    reward = suite_rewards({name: suite})[name]
    check_answers(reward, prompts)
    right = {
        "aime24": ["33", "401"],
        "aime25": ["124", "336"],
        "math500": [r"\tfrac34", r"(2, 3\pi/2)"],
        "gsm8k": ["43", "2400"],
    }[name]
    for prompt, answer in zip(prompts, right, strict=True):
        assert prompt.text.endswith(r"within \boxed{}.") and "$n$" not in prompt.text[:2]
        for text, expected in ((answer, 1.0), ("5", 0.0)):
            response = rf"First \boxed{{1}}, no: \boxed{{{text}}}."
            sample = Sample(prompt.text, prompt.answer, response, False, prompt.fields)
            assert reward(sample) == expected, (prompt.answer, text)


def test_the_window_of_livecodebench_has_both_its_days() -> None:
    suite, prompts = read("livecodebench")
    assert suite.reward.name == "code" and suite.samples == 8
    assert [prompt.row_id for prompt in prompts] == ["own_2", "own_3"]
    for prompt in prompts:
        assert {"public_test_cases", "private_test_cases", "metadata"} <= prompt.fields.keys()
        assert prompt.answer is None
    assert prompts[1].text.rstrip().endswith("def add(self, a: int, b: int) -> int:")
    months = "evaluation.suites.livecodebench.filter={field: contest_date, first: 2025-03}"
    assert [prompt.row_id for prompt in read("livecodebench", months)[1]] == ["own_4"]


def test_rows_outside_of_every_window_and_without_dates_are_told(tmp_path: Path) -> None:
    suite, _ = read("livecodebench")
    fields = field_map(suite, "evaluation.suites.x")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question_content": "a", "starter_code": "", "contest_date": 7}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: field 'contest_date' is a number; a date"):
        load_prompts(path, fields)
    path.write_text(path.read_text().replace("7", '"1999-01-01", "question_id": 1'))
    with pytest.raises(ValueError, match=r"no row lies in the window; allowed: another evaluation"):
        load_prompts(path, fields)


def test_problems_of_codeforces_are_judged_by_their_checkers(tmp_path: Path) -> None:
    path, name = tmp_path / "problems.jsonl", "codeforces"
    run_program(
        sys.executable, CODEFORCES, "problems", FOLDER / "rows" / f"{name}.jsonl", "-o", path
    )
    suite = parse_suites(suites_of_file(str(FOLDER / f"{name}.yaml")), []).suites[name]
    prompts = load_prompts(path, field_map(suite, suite_key(name)), chat_template=True)
    assert [prompt.row_id for prompt in prompts] == ["9001/A", "9001/B"]
    assert "Example input\n6\n\nExample output\n2" in prompts[1].text
    reward = suite_rewards({name: suite})[name]
    check_answers(reward, prompts)
    programs = {
        "print(sum(map(int, input().split())))": [1.0, 0.0],
        "n = int(input())\nprint(max(x for x in range(1, n) if n % x == 0))": [0.0, 1.0],
        "print(1)": [0.0, 0.0],
    }
    for program, wanted in programs.items():
        response = f"```python\n{program}\n```"
        samples = [Sample(p.text, None, response, False, p.fields) for p in prompts]
        assert [reward(sample) for sample in samples] == wanted, program


def rated(path: Path, correct: dict[str, list[bool | None]]) -> list[str]:
    """The lines that codeforces.py prints for these responses."""
    records = [
        {"suite": "codeforces", "row_id": row_id, "sample": number, "correct": is_correct}
        for row_id, responses in correct.items()
        for number, is_correct in enumerate(responses)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in reversed(records)))
    words = ("rating", path, "--standings", FOLDER / "standings")
    return run_program(sys.executable, CODEFORCES, *words).stdout.splitlines()


def test_responses_become_submissions_and_a_rating(tmp_path: Path) -> None:
    """The contest has four rated participants. Participants without a rating and later submissions
    do not count."""
    path = tmp_path / "evaluation.jsonl"
    given = {"9001/A": [True, False], "9001/B": [False, True, False], "9002/A": [True]}
    contest, missing, rating = rated(path, given)
    # The points are 500 and 1000 - 50. The best participant has the same sum.
    assert contest.startswith("contest 9001: 2 problems, 1450 points, place 1.5 of 5, rating ")
    assert missing.startswith("contest 9002: left out, no ")
    (number,) = {float(line.split("rating ")[1].split(",")[0]) for line in (contest, rating)}
    below = sum(1 / (1 + 10 ** ((number - other) / 400)) for other in (2100, 1700, 1500, 1300))
    assert 1 + below == pytest.approx(1.5, abs=2e-3)
    worst = rated(path, {"9001/A": [False, None], "9001/B": [None]})
    assert worst[0].startswith("contest 9001: 0 problems, 0 points, place 5 of 5, rating 0")
