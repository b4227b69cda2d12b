"""On-policy distillation by the real command: a teacher from a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.conftest import write_config
from tests.e2e.resuming import make_small, records, train
from tests.unit.hf.published import write_model


def a_folder(path: Path, toy: Path, seed: int, **changes: Any) -> Path:
    """A published model with the toy task's tokenizer."""
    write_model(path, "qwen3_moe", seed=seed, vocab_size=53, **changes)
    shutil.copy(toy / "tokenizer.model", path)
    return path


def distilling(toy: Path, folder: Path, teacher: Path, **objective: Any) -> Path:
    """A run without rewards, of a student that begins elsewhere than its teacher."""
    student = a_folder(folder / "student", toy, seed=9)
    path = make_small(write_config(toy, folder), data={"eval_prompts": None})
    config = yaml.safe_load(path.read_text())
    config["model"], config["reward"] = {"hf_path": str(student)}, {"name": "none"}
    config["objective"] = {"mini_batches": 2, "distillation": {"teacher": str(teacher)}} | objective
    config["rollout"] |= {"prompts_per_step": 16}
    config["optimizer"] = {"learning_rate": 1.0e-2, "epsilon": 1.0e-5}
    config["training"] |= {"steps": 20}
    config["checkpoint"] = {}
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_student_without_rewards_comes_closer_to_its_teacher(toy: Path, tmp_path: Path) -> None:
    teacher = a_folder(tmp_path / "teacher", toy, seed=10)
    train(distilling(toy, tmp_path, teacher, name="grpo"))
    found = [record["distill/kl"] for record in records(tmp_path / "run")]
    assert len(found) == 20 and found[0] > 0.05
    assert sum(found[-4:]) < 0.65 * sum(found[:4])


def test_a_teacher_with_the_students_weights_teaches_nothing(toy: Path, tmp_path: Path) -> None:
    config = distilling(toy, tmp_path, tmp_path / "student")
    # the router's own loss has a gradient, too; the rollout's log-probs differ by rounding
    exact = ["model.megatron.moe_aux_loss_coeff=0.0", "objective.old_logprobs=recompute"]
    train(config, "training.steps=1", *exact)
    [record] = records(tmp_path / "run")
    assert record["distill/kl"] == 0 and record["grad_norm"] == 0


def test_what_is_no_teacher_is_told_in_one_line(toy: Path, tmp_path: Path) -> None:
    wider = a_folder(tmp_path / "wider", toy, seed=1, hidden_size=96)
    config = distilling(toy, tmp_path, wider)
    [line] = train(config, expect=2).stderr.splitlines()
    assert "wider/config.json: megatron.hidden_size is 96, and 44" in line
    [line] = train(config, "objective.distillation.teacher=gone", expect=2).stderr.splitlines()
    assert line.startswith("gone") or "gone" in line
    other = a_folder(tmp_path / "other", toy, seed=1)
    (other / "tokenizer.model").unlink()
    [line] = train(config, f"objective.distillation.teacher={other}", expect=2).stderr.splitlines()
    assert str(other / "tokenizer.model") in line
    alone = train(config, "objective.distillation.teacher=null", expect=2).stderr.splitlines()
    assert alone == [
        "reward.name = 'none': there is nothing to learn from without "
        "objective.distillation.teacher or url; allowed: another reward"
    ]
