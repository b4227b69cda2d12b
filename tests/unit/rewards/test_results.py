"""Results of solutions, checked outside of the sandbox: right results, and forged results of all
kinds."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import pytest

from gspo_megatron.process.sandbox import Limits
from gspo_megatron.process.sandbox_harness import encode
from gspo_megatron.rewards import results
from gspo_megatron.rewards.code import judge
from gspo_megatron.rewards.results import UnreadableError, read_result
from gspo_megatron.types import Sample


def same(found: Any, wanted: Any) -> bool:
    return read_result(json.dumps(encode(found)).encode()).equals(wanted)


@pytest.mark.parametrize(
    ("found", "wanted", "is_same"),
    [
        (1, 1, True),
        (True, 1, True),
        (1, 2, False),
        (0.3333333, 0.33333334, True),
        (1, 1.0, True),
        (1.0000001, 1, False),
        (10**400, 0.5, False),
        (-(10**400), -1e308, False),
        (10**400, 10**400, True),
        (float("inf"), 0.5, False),
        (float("nan"), 0.5, False),
        ("a", "a", True),
        ("1", 1, False),
        (None, None, True),
        ((1, (2.0000001, "x")), [1, [2.0, "x"]], True),
        ([1, 2], [1], False),
        ({1: "a", "b": [None]}, {"b": [None], "1": "a"}, True),
        ({1: "a"}, {"1": "b"}, False),
        ({1: "a"}, {}, False),
        ({(1, "x"): 2}, {"(1, 'x')": 2}, True),
        ({1.5: 2, None: 3, True: 4}, {"1.5": 2, "None": 3, "True": 4}, True),
        ({1: "a", "1": "b"}, {"1": "b"}, True),  # the last value of a key counts, as in JSON
        ({1, 2}, [1, 2], False),
        (frozenset(), [], False),
        (b"a", "a", False),
        (1j, 1, False),
    ],
)
def test_values_are_compared_as_json(found: Any, wanted: Any, is_same: bool) -> None:
    assert same(found, wanted) == is_same


FORGED = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a bare number": b"1",
    "a bare float": b"1e999",
    "a bare NaN": b"NaN",
    "a bare list": b"[1]",
    "ten thousand digits": b"1" * 10_000,
    "an unknown kind": b'{"object":1}',
    "a method of a module": b'{"print":["x"]}',
    "two kinds": b'{"int":"1","float":"0x1p0"}',
    "no kind": b"{}",
    "no digits": b'{"int":"x"}',
    "a number for digits": b'{"int":1}',
    "a list for digits": b'{"int":["1"]}',
    "a float beyond all": b'{"float":"0x1p99999"}',
    "no float": b'{"float":null}',
    "a text for a list": b'{"list":"abc"}',
    "an object for a list": b'{"list":{"int":"1"}}',
    "a pair of three": b'{"dict":[["a",null,null]]}',
    "a text for a pair": b'{"dict":["ab"]}',
    "a dictionary as a key": b'{"dict":[[{"dict":[]},null]]}',
    "a key of many digits": b'{"dict":[[{"int":"' + b"f" * 9999 + b'"},null]]}',
    "deep": b'{"list":[' * 100_000 + b"]}" * 100_000,
    "deep, without an end": b'{"list":[' * 100_000,
    "deep keys": b'{"dict":[[' * 50_000,
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_no_result_is_named(name: str) -> None:
    with pytest.raises(UnreadableError, match="^no result$"):
        read_result(FORGED[name])


EQUAL = (1 << 61) - 1  # all multiples of this number have the same hash


def test_equal_hashes_cost_nothing() -> None:
    """A set or dictionary of 60,000 values with equal hashes would take minutes."""
    items = [f'{{"int":"{n * EQUAL:x}"}}' for n in range(1, 60_000)]
    began = time.process_time()
    of_set = '{"set":[' + ",".join(items) + "]}"
    of_dict = '{"dict":[' + ",".join(f"[{item},null]" for item in items) + "]}"
    for text in (of_set, of_dict, f'{{"list":[{of_set},{of_dict}]}}'):
        assert not read_result(text.encode()).equals([1])
    assert time.process_time() - began < 20


def test_reading_and_comparing_have_a_limit() -> None:
    told = json.dumps(encode([[]] * 1000)).encode()
    assert read_result(told).equals([[]] * 1000)
    with pytest.raises(UnreadableError, match="takes too long to read"):
        read_result(told, seconds=-1.0)
    late = results.Result([[]] * 1000, time.monotonic() - 1)
    with pytest.raises(UnreadableError, match="takes too long to compare"):
        late.equals([[]] * 1000)
    # By default, reading a result may take some seconds. The whole call may take
    # `reward.timeout_seconds`.
    assert inspect.signature(read_result).parameters["seconds"].default <= 10


# --- from a sandbox -------------------------------------------------------------------------------

FORGE = """
import os
told = {told}
def f(x):
    for number in range(3, 64):
        try:
            left = told
            while left: left = left[os.write(number, left):]
        except OSError: pass
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return 10 ** 400", "wrong result"),
        ("def f(x): return -10 ** 5000", "wrong result"),
        ("def f(x): return float('nan')", "wrong result"),
        ("def f(x):\n a = []\n for _ in range(10**5): a = [a]\n return a", "RecursionError"),
        ("def f(x):\n a = []\n a.append(a)\n return a", "RecursionError"),
        ("def f(x): return '\\ud800'", "wrong result"),
        ("def f(x): return {10 ** 9999: 1}", "no result"),
        (FORGE.format(told='b\'{"float":"0x1p99999"}\''), "no result"),
    ],
)
def test_no_solution_raises(program: str, reason: str) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [0.5]}}
    response = f"```python\n{program}\n```"
    given = Sample("", None, response, truncated=False, fields=row, row_id="rows:1")
    began = time.process_time()
    assert judge(given, Limits(10.0, 512), 60.0).reason.startswith(f"test 1: {reason}")
    assert time.process_time() - began < 10  # CPU time of this process
