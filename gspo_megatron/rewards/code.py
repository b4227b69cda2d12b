"""Judges programs by tests in a sandbox: input and output, calls of a function, or asserts."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import pickle
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError
from gspo_megatron.files import WRONG_VALUES, parse_json
from gspo_megatron.plugins import load_function
from gspo_megatron.process import sandbox
from gspo_megatron.process.sandbox import Limits, Outcome
from gspo_megatron.rewards import assert_names
from gspo_megatron.rewards.registry import register
from gspo_megatron.rewards.results import UnreadableError, read_result
from gspo_megatron.types import Prompt, Reasoned, Sample

TOTAL_SECONDS = 45.0  # default limit for all tests of a response
# Exceptions that the readers of a row raise if its tests have another form than they expect.
_UNREADABLE = (*WRONG_VALUES, zlib.error, pickle.UnpicklingError, EOFError)

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_KINDS = {  # kind of tests -> the fields that rows of this kind have
    "livecodebench": ("public_test_cases", "private_test_cases"),
    "apps": ("input_output",),
    "plain": ("inputs", "outputs"),  # the content of input_output
    "codecontests": ("public_tests", "private_tests", "generated_tests"),
    "mbpp": ("test_list",),
    "humaneval": ("test", "entry_point"),
    "codeforces": ("official_tests",),
}
# A program that writes files and runs the first file. The names of the other files are its
# arguments.
_WITH_FILES = """\
import runpy, sys
for name, content in {files!r}.items():
    with open(name, "wb") as file:
        file.write(content)
