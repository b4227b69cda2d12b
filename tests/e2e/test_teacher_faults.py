"""The server of a teacher fails in the middle of a run. The run ends with one line and loses
nothing. The server is part of the test's process; tests/vllm uses a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.rollout.asking import PROBE
from tests.e2e.conftest import write_config
from tests.e2e.failing_server import STEPS, assert_no_finished_step_is_lost
from tests.e2e.resuming import make_small, train
from tests.programs import run_program
from tests.unit.rollout.model_server import killed
from tests.unit.rollout.test_teacher import served

pytestmark = pytest.mark.slow

K = 3


def right(given: dict[str, Any]) -> dict[str, Any]:
    """A server's right answer. Its log-probs depend on the earlier tokens only."""
    tokens, entries = given["prompt"], []
    assert given["prompt_logprobs"] == K
    for number, token in enumerate(tokens):
        seed = sum(tokens[:number])
        found = {(7 + seed + 5 * each) % 53: -1.5 - each - seed % 9 / 10 for each in range(K)}
        found.setdefault(token, -6.0)
        entries.append({str(each): {"logprob": value} for each, value in found.items()})
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


def config_in(toy: Path, folder: Path) -> Path:
    folder.mkdir()
    distillation = {"url": "http://127.0.0.1:1/v1", "form": "reverse_kl_topk", "top_k": K}
    return make_small(
        write_config(toy, folder),
        reward={"retries": 1, "timeout_seconds": 5.0},
        objective={"distillation": distillation},
        training={"steps": STEPS},
        checkpoint={"interval": 10},
    )


def train_with(
    toy: Path, answer: Callable[[dict[str, Any]], Any], path: Path, *, expect: int = 0
) -> str:
    """Run the command. Returns its stderr."""
    tokens = load_tokenizer(toy / "tokenizer.model").encode(PROBE)
    with served(answer, tokens, []) as url:
        return train(path, f"objective.distillation.url={url}", expect=expect).stderr


def test_played_episodes_need_no_teacher(toy: Path, tmp_path: Path) -> None:
    path = config_in(toy, tmp_path / "run")  # nobody listens at the URL of its teacher
    command = (sys.executable, "-m", "gspo_megatron", "play", path, "--episodes", "1")
    played = run_program(*command)
    assert "episodes: 1, mean reward 0" in played.stdout and "distillation" not in played.stderr


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run."""
    path = config_in(toy, tmp_path_factory.mktemp("undisturbed") / "whole")
    train_with(toy, right, path)
    return path.parent / "run"


def test_a_teacher_that_fails_loses_no_finished_step(
    toy: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """tests/unit/rollout/test_teacher.py has the other faults of a server."""
    path = config_in(toy, tmp_path / "broken")
    failed = assert_no_finished_step_is_lost(
        partial(train_with, toy), path, undisturbed, right, (killed, "ServerDisconnectedError")
    )
    assert failed.startswith("objective.distillation.url = http://127.0.0.1:")
