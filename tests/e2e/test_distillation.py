"""On-policy distillation with the real command and a teacher from a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import write_config
from tests.e2e.resuming import make_small, records, train
from tests.unit.hf.published import write_model


def a_folder(path: Path, toy: Path, seed: int, **changes: Any) -> Path:
    """The folder of a random published model with the tokenizer of the toy task."""
    write_model(path, "qwen3_moe", seed=seed, vocab_size=53, **changes)
    shutil.copy(toy / "tokenizer.model", path)
    return path


def distilling(toy: Path, folder: Path, teacher: Path, **objective: Any) -> Path:
    """The configuration of a run without rewards. Student and teacher have different weights."""
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


@pytest.mark.parametrize(
    # tests/parallel compares the gradients of all forms with the formulas
    "form",
    ["reverse_kl", pytest.param("forward_kl_topk", marks=pytest.mark.full)],
)
def test_a_student_without_rewards_comes_closer_to_its_teacher(
    toy: Path, tmp_path: Path, form: str
) -> None:
    teacher = a_folder(tmp_path / "teacher", toy, seed=10)
    train(distilling(toy, tmp_path, teacher, name="grpo"), f"objective.distillation.form={form}")
    found = [record["distill/kl"] for record in records(tmp_path / "run")]
    assert len(found) == 20 and found[0] > 0.05
    assert sum(found[-4:]) < 0.65 * sum(found[:4])


def test_a_teacher_with_the_students_weights_teaches_nothing(toy: Path, tmp_path: Path) -> None:
    config = distilling(toy, tmp_path, tmp_path / "student")
    # Two other sources of a gradient are turned off: the router's own loss, and the rounding of the
    # rollout's log-probs.
    exact = ["model.megatron.moe_aux_loss_coeff=0.0", "objective.old_logprobs=recompute"]
    # Weight decay would change the student before the second update.
    exact += ["optimizer.weight_decay=0.0"]
    train(config, "training.steps=1", "objective.distillation.form=forward_kl_topk", *exact)
    [record] = records(tmp_path / "run")
    assert record["distill/loss"] == 0 and record["distill/greedy_agreement"] == 1
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
    assert f"{other}: a folder without tokenizer.json" in line
    damaged = a_folder(tmp_path / "damaged", toy, seed=1)
    for file in damaged.glob("*.safetensors"):
        tensors = load_file(file)
        if (weight := tensors.get("model.norm.weight")) is not None:
            weight[3] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    told = train(config, f"objective.distillation.teacher={damaged}", expect=2).stderr
    [line] = [line for line in told.splitlines() if "not finite" in line]
    assert line.startswith(f"{damaged}: this teacher has weights that are not finite; ")
    later = f"{{objective: {{distillation: {{teacher: {wider}}}}}}}"
    phases = f"training.phases=[{{until_step: 1}}, {later}]"
    student = f"objective.distillation.teacher={tmp_path / 'student'}"
    [line] = train(config, student, "checkpoint.interval=1", phases, expect=2).stderr.splitlines()
    assert line.startswith("training.phases[1]: ") and "megatron.hidden_size is 96" in line
    assert not (tmp_path / "run/checkpoints").exists()
    alone = train(config, "objective.distillation.teacher=null", expect=2).stderr.splitlines()
    assert alone == [
        "reward.name = 'none': there is nothing to learn from without "
        "objective.distillation.teacher or url; allowed: another reward"
    ]


def specialists(toy: Path, folder: Path) -> Path:
    """The configuration of a run with rewards. Each prompt names one of two teachers, or no
    teacher. The held-out prompts name none, because nothing is learnt from their responses."""
    path = make_small(write_config(toy, folder))
    config = yaml.safe_load(path.read_text())
    config["model"] = {"hf_path": str(a_folder(folder / "student", toy, seed=9))}
    teachers = {
        "math": {"teacher": str(a_folder(folder / "math", toy, seed=10))},
        "code": {"teacher": str(a_folder(folder / "code", toy, seed=11))},
        "chat": {},
    }
    distillation = {"field": "domain", "teachers": teachers, "form": "forward_kl_topk"}
    config["objective"] = {"name": "gspo", "mini_batches": 2, "distillation": distillation}
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["domain"] = [*teachers][number % 3]
    config["data"]["prompts"] = str(folder / "prompts.jsonl")
    write_rows(folder / "prompts.jsonl", rows)
    path.write_text(yaml.safe_dump(config))
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_name_their_teachers_and_a_slip_is_told_before_the_start(
    toy: Path, tmp_path: Path
) -> None:
    path = specialists(toy, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    first, rows[1]["domain"] = rows[1]["domain"], "prose"
    write_rows(tmp_path / "prompts.jsonl", rows)
    [line] = train(path, expect=2).stderr.splitlines()
    assert line.startswith(f"{tmp_path}/prompts.jsonl:2: domain = 'prose' names no teacher, but ")
    rows[1]["domain"] = first
    write_rows(tmp_path / "prompts.jsonl", rows)
    train(path, "rollout.prompts_per_step=6")
    before, *steps = records(tmp_path / "run")
    assert before["evaluation/reward"] > 0
    for record in steps:
        assert record["distill/kl"] > 0 and record["distill/loss"] > 0
        assert record["grad_norm"] > 0 and 0 <= record["distill/greedy_agreement"] < 1