sys.argv = {words!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
"""
_WITH_INPUT = "import sys\nopen('input.txt', 'w').write(sys.stdin.read())\n"
_PRINT_OUTPUT = "print(open('output.txt').read())\n"

# Runs programs: the module `sandbox`, or an object with the same functions `run`, `call`, `judge`.
Runner = Any
# A test takes a runner, a program, the limits of one program, and the time (monotonic) at which all
# tests must have ended. It returns why the program failed, or None.
Test = Callable[[Runner, bytes, Limits, float], str | None]


@dataclass(frozen=True)
class Verdict:
    """The result of all tests of a response."""

    passed: int
    tests: int  # number of tests that were run
    reason: str  # why the first failed test failed; "" if none failed


def row_fault(prompt: Prompt) -> str | None:
    """Return why `code` cannot judge responses to a prompt, or None if it can.

    The function reads the tests only if they are asserts, because the names in asserts must be
    resolved."""
    row = _row(prompt.fields, prompt.answer)
    if row.get("interaction_format"):
        return "is an interactive problem, whose tests are no pairs of input and output"
    kind = _kind(row)
    if kind is not None:
        try:
            for _ in _READERS[kind](row, prompt.text) if kind in _READERS else ():
                pass
        except assert_names.NamesError as error:
            return f"cannot be judged: {error}"
        except _UNREADABLE:
            return None  # unreadable tests; `read_tests` will report them
        return None
    names = [name for of_kind in _KINDS.values() for name in of_kind]
    return f"has no tests; allowed: fields of published data sets, {', '.join(names)}"


def machine_fault(options: Mapping[str, Any]) -> str | None:
    """Return why programs cannot run on this machine, or None. Raises RewardError for an invalid
    runner."""
    path = options.get("runner")
    if not (isinstance(path, str) and path):
        return sandbox.fault()
    _runner_class(path)
    return None


def section_fault(section: RewardSection) -> str | None:
    """Return why a call would time out before its tests end, or None if it has enough time."""
    total = section.options.get("total_seconds", TOTAL_SECONDS)
    if section.workers == 0 or total < section.timeout_seconds:
        return None
    limit = f"reward.timeout_seconds = {section.timeout_seconds:g}"
    return (
        f"reward.options.total_seconds = {total:g}: a call fails after {limit}, even if its tests "
        f"have passed until then; allowed: less than {limit}"
    )


@register(
    "code",
    answers=None,
    machine_fault=machine_fault,
    section_fault=section_fault,
    row_fault=row_fault,
    positive=("seconds", "total_seconds", "memory_mb"),
    workers=4,
)
def code(
    sample: Sample,
    fraction: bool = False,
    seconds: float = 10.0,
    total_seconds: float = TOTAL_SECONDS,
    memory_mb: int = 1024,
    runner: str = "",
) -> float:
    """Return 1.0 if the program in the response's last fenced block passes all tests, else 0.0.

    fraction: return the share of passed tests; otherwise testing stops at the first failure.
    seconds: CPU time of one test.
    total_seconds: time of all tests of a response, below reward.timeout_seconds.
    memory_mb: address space of a process.
    runner: "package.module:Class", which runs programs instead of our sandbox. Its objects have the
    functions of `process.sandbox`: always `run`, and also `call` and `judge` if the tests of some
    rows need these.

    Evaluations record the reason of the first failed test. Raises RewardError if the row's tests
    cannot be read, or if the runner lacks a function.
    """
    runs = _runner(runner) if runner else sandbox
    limits = Limits(seconds, memory_mb)
    verdict = judge(sample, limits, total_seconds, stop=not fraction, runner=runs)
    reward = verdict.passed / verdict.tests if fraction else float(not verdict.reason)
    return Reasoned(reward, verdict.reason)


def judge(
    sample: Sample,
    limits: Limits,
    total_seconds: float,
    *,
    stop: bool = True,
    runner: Runner = sandbox,
) -> Verdict:
    """Run the tests. With `stop`, end after the first failed test."""
    program = last_program(sample.response)
    if program is None:
        return Verdict(0, 1, "no fenced block with a program")
    deadline, passed, count, reason = time.monotonic() + total_seconds, 0, 0, ""
    for count, test in enumerate(read_tests(sample), start=1):
        left = deadline - time.monotonic()
        if left <= 0:
            failure: str | None = f"time limit of {total_seconds:g} s for all tests"
        else:  # the wall time of a test may be twice its CPU time
            of_test = replace(limits, seconds=min(limits.seconds, left / 2))
            failure = test(runner, program, of_test, deadline)
        if failure is None:
            passed += 1
        else:
            reason = reason or f"test {count}: {failure}"
            if stop:
                break
    if not count:
        raise RewardError(f"reward 'code': {sample.row_id}: there are no tests")
    return Verdict(passed, count, reason)


def last_program(response: str) -> bytes | None:
    """Return the last fenced block of a response, or None for a response without one."""
    blocks = _BLOCK.findall(response)
    return blocks[-1].encode(errors="replace") if blocks else None


def read_tests(sample: Sample) -> Iterator[Test]:
    """Yield the tests of a row. Raises RewardError if they cannot be read."""
    row = _row(sample.fields, sample.answer)
    kind = _kind(row)
    try:
        if kind == "livecodebench":
            yield from _livecodebench(row)
        elif kind == "apps":
            yield from _input_output(_parsed(row["input_output"]))
        elif kind == "plain":
            yield from _input_output(row)
        elif kind == "codecontests":
            for name in _KINDS[kind]:
                tests = _parsed(row.get(name)) or {"input": [], "output": []}
                yield from _input_output({"inputs": tests["input"], "outputs": tests["output"]})
        elif kind == "codeforces":
            in_files, checker = row.get("input_mode") == "file", row.get("generated_checker")
            for case in row["official_tests"]:
                yield _prints(case["input"], case["output"], in_files=in_files, checker=checker)
        elif kind in _READERS:
            yield from _READERS[kind](row, sample.prompt)
    except _UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward 'code': {sample.row_id}: unreadable tests: {what}") from error


def _mbpp(row: Mapping[str, Any], prompt: str) -> Iterator[Test]:
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
    reference = row.get("code")
    for text in row["test_list"]:
        names = assert_names.resolve(
            [setup], [text], reference if isinstance(reference, str) else ""
        )
        yield _asserts([*names.setup, setup], names.asked, [text])


def _humaneval(row: Mapping[str, Any], prompt: str) -> Iterator[Test]:
    name, call = row["entry_point"], f"check({row['entry_point']})"
    # The tester runs code in a prompt only if this code defines functions that the tests use. Any
    # other code in a prompt may be an example or a template with gaps, which cannot run.
    whole = [text for text in (prompt, row.get("prompt")) if isinstance(text, str)]
    blocks = [block for text in whole for block in _BLOCK.findall(text)]
    reference = next(filter(assert_names.names_in, [*whole, *blocks]), "")
    names = assert_names.resolve([row["test"]], [call], reference, name)
    yield _asserts([*names.setup, row["test"]], names.asked, [call])


_READERS = {"mbpp": _mbpp, "humaneval": _humaneval}  # kinds whose tests are asserts


def _row(fields: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """Return the row's fields. The answer may be one of these fields, or an object with all of
    them."""
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        try:
            answer = parse_json(answer)
        except ValueError:
            answer = None
    return {**fields, **(answer if isinstance(answer, dict) else {})}


def _kind(row: Mapping[str, Any]) -> str | None:
    def fits(kind: str) -> bool:
        found = [bool(row.get(name)) for name in _KINDS[kind]]
        return all(found) if kind in ("plain", "humaneval") else any(found)

    return next(filter(fits, _KINDS), None)


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _livecodebench(row: Mapping[str, Any]) -> Iterator[Test]:
    name = (_parsed(row.get("metadata")) or {}).get("func_name")
    for field in _KINDS["livecodebench"]:
        for case in _cases(row.get(field)):
            if case["testtype"] == "functional":
                if not isinstance(name, str):
                    raise ValueError("metadata.func_name is missing: the function to call")
                arguments = [json.loads(line) for line in case["input"].split("\n") if line]
                yield _returns(name, arguments, [json.loads(case["output"])])
            else:
                yield _prints(case["input"], case["output"])


def _cases(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, str):
        return value or []
    if value.lstrip().startswith("["):
        return json.loads(value)
    # Private tests are published as a compressed pickle of the JSON text.
    return json.loads(_Texts(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load())


class _Texts(pickle.Unpickler):
    """Unpickles only texts; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"a pickle of {module}.{name}")


