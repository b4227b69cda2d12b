"""`gspo-megatron new`, and the use of its folder as the command's output describes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.programs import gspo, run_program

VOCABULARY = 320


def new(tmp_path: Path, *words: object) -> tuple[Path, str]:
    """Run `gspo-megatron new`. Returns the new folder, and the output."""
    return tmp_path / "my run", gspo("new", tmp_path / "my run", *words).stdout


def printed_command(text: str) -> list[str]:
    """The command that `new` prints for this machine, as words for bash, with two steps."""
    [command] = re.findall(r"on this machine: +(.+)", text)
    return ["bash", "-euc", f"{command} training.steps=2 rollout.max_response_tokens=8"]


def test_without_a_model_the_printed_command_trains(tmp_path: Path) -> None:
    folder, printed = new(tmp_path)
    run_program(*printed_command(printed), cwd="/")
    steps = (folder / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps][-1] == 2
    assert "reward/mean" in json.loads(steps[-1])
    assert not list(tmp_path.glob(".*"))  # no staging folder is left
