"""The scripts in tools/ start: their imports work, and their help describes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

SCRIPTS = [path for path in (ROOT / "tools").rglob("*.py") if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_is_printed(script: Path) -> None:
    assert "--help" in run_program(sys.executable, script, "--help").stdout


@pytest.mark.parametrize("lengths", ["2000", "6000,2000"])
def test_wrong_lengths_of_simulated_responses_are_refused(lengths: str) -> None:
    script = ROOT / "tools" / "bench" / "service.py"
    done = run_program(sys.executable, script, "--lengths", lengths, expect=2, timeout=60)
    assert "is not MEDIAN,P90" in done.stderr
