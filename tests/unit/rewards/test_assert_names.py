"""The names that asserts use. A name comes from the row's tests, unless the row asks the solution
for it. A solution gains nothing if it defines names for which the row does not ask."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gspo_megatron.errors import RewardError
from gspo_megatron.process.sandbox import Limits
from gspo_megatron.rewards.assert_names import Names, NamesError, resolve
from gspo_megatron.rewards.code import judge, row_fault
from gspo_megatron.types import Prompt, Sample

REFERENCE = """
import math
from collections import Counter as Bag
class Pair:
    pass
def close(a, b):
    return abs(a - b) < 1
def volume(r):
    return 4 / 3 * math.pi * r**3
"""


# Modules that are not there, or do something when they are imported.
NOT_IMPORTED = ("os.nothing", "msvcrt", "venv.__main__", "antigravity", "no_such_module")


@pytest.mark.parametrize(
    ("test", "imports", "asked"),
    [
        ("assert f(1) == 2", [], ["f"]),
        ("assert math.isclose(volume(10), 4188.79)", ["import math"], ["volume"]),
        ("assert isclose(volume(10), 4188.79)", ["from math import isclose"], ["volume"]),
        ("assert f('aab') == Counter('aab')", ["from collections import Counter"], ["f"]),
        ("assert np.allclose(f(1), [2])", ["import numpy as np"], ["f"]),
        ("assert gcd(12, 18) == 6", [], ["gcd"]),  # the task may be to write gcd
        ("assert isclose(lcm(4, 6), 12)", ["from math import isclose"], ["lcm"]),
        ("assert longest([Pair(1, 2)], 1) == 1", [], ["longest", "Pair"]),
        ("assert decode(encode('a')) == 'a'", [], ["decode", "encode"]),
        ("assert is_prime(7) == True", [], ["is_prime"]),
        ("assert all(f(x) == x for x in range(3))", [], ["f"]),
        ("from math import *\nassert isclose(f(1), sqrt(2))", [], ["f"]),
        ("def near(a, b): return a == b\nassert near(f(1), 2)", [], ["f"]),
        ("try:\n f(1)\nexcept KeyError as error: assert error", [], ["f"]),
        *((f"from {name} import *\nassert f(1) == 2", [], ["f"]) for name in NOT_IMPORTED),
        ("assert (", [], []),  # the tests will fail and report the error
    ],
)
def test_what_the_tester_knows_is_his(test: str, imports: list[str], asked: list[str]) -> None:
    assert resolve([], [test]) == Names(tuple(imports), tuple(asked))
    assert "antigravity" not in sys.modules


def test_the_rows_own_code_tells_more() -> None:
    assert resolve([], ["assert close(volume(1), 4)"], REFERENCE) == Names(
        (REFERENCE,), ("volume",)
    )
    found = resolve([], ["assert volume(Pair()) == Bag()"], REFERENCE)
    assert found == Names(("from collections import Counter as Bag",), ("volume", "Pair"))
    # Python also has a function of this name.
    assert resolve([], ["assert sum([1]) == 1"], "def sum(x): pass").asked == ("sum",)
    assert resolve(["root = Node(1)"], ["assert height(root) == 1"]).asked == ("Node", "height")


@pytest.mark.parametrize(
    "test",
    [
        "assert near(f(1), 2)",
        "assert near(f(1), 2) == True",
        "assert not differs(f(1), 2)",
        "assert all(near(f(x), x) for x in range(3))",
        "assert f(1) and near(f(2), 3)",
        "assert f(1) == expected(1)",
    ],
)
def test_a_helper_that_would_judge_is_refused(test: str) -> None:
    with pytest.raises(NamesError, match="which would be the solution's own.*test_setup_code"):
        resolve([], [test])
    fault = row_fault(Prompt("p", None, "rows:1", fields={"test_list": [test]}))
    assert fault is not None and fault.startswith("cannot be judged: its tests judge ")


# --- in a sandbox ---------------------------------------------------------------------------------


def verdict(program: str, prompt: str = "", **fields: Any) -> str:
    response = f"```python\n{program}\n```"
    given = Sample(prompt, None, response, truncated=False, fields=fields, row_id="rows:1")
    return judge(given, Limits(5.0, 256), 30.0).reason


RIGHT = "def volume(r):\n    return 4.18879020478639 * r ** 3\n"
WRONG = "def volume(r):\n    return 0\n"
ALL_TRUE = (
    "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    fabs = lambda x: 0\n"
    "isclose = near = poly = lambda *a, **k: True\n"
    "class Same:\n    def __eq__(self, other): return True\n"
)


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("assert math.isclose(volume(10), 4188.790204786391, rel_tol=0.001)", ""),
        ("assert isclose(volume(10), 4188.790204786391)", ""),
        ("assert near(volume(10), 4188.79)", "def near(a, b):\n    return abs(a - b) < 0.01\n"),
    ],
)
def test_published_asserts_without_an_import(test: str, code: str) -> None:
    row = {"test_list": [test], "code": code}
    assert verdict(RIGHT, **row) == ""
    assert verdict(WRONG + ALL_TRUE, **row) == "test 1: AssertionError"
    assert verdict(RIGHT + ALL_TRUE, **row) == ""


def test_helpers_of_a_prompt_that_is_no_code() -> None:
    """The prompt is HumanEval's find_zero inside a chat message."""
    row = {
        "entry_point": "find_zero",
        "test": "def check(f):\n    assert math.fabs(poly([1, 2], f([1, 2]))) < 1e-4\n",
    }
    prompt = (
        "Complete this:\n```python\ndef poly(xs, x):\n    return xs[0] + xs[1] * x\n"
        "def find_zero(xs):\n    '''Find x with poly(xs, x) == 0.'''\n```\n"
    )
    right = "def find_zero(xs):\n    return -xs[0] / xs[1]\n"
    wrong = "def find_zero(xs):\n    return 7\npoly = lambda xs, x: 0\n"
    assert verdict(right, prompt, **row) == ""
    assert verdict(wrong, prompt, **row) == verdict(wrong + ALL_TRUE, prompt, **row) != ""
    with pytest.raises(RewardError, match="rows:1: unreadable tests: .*judge the solution by poly"):
        verdict(right, "Find a zero.", **row)