def _input_output(tests: Mapping[str, Any]) -> Iterator[Test]:
    """Yield the tests of an APPS row: calls of `fn_name` if it is set, else input and output."""
    name = tests.get("fn_name")
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        if name:
            # The answer may be wrapped in a list with one element. Both forms are accepted.
            is_wrapped = isinstance(expected, list) and len(expected) == 1
            yield _returns(name, given, [expected, *(expected if is_wrapped else ())])
        else:
            sides = (given, expected)
            yield _prints(*("\n".join(t) if isinstance(t, list) else t for t in sides))


def _prints(
    input_text: str, expected: str, *, in_files: bool = False, checker: str | None = None
) -> Test:
    """Return a test of an output. in_files: the program reads input.txt and writes output.txt.
    checker: a program that prints 1 for a right output, if several outputs are right."""
    stdin, expected_bytes = input_text.encode(), expected.encode()
    checker_program = (checker or "").encode()

    def test(runner: Runner, program: bytes, limits: Limits, deadline: float) -> str | None:
        if in_files:
            wrapped = _WITH_INPUT + _with_files({"solution.py": program}) + _PRINT_OUTPUT
            program = wrapped.encode()
        outcome = _outcome(runner, "run", program, stdin, limits)
        if outcome.failure is not None:
            return outcome.failure
        if not checker_program:
            printed = outcome.stdout.decode(errors="replace")
            return None if same_output(printed, expected) else "wrong output"
        files = {
            "checker.py": checker_program,
            "input.txt": stdin,
            "correct_output.txt": expected_bytes,
            "solution_output.txt": outcome.stdout,
        }
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return "its checker: time limit for all tests"
        limits = replace(limits, seconds=min(limits.seconds, remaining / 2))
        verdict = _outcome(runner, "run", _with_files(files).encode(), b"", limits)
        if verdict.failure is not None:
            return f"its checker: {verdict.failure}"
        return None if verdict.stdout.split()[-1:] == [b"1"] else "wrong output"

    return test


def _with_files(files: Mapping[str, bytes]) -> str:
    """Return a program that writes the files and runs the first file, with the names of the other
    files as arguments."""
    return _WITH_FILES.format(files=dict(files), words=list(files))


def _outcome(runner: Runner, name: str, *arguments: Any) -> Outcome:
    """Call a function of the runner and check the type of its result."""
    function = getattr(runner, name, None)
    if function is None:
        raise RewardError(
            f"reward.options.runner: {type(runner).__name__} has no function {name!r}, which the "
            "tests of some rows need"
        )
    outcome = function(*arguments)
    if not isinstance(outcome, Outcome):
        raise RewardError(
            f"reward.options.runner: {name!r} of {type(runner).__name__} returned a "
            f"{type(outcome).__name__}; allowed: gspo_megatron.process.sandbox.Outcome"
        )
    return outcome


@cache
def _runner(path: str) -> Runner:
    """Return the user's runner. Each process makes only one object of the class."""
    return _runner_class(path)()


def _runner_class(path: str) -> type:
    key = "reward.options.runner"
    runner_class = load_function(key, path, RewardError, "class")
    if not isinstance(runner_class, type) or not callable(getattr(runner_class, "run", None)):
        raise RewardError(f"{key} = {path}: is no class with a function 'run'")
    return runner_class


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, line by line and word by word. Numbers with a decimal
    point may differ by 1e-6."""
    rows = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return all(
        x is not None and y is not None and (x == y or _are_close(x, y))
        for line, other in itertools.zip_longest(*rows, fillvalue=[None])
        for x, y in itertools.zip_longest(line, other)
    )


def _are_close(printed: str, expected: str) -> bool:
    if "." not in expected:
        return False
    try:
        return math.isclose(float(printed), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _returns(name: str, arguments: list[Any], accepted: list[Any]) -> Test:
    """Return a test of a function's result. Any of the values in `accepted` counts as right."""
    if not (isinstance(name, str) and isinstance(arguments, list)):
        raise TypeError("a call wants the name of a function and a list of arguments")

    def test(runner: Runner, program: bytes, limits: Limits, deadline: float) -> str | None:
        outcome = _outcome(runner, "call", program, name, arguments, limits)
        if outcome.failure is not None:
            return outcome.failure
        try:
            result = read_result(outcome.result)
            is_right = any(result.equals(value) for value in accepted)
        except UnreadableError as error:  # the solution wrote other bytes instead of a result
            return str(error)
        return None if is_right else "wrong result"

    return test


def _asserts(setup: Sequence[str], candidates: Sequence[str], tests: Sequence[str]) -> Test:
    def test(runner: Runner, program: bytes, limits: Limits, deadline: float) -> str | None:
        outcome = _outcome(runner, "judge", program, setup, candidates, tests, limits)
        if outcome.failure is None and outcome.result != b"passed":
            return "the program ended before the test was complete"
        return outcome.failure

    return test
