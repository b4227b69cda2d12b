"""Each mistake of a user ends the command with exit code 2 and one line that names the mistake,
without a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import gspo

REWARDS = """
def nan(sample):
    return float("nan")
"""


def refused(config_file: Path, *words: str, **environ: str) -> str:
    """Run `train`, which must refuse its input. Returns its standard error."""
    path = str(config_file.parent)
    return gspo("train", config_file, *words, expect=2, PYTHONPATH=path, **environ).stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        # All mistakes are reported at once, and each message names the most similar right name.
        (
            ("objective.clip_lo=0.1", "rollout.group_size=eight", "model.megatron.hiden_size=64"),
            ("objective.clip_lo .*clip_low", "rollout.group_size .*eight", "hiden_size .*hidden_"),
        ),
        (("data.prompts={folder}/prompts.jsonl",), ("{folder}/prompts.jsonl:2.*answer",)),
        # If one rank refuses its input, all ranks end.
        (("parallel.layout=tp=2", "reward.import_path=rewards:nan"), ("nan", "prompt")),
    ],
)
def test_a_mistake_is_named(
    config_file: Path, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    folder = config_file.parent
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text('{"prompt": "ab>", "answer": "ba"}\n{"prompt": "ab>"}\n')
    errors = refused(config_file, *(word.format(folder=folder) for word in words))
    assert [each for each in named if not re.search(each.format(folder=folder), errors)] == []
