"""The scripts in examples/ name a path that they cannot use, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

# For each script, its arguments. `absent` does not exist, and `file` is no folder.
READERS = {
    "evaluation/codeforces.py": ("rating", "absent", "--standings", "absent"),
    "evidence/frontier_figure.py": ("--results", "absent"),
    "preferences/plot.py": ("absent", "-o", "plot.png"),
    "smollm2_moe/evidence.py": ("absent",),
    "tiny_cpu/answer.py": ("absent", "--prompts", "absent", "-o", "answers.json"),
    "tiny_cpu/table.py": ("absent", "absent", "absent"),
    "tiny_cpu/tokenize_text.py": ("absent",),
}
# The arguments, and the damaged file among the files that they name.
DAMAGED = {
    "evidence/frontier_figure.py": (("--results", "results.jsonl"), "results.jsonl"),
    "tiny_cpu/answer.py": ((".", "--prompts", "test.jsonl", "-o", "answers.json"), "test.jsonl"),
    "tiny_cpu/table.py": ((".", ".", "."), "answers.json"),
    "tiny_cpu/tokenize_text.py": ((".",), "corpus.jsonl"),
}
WRITERS = (
    *(f"{folder}/make_data.py" for folder in ("ablation", "code", "preferences", "tool_use")),
    "distillation/make_copies.py",
    "evidence/long_addition.py",
    "smollm2_moe/make_prompts.py",
)


def refusal(script: str, *words: str, cwd: Path) -> str:
    path = ROOT / "examples" / script
    done = run_program(sys.executable, path, *words, cwd=cwd, expect=2)
    return done.stderr.splitlines()[-1]  # libraries may print warnings before it


@pytest.mark.parametrize("script", READERS)
def test_a_path_that_does_not_exist(script: str, tmp_path: Path) -> None:
    assert refusal(script, *READERS[script], cwd=tmp_path).startswith("absent")


@pytest.mark.parametrize("script", DAMAGED)
def test_a_damaged_file(script: str, tmp_path: Path) -> None:
    words, name = DAMAGED[script]
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / name).write_text('{"text": \n')
    assert refusal(script, *words, cwd=tmp_path).startswith(f"{name}:")


@pytest.mark.parametrize("script", WRITERS)
def test_a_folder_that_cannot_be_made(script: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refusal(script, "-o", "file/data", cwd=tmp_path)
    assert line.startswith("file/data") and "Not a directory" in line


def test_a_damaged_model(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "model.safetensors").write_bytes(b"damaged")
    line = refusal("distillation/spoil.py", "teacher", "student", cwd=tmp_path)
    assert line.startswith("teacher/model.safetensors: not a safetensors file: ")
