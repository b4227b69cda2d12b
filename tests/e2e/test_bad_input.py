"""What a user does wrong ends in exit code 2 and a line that says what, and in no traceback."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.programs import gspo

REWARDS = """
def strict(sample):
    raise KeyError("no such field")
def nan(sample):
    return float("nan")
"""


def refused(config_file: Path, *words: str, **environ: str) -> str:
    """Standard error of `train`, which must fail as a user's mistake."""
    path = str(config_file.parent)
    return gspo("train", config_file, *words, expect=2, PYTHONPATH=path, **environ).stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        # all at once, with the nearest names
        (
            ("objective.clip_lo=0.1", "rollout.group_size=eight", "model.megatron.hiden_size=64"),
            ("objective.clip_lo .*clip_low", "rollout.group_size .*eight", "hiden_size .*hidden_"),
        ),
        (("parallel.layout=tp=2,pp=2", "--nproc=3"), ("3", "tensor_model_parallel_size|world")),
        (("parallel.layout=pp=3,ep=3",), ("layers", "expert")),
        (("data.prompts={folder}/nowhere.jsonl",), ("{folder}/nowhere.jsonl",)),
        (("data.tokenizer={folder}/rewards.py",), ("{folder}/rewards.py",)),
        (("reward.import_path=rewards:strict",), ("no such field", "prompt", "response")),
        # which ends all ranks
        (("parallel.layout=tp=2", "reward.import_path=rewards:nan"), ("nan", "prompt")),
    ],
)
def test_a_mistake_is_named(
    config_file: Path, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    folder = config_file.parent
    (folder / "rewards.py").write_text(REWARDS)
    errors = refused(config_file, *(word.format(folder=folder) for word in words))
    assert [each for each in named if not re.search(each.format(folder=folder), errors)] == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": "ab>", "answer": ', "JSON"),
        ('{"prompt": "ab>"}', "answer"),
        ('{"prompt": "", "answer": "x"}', "empty"),
        (json.dumps({"prompt": "a" * 200 + ">", "answer": "x"}), "201"),
    ],
)
def test_a_bad_prompt_line_is_named_with_its_file_and_number(
    config_file: Path, tmp_path: Path, line: str, named: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ab>", "answer": "ba"}\n' + line + "\n")
    errors = refused(config_file, f"data.prompts={path}")
    assert f"{path}:2" in errors and named in errors


def test_a_port_in_use_is_named(config_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused(config_file, "parallel.layout=dp=2", MASTER_PORT=port)