@pytest.mark.parametrize(
    "prompt",
    [
        "Write add. Answer as\n```python\nYOUR_CODE\n```\n",
        "Answer as\n```python\ndef add(a, b):\n    ...\nprint(YOUR_TEST)\n```\n",
        "Double",  # this text is also a Python expression
    ],
)
def test_code_of_a_prompt_that_the_tests_do_not_need_is_not_run(prompt: str) -> None:
    row = {"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3\n"}
    assert verdict("def add(a, b):\n    return a + b", prompt, **row) == ""
    assert verdict("def add(a, b):\n    return a", prompt, **row) == "test 1: AssertionError"


@pytest.mark.parametrize("name", ["gcd", "sum", "poly"])
def test_a_helper_of_the_prompt_wins_over_the_library(name: str) -> None:
    """The prompt may also describe the form of the answer before it defines the helper."""
    row = {"entry_point": "f", "test": f"def check(f):\n    assert f(4) == {name}([4], 6)\n"}
    prompt = (
        f"Answer as\n```python\nYOUR_CODE\n```\nGiven is\n```python\nSTEP: int = 3\n"
        f"def {name}(x, y):\n    return 'own'\n```\n"
    )
    assert verdict("def f(x):\n    return 'own'", prompt, **row) == ""
    assert verdict(f"def f(x):\n    return 1\ndef {name}(x, y):\n    return 1", prompt, **row) == (
        "test 1: AssertionError"
    )
    text = f"STEP: int = 3\ndef {name}(x, y):\n    return 'own'\n"
    names = resolve([row["test"]], ["check(f)"], text, "f")
    assert names == Names((text,), ("f",))
    assert resolve(["def check(f): return STEP"], ["check(f)"], text, "f") == names


def test_only_what_is_wanted_is_asked_of_the_solution() -> None:
    """If the tests use a name that the row does not ask for, a definition in the solution does not
    help."""
    row = {"entry_point": "f", "test": "def check(f):\n    assert f(1) == globals()['two']\n"}
    assert verdict("two = 2\ndef f(x): return 2", **row).startswith("test 1: KeyError")
