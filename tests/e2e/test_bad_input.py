"""What a user does wrong ends in exit code 2 and a line that says what, and in no traceback."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Command

Train = Callable[..., str]


@pytest.fixture
def refused(gspo: Command, config_file: Path, tmp_path: Path) -> Train:
    """Standard error of `train`, which must fail as a user's mistake."""

    def train(*words: object, **environ: str) -> str:
        environ |= {"PYTHONPATH": str(tmp_path)}
        return gspo("train", config_file, *words, expect=2, **environ).stderr

    return train


def test_all_config_errors_come_at_once_with_the_nearest_names(refused: Train) -> None:
    lines = refused(
        "objective.clip_lo=0.1", "rollout.group_size=eight", "model.megatron.hiden_size=64"
    ).splitlines()
    assert any("objective.clip_lo" in line and "clip_low" in line for line in lines)
    assert any("rollout.group_size" in line and "eight" in line for line in lines)
    assert any("hiden_size" in line and "hidden_size" in line for line in lines)


def test_a_layout_that_the_world_size_does_not_hold(refused: Train) -> None:
    errors = refused("parallel.layout=tp=2,pp=2", "--nproc", 3)
    assert "3" in errors
    assert "tensor_model_parallel_size" in errors or "world" in errors


def test_a_layout_that_the_model_does_not_divide_by(refused: Train) -> None:
    errors = refused("parallel.layout=pp=3,ep=3")
    assert "num_layers" in errors or "layers" in errors
    assert "expert" in errors


def test_a_missing_prompt_file(refused: Train, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonl"
    assert str(missing) in refused(f"data.prompts={missing}")


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
    refused: Train, tmp_path: Path, line: str, named: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ab>", "answer": "ba"}\n' + line + "\n")
    errors = refused(f"data.prompts={path}")
    assert f"{path}:2" in errors
    assert named in errors


def test_an_unreadable_tokenizer(refused: Train, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"not a model")
    assert str(path) in refused(f"data.tokenizer={path}")


def test_a_reward_that_raises_is_named_with_prompt_and_response(
    refused: Train, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def strict(sample):\n    raise KeyError('no such field')\n"
    )
    errors = refused("reward.import_path=my_rewards:strict")
    assert "no such field" in errors
    assert "prompt" in errors
    assert "response" in errors


def test_a_reward_that_is_not_a_number_ends_all_ranks(refused: Train, tmp_path: Path) -> None:
    (tmp_path / "nan_rewards.py").write_text("def nan(sample):\n    return float('nan')\n")
    errors = refused("parallel.layout=tp=2", "reward.import_path=nan_rewards:nan")
    assert "nan" in errors
    assert "prompt" in errors


def test_a_port_in_use_is_named(refused: Train) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        errors = refused("parallel.layout=dp=2", MASTER_PORT=str(port))
    assert str(port) in errors
