"""Training on tasksets of the package verifiers: one from textarena, and one that the scaffold of
verifiers creates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.resuming import all_records
from tests.programs import run_program
from tests.tasksets import hangman_words, letters, run_settings, sums_taskset
from tests.verifiers_environment import find_verifiers_python

# long, because the first test installs verifiers, maybe beside other tests
pytestmark = pytest.mark.timeout(900)


def train(folder: Path, taskset: str, options: str, **environ: str) -> list[dict[str, float]]:
    """Train two steps in a folder, with the model itself as the engine."""

    def command(*words: object) -> str:
        program, is_new = (sys.executable, "-m", "gspo_megatron"), words[0] == "tasks"
        return run_program(*program, *words, environ=environ, cwd=folder, is_new=is_new).stdout

    python = find_verifiers_python()
    letters(folder / "letters")
    settings = yaml.safe_dump(run_settings(folder, taskset, python))
    (folder / "config.yaml").write_text(settings)
    words = ("config.yaml", f"environment.options={options}")
    told = command("tasks", *words, "-n", 6, "-o", "tasks.jsonl")
    assert told == f"tasks.jsonl: 6 tasks of {taskset}\n"
    command("check", *words)
    command("train", *words)
    records = all_records(folder / "run")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["mismatch/abs_mean"] <= 1e-5  # the captured tokens are those of the policy
        assert record["environment/errors"] == 0
    return records


def test_a_game_of_textarena(tmp_path: Path) -> None:
    words = str(hangman_words(tmp_path / "nltk", ["cat", "dog"]))
    options = "{taskset: {game: Hangman-v0}}"
    for record in train(tmp_path, "textarena", options, NLTK_DATA=words):
        assert 1 < record["environment/turns"] <= 3  # after a wrong move, the policy may try again
        assert 0 < record["environment/sampled_share"] < 1


def test_a_taskset_of_the_scaffold(tmp_path: Path) -> None:
    place = sums_taskset(str(find_verifiers_python()), tmp_path)
    for record in train(place, "my-sums", "{taskset: {num_tasks: 6}}"):
        assert record["environment/turns"] == 1
