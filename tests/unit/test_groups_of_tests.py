"""`make test` shares the tests out among processes. Tests with a common fixture stay together."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import shares_with_its_file
from tests.programs import ROOT


def test_one_process_runs_all_tests_of_a_file() -> None:
    """pytest 9.2 changed the names of tests in a way that pytest-xdist 3.8 does not know. Then the
    tests of a file, and those of a server, were spread over all processes without a warning."""
    words = [
        "-v",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "--no-loadscope-reorder",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/unit/test_gpus_hidden.py"],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    workers = re.findall(r"^\[(gw\d)\].* PASSED", done.stdout, re.MULTILINE)
    assert len(workers) > 5 and len(set(workers)) == 1


@pytest.fixture(scope="module")
def shared() -> None:
    """A fixture that is made once for all tests of this file."""


def test_a_fixture_of_the_module_keeps_its_tests_together(
    request: pytest.FixtureRequest, shared: None
) -> None:
    assert shares_with_its_file(request.node)


def test_other_fixtures_do_not(request: pytest.FixtureRequest) -> None:
    assert not shares_with_its_file(request.node)
