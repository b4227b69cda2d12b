"""Pre-training and fine-tuning, started by their entry files: on several layouts, resumed, and one
stage after the other."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from gspo_megatron.config.stages import FineTuningDataSection
from gspo_megatron.data.examples import load_supervised
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.data.tokenizers import load_tokenizer
from tests.e2e.resuming import (
    TINY_MODEL,
    assert_same_run,
    environment,
    records,
    write_corpus,
)
from tests.programs import ROOT, run_program

STEPS = 6
ENTRIES = {"sft": "sft_moe.py", "pretrain": "pretrain_moe.py", "rl": "train_gspo.py"}
PHASES = ("sft", "pretrain")


def run(phase: str, config: Path, *words: object, expect: int = 0) -> str:
    """Run an entry file to its end and check its exit code. Returns its stderr."""
    program = (sys.executable, ROOT / "pretrain_scripts" / ENTRIES[phase], config, *words)
    return run_program(*program, expect=expect, environ=environment(config)).stderr


@pytest.fixture(scope="module")
def base(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration PHASE.yaml for each stage, and its finished run on one rank in
    the folder PHASE."""
    folder = tmp_path_factory.mktemp("stages")
    for name, count in (("a", 50), ("b", 30)):
        write_corpus(toy / "tokenizer.model", folder / name, count)
    data = {
        "sft": {"examples": str(toy / "train.jsonl"), "eval_examples": str(toy / "test.jsonl")},
        "pretrain": {
            "train": [str(folder / "a"), str(folder / "b")],
            "weights": [1.0, 2.0],
            "evaluation_share": 0.3,
            "sequence_length": 16,
        },
    }
    training = {
        "sft": {"epochs": 1, "batch_size": 12, "micro_batch_tokens": 48},
        "pretrain": {"steps": STEPS, "batch_size": 8, "micro_batch_tokens": 32},
    }
    for phase in PHASES:
        config = {
            "model": {"megatron": dict(TINY_MODEL)},
            "data": {"tokenizer": str(toy / "tokenizer.model"), **data[phase]},
            "optimizer": {"learning_rate": 3e-3, "decay": "wsd", "wsd_steps": 2, "warmup_steps": 1},
            "training": {"precision": "fp32", "evaluation_interval": 2, **training[phase]},
            "checkpoint": {"interval": 1, "keep_last": None},
            "logging": {"dir": str(folder / phase), "plots": phase == "sft"},
            "export": {"hf_path": str(folder / f"{phase}-hf")},
        }
        (folder / f"{phase}.yaml").write_text(yaml.safe_dump(config))
        run(phase, folder / f"{phase}.yaml")
    return folder


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp=2,pp=2,ep=2", marks=pytest.mark.full),
        pytest.param("cp=2,dp=2", marks=pytest.mark.full),
        "dp=2,ep=2",
    ],
)
def test_losses_are_the_same_on_any_layout(
    base: Path, tmp_path: Path, phase: str, layout: str
) -> None:
    """On another layout, sums in fp32 have another order, and learning magnifies the difference.
    The tolerance is 1e-4, as for RL steps."""
    words = (f"parallel.layout={layout}", f"logging.dir={tmp_path / 'run'}", "export.hf_path=")
    run(phase, base / f"{phase}.yaml", *words, "checkpoint.interval=0", "logging.plots=false")
    mine, theirs = records(tmp_path / "run"), records(base / phase)
    assert [record["step"] for record in mine] == list(range(STEPS + 1))
    for record, other in zip(mine, theirs, strict=True):
        assert record.keys() == other.keys()
        assert record.pop("phase") == other.pop("phase") == phase
        for figure, value in other.items():
            assert record[figure] == pytest.approx(value, rel=1e-4, abs=1e-8), figure
        if record["step"] == 1:
            assert record["loss"] == pytest.approx(other["loss"], abs=2e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_a_resumed_run_is_the_same_bit_for_bit(base: Path, tmp_path: Path, phase: str) -> None:
    """The run is continued from the checkpoint in its middle, and exported again."""
    again = tmp_path / "run"
    shutil.copytree(base / phase, again)
    for step in range(3, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"{phase}_{step:08d}")
    words = (f"logging.dir={again}", f"export.hf_path={tmp_path / 'hf'}", "logging.plots=false")
    errors = run(phase, base / f"{phase}.yaml", *words)
    assert f"resuming from {again / 'checkpoints' / f'{phase}_00000002'}" in errors
    assert_same_run(again, base / phase, f"{phase}_{STEPS:08d}")
    exported = base / f"{phase}-hf" / "model.safetensors"
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == exported.read_bytes()


def test_a_resumed_run_goes_on_with_changed_values(base: Path, toy: Path, tmp_path: Path) -> None:
    """Other examples are taken in an order of their own, from its beginning."""
    again = tmp_path / "run"
    shutil.copytree(base / "sft", again)
    for step in range(3, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"sft_{step:08d}")
    other = tmp_path / "other.jsonl"
    other.write_text("".join((toy / "train.jsonl").read_text().splitlines(keepends=True)[1:]))
    words = (f"logging.dir={again}", "export.hf_path=", "logging.plots=false")
    words = (*words, f"data.examples={other}", "optimizer.learning_rate=1e-3")
    errors = run("sft", base / "sft.yaml", *words, expect=2)
    assert "optimizer.learning_rate = 0.001: was 0.003" in errors
    assert "go on with the new values from step 3: gspo-megatron sft" in errors
    assert "--change" in errors
    errors = run("sft", base / "sft.yaml", *words, "--change")
    assert "changed from step 3 on: data.examples: " in errors

    found = records(again)
    assert found[:3] == records(base / "sft")[:3]
    assert found[3]["lr"] == pytest.approx(1e-3)
    form = FineTuningDataSection(tokenizer="t", max_tokens=64)
    data = load_supervised(other, load_tokenizer(toy / "tokenizer.model"), form)
    order = PromptLoader(len(data), 12, seed=1)
    tokens = [int(data.lengths[order.next()].sum()) for _ in range(3, STEPS + 1)]
    assert [record["batch/tokens"] for record in found[3:]] == tokens
    (line,) = (again / "changes.jsonl").read_text().splitlines()
    change = json.loads(line)
    assert (change["phase"], change["step"]) == ("sft", 2)
    assert change["changed"][1] == "optimizer.learning_rate: 0.003 -> 0.001"
    run("sft", base / "sft.yaml", *words)  # a later start needs no option


def test_pre_training_has_no_changed_values(base: Path) -> None:
    words = ("optimizer.learning_rate=1e-3", "export.hf_path=")
    errors = run("pretrain", base / "pretrain.yaml", *words, expect=2)
    assert "set them back to resume it, or start a new run on its weights: " in errors
    assert "--change" not in errors


# This program runs in a process without Megatron-Core and its CPU support.
TRANSFORMERS = """
import json, sys
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
total, count = 0.0, 0
for ids, mask in json.loads(sys.stdin.read()):
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    learned = torch.tensor(mask[1:])
    total -= float(rows[:-1].gather(1, torch.tensor(ids)[1:, None])[learned].sum())
    count += int(learned.sum())
print(total / count)
"""


def test_the_exported_model_has_the_loss_that_was_reported(base: Path, toy: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(toy / "tokenizer.model")
    form = FineTuningDataSection(tokenizer="t", max_tokens=64)
    data = load_supervised(toy / "test.jsonl", tokenizer, form)
    examples = [data[number] for number in range(len(data))]
    found = run_program(
        *(sys.executable, "-c", TRANSFORMERS, base / "sft-hf"),
        input=json.dumps([(e.token_ids.tolist(), e.loss_mask.tolist()) for e in examples]),
    )
    reported = records(base / "sft")[-1]["evaluation/loss"]
    assert float(found.stdout) == pytest.approx(reported, abs=1e-5)


def test_each_stage_begins_with_the_weights_of_the_one_before(
    base: Path, toy: Path, tmp_path: Path
) -> None:
    """Before the first step, fine-tuning from a checkpoint has another loss than fine-tuning from
    random weights. RL also starts from a checkpoint."""
    words = (f"model.checkpoint_path={base / 'pretrain'}", f"logging.dir={tmp_path / 'sft'}")
    run("sft", base / "sft.yaml", *words, "export.hf_path=", "training.steps=3")
    fresh, given = records(base / "sft")[0], records(tmp_path / "sft")[0]
    assert abs(given["evaluation/loss"] - fresh["evaluation/loss"]) > 1e-3

    values = yaml.safe_load((base / "sft.yaml").read_text())
    config = {
        "model": values["model"] | {"checkpoint_path": str(tmp_path / "sft")},
        "data": {"tokenizer": values["data"]["tokenizer"], "prompts": str(toy / "train.jsonl")},
        "rollout": {"group_size": 2, "prompts_per_step": 2, "max_response_tokens": 4},
        "reward": {"name": "per_character"},
        "training": {"steps": 1, "precision": "fp32"},
        "logging": {"dir": str(tmp_path / "rl"), "plots": False},
    }
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    run("rl", tmp_path / "rl.yaml")
    assert [record["step"] for record in records(tmp_path / "rl")] == [1]


def test_mistakes_are_named_before_anything_starts(base: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    bad = tmp_path / "bad.jsonl"
    errors = run("sft", base / "sft.yaml", f"data.examples={bad}", "model.vocab_size=5", expect=2)
    assert f"{bad}:1: no field 'answer'" in errors and f"{bad}:2: " in errors
    assert "model.vocab_size = 5" in errors

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    words = (f"export.hf_path={tmp_path / 'full'}", f"logging.dir={tmp_path / 'run'}")
    errors = run("sft", base / "sft.yaml", *words, expect=2)
    assert "has files in it already" in errors and not (tmp_path / "run").exists()


def test_the_summary_is_of_the_stage(base: Path) -> None:
    assert (base / "sft" / "plots" / "sft.png").stat().st_size
    text = (base / "sft" / "report.html").read_text()
    last = json.loads((base / "sft" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "held-out loss" in text and f"{last['evaluation/loss']:.2f}" in text
    # as if the run had been killed after its last checkpoint
    (base / "sft" / "report.html").unlink()
    run("sft", base / "sft.yaml")
    assert (base / "sft" / "report.html").read_text() == text
