"""The command `tasks`; tests/e2e/test_verifiers.py runs it with real tasksets."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.cli.conftest import Command, ConfigWriter, refused


def test_an_existing_file_stays(gspo: Command, write_config: ConfigWriter, tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    out.write_text("mine\n")
    taskset = ("environment.verifiers=sums", f"environment.python={sys.executable}")
    lines = refused(gspo, "tasks", write_config(), *taskset, "-n", 3, "-o", out)
    assert lines == [f"--output {out}: is there already; allowed: a new file"]
    assert out.read_text() == "mine\n"
