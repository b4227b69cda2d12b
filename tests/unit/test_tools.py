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
