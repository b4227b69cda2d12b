"""Tasksets of the package verifiers, with vLLM servers, for twenty steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import run_program
from tests.tasksets import hangman_words, letters, run_settings, sums_taskset
from tests.verifiers_environment import find_verifiers_python
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("taskset", "options"),
    [("textarena", {"game": "Hangman-v0"}), ("my-sums", {"num_tasks": 6})],
)
def test_a_taskset_trains_for_twenty_steps(
    vllm_python: Path, tmp_path: Path, taskset: str, options: dict[str, object]
) -> None:
    python = find_verifiers_python()
    words = str(hangman_words(tmp_path / "nltk", ["cat", "dog"]))
    folder = tmp_path if taskset == "textarena" else sums_taskset(str(python), tmp_path)
    letters(folder / "letters")
    settings = run_settings(folder, taskset, python)
    run = make_run(
        folder,
        vllm_python,
        model={"max_sequence_length": 4096, "preset": "tiny"},
        data=settings["data"],
        environment=settings["environment"] | {"options": {"taskset": options}},
        rollout=settings["rollout"],
        training={"steps": 20, "precision": "fp32", "evaluation_interval": 0},
    )
    program = ("-m", "gspo_megatron", "tasks", "config.yaml", "-n", 6, "-o", "tasks.jsonl")
    environ = {"NLTK_DATA": words}
    run_program(sys.executable, *program, environ=environ, cwd=folder)
    run.finish(run.start(**environ), seconds=3000)
    steps = run.steps()
    assert [record["step"] for record in steps] == list(range(1, 21))
    for record in steps:
        # The servers generated exactly the tokens that are trained on. Otherwise the difference
        # would be about 1.
        assert record["mismatch/abs_mean"] <= 1e-5, record["step"]
        assert record["environment/errors"] == 0, record["step"]
