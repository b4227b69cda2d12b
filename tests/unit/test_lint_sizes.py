"""The lint of docstrings: the faults that it finds. The package itself has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gspo_megatron

ROOT = Path(gspo_megatron.__file__).parents[1]
LINT = ROOT / "tools" / "lint_sizes.py"


def told(*words: str | Path) -> tuple[int, str]:
    command = [sys.executable, LINT, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, done.stdout


def test_a_docstring_that_begins_with_a_preposition_is_named(tmp_path: Path) -> None:
    room = tmp_path / "gspo_megatron" / "rewards"
    room.mkdir(parents=True)
    file = room / "new.py"
    file.write_text('"""Rewards."""\n\n\ndef f():\n    """Of each, the sum."""\n')
    assert told(tmp_path) == (
        1,
        f"{file}:4: the docstring begins with 'Of'; begin with a verb, or with what it is\n",
    )
    file.write_text('"""Rewards."""\n\n\ndef f():\n    """The sum of each. As before."""\n')
    assert told(tmp_path) == (0, "")


def test_the_package_keeps_the_rule() -> None:
    assert told("gspo_megatron") == (0, "")
