"""examples/distillation: the commands in its README, with few steps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_megatron.data.toy import write_toy_dataset
from tests.e2e.resuming import all_records
from tests.programs import ROOT, run_program

FOLDER = ROOT / "examples" / "distillation"
FEW = {"sft": ["training.steps=20"], "train": ["training.steps=2", "logging.plots=false"]}

pytestmark = pytest.mark.slow


def test_no_noun_of_the_held_out_sentences_is_in_the_training_prompts(tmp_path: Path) -> None:
    run_program(sys.executable, FOLDER / "make_copies.py", "-o", tmp_path)
    nouns = {}
    for name, count in (("train", 1000), ("test", 128)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len({row["prompt"] for row in rows}) == count
        assert all(row["prompt"].endswith(f"\n{row['answer']}") for row in rows)
        words = [row["answer"].rstrip(".").split() for row in rows]
        nouns[name] = {sentence[at] for sentence in words for at in (2, 7)}
    assert len(nouns["test"]) == 10
    assert len(nouns["train"]) == 30
    assert not nouns["train"] & nouns["test"]


def test_a_teacher_without_experts_is_refused(tmp_path: Path) -> None:
    program = (sys.executable, FOLDER / "spoil.py", tmp_path, tmp_path / "student")
    assert "model.safetensors: no such file" in run_program(*program, expect=2).stderr
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "has no experts" in run_program(*program, expect=2).stderr
    assert not (tmp_path / "student").exists()


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Run all commands of the page in order, with fewer prompts and fewer steps."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    write_toy_dataset(tmp_path / "runs" / "distillation" / "data", "mixed", 400, 40, seed=1)
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:1]
    seen = []
    for line in block.replace("\\\n", " ").splitlines():
        words = line.replace("examples/", f"{ROOT}/examples/").split()
        if words[0] == "gspo-megatron":
            program = (sys.executable, "-m", "gspo_megatron")
            run_program(*program, *words[1:], *FEW.get(words[1], []), cwd=tmp_path)
        elif words[1] != "-m":  # the command that makes the data is skipped
            run_program(sys.executable, *words[1:], cwd=tmp_path)
        seen.append(words[1])
    assert seen == ["-m", "sft", f"{FOLDER}/spoil.py", "train", "evaluate"]
    folder = tmp_path / "runs" / "distillation"
    teacher, student = (load_file(folder / n / "model.safetensors") for n in ("teacher", "student"))
    assert {n for n in teacher if not teacher[n].equal(student[n])} == {
        n for n in teacher if ".experts." in n
    }
    last = all_records(folder / "run")[-1]
    assert last["step"] == 2 and last["distill/kl"] != 0 and "evaluation/held_out/mean" in last
