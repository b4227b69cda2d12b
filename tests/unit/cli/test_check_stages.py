"""`check` on configurations of pre-training and fine-tuning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from gspo_megatron.cli.check_inputs import check_run
from gspo_megatron.config.load import load_any_config
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.estimate.layout import estimate_layout
from gspo_megatron.estimate.workload import DataSizes
from tests.unit.cli.conftest import Command, refused
from tests.unit.data.datasets import write_indexed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put run folders into the folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sft(tmp_path: Path, tokenizer: Path) -> Path:
    """Examples for SFT: four of 2 to 9 tokens, each with an end-of-sequence token."""
    pairs = [("a", ""), ("ab", "c"), ("abcd", "efgh"), ("h", "g")]
    rows = [json.dumps({"prompt": question, "answer": answer}) for question, answer in pairs]
    (tmp_path / "examples.jsonl").write_text("\n".join(rows) + "\n")
    data = {"tokenizer": str(tokenizer), "examples": str(tmp_path / "examples.jsonl")}
    training = {"batch_size": 3, "epochs": 2, "micro_batch_tokens": 20, "precision": "fp32"}
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump({"data": data, "training": training}))
    return path


@pytest.fixture
def pretrain(tmp_path: Path, tokenizer: Path) -> Path:
    """A corpus of 120 tokens, in samples of 16."""
    loaded = load_tokenizer(tokenizer)
    source = np.random.default_rng(1)
    documents = [
        np.append(source.integers(loaded.vocab_size, size=11), loaded.eos_id) for _ in range(10)
    ]
    write_indexed(documents, tmp_path / "corpus", loaded.vocab_size)
    data = {"tokenizer": str(tokenizer), "train": [str(tmp_path / "corpus")], "sequence_length": 16}
    training = {"batch_size": 12, "tokens": 1000, "micro_batch_tokens": 50, "precision": "fp32"}
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump({"data": data, "training": training}))
    return path


def summary(text: str) -> dict[str, str]:
    """The rows before the tables."""
    rows = [line.split(maxsplit=1) for line in text.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_each_stage_is_summed_up(sft: Path, pretrain: Path, gspo: Command) -> None:
    rows = summary(gspo("check", sft)[1])
    assert rows["examples"] == "4 in data.examples"
    assert rows["lengths"] == "examples of at most 9 tokens (128 allowed)"
    assert (rows["step"], rows["weights"]) == ("3 examples", "random")
    assert rows["run"] == "3 steps into runs/tuned"  # 2 epochs of 4 examples, 3 examples in a step
    rows = summary(gspo("check", sft, "data.max_tokens=4", "data.too_long=drop")[1])
    assert rows["examples"] == "3 in data.examples; 1 of data.examples left out, too long"
    rows = summary(gspo("check", pretrain)[1])
    assert rows["corpora"] == "120 tokens in 1 corpus of data.train"
    assert rows["lengths"] == "samples of 16 tokens"
    # The target of 1000 tokens takes 6 steps of 192.
    assert rows["step"] == "12 samples = 192 tokens; 1,152 tokens in all, 9.6 passes over the data"
    assert rows["run"] == "6 steps into runs/corpus"


def test_the_dry_run_has_what_the_stage_has(sft: Path, pretrain: Path, gspo: Command) -> None:
    """The estimate of a stage before RL has no rollout, cache, reference or replay."""
    for path, batch in (
        (sft, "examples of 9, all learned but the first token); an update accumulates 1"),
        (pretrain, "(3 samples of 16); an update accumulates 2"),
    ):
        overrides = ["parallel.layout=pp=2,dp=2", "model.vocab_size=80"]
        code, text, _ = gspo("check", path, "--world-size", 4, *overrides)
        assert code == 0 and batch in text
        assert not {"rollout", "replay", "kv cache", "reference"} & set(text.split())
        said = dict(pair.split("=", 1) for pair in text.splitlines()[-1].split())
        found = estimate_layout(load_any_config(path, overrides), 4, 80, DataSizes(longest=9))
        assert int(said["worst_rank_bytes"]) == found.worst.total
        assert int(said["activations_bytes"]) == found.worst.activations > 0
        absent = ("kv_cache", "rollout", "replay", "reference", "host")
        assert {said[f"{name}_bytes"] for name in absent} == {"0"}


def test_suggestions_for_a_stage_pass_its_rules(pretrain: Path, gspo: Command) -> None:
    """Five samples can be divided evenly only on one data-parallel rank."""
    sizes = ["model.vocab_size=80", "training.batch_size=5"]
    words = ("--suggest", "--gpu-memory=1", "--world-size=2", "parallel.layout=tp=2")
    code, text, _ = gspo("check", pretrain, *sizes, *words)
    rows = [line.split()[1:] for line in text.splitlines() if "  parallel.layout=" in line]
    assert code == 0 and rows and "the rollout" not in text
    for overrides in rows:
        checked = check_run(load_any_config(pretrain, [*overrides, *sizes]), 2)
        assert checked.config.layout().model_parallel_size == 2


def test_problems_of_all_parts_of_a_stage_are_told_at_once(
    sft: Path, pretrain: Path, tmp_path: Path, gspo: Command
) -> None:
    (tmp_path / "examples.jsonl").write_text('{"prompt": "a"}\n')
    nothing = tmp_path / "nothing"
    words = ["data.chat_template=true", "data.messages_field=m", f"model.checkpoint_path={nothing}"]
    words.append("data.max_tokens=1000")
    absent, template = refused(gspo, "check", sft, *words)
    assert absent == f"model.checkpoint_path = '{nothing}': no such folder"
    assert template.startswith("data.chat_template = true")
    # The shape sets the maximum length, so data.max_tokens is checked, too.
    lines = refused(gspo, "check", sft, *words, "model.preset=tiny")
    assert [line.split(" = ")[0] for line in lines[:2]] == ["data.chat_template", "data.max_tokens"]
    assert len(lines) == 4 and "chat template" in lines[2]  # the tokenizer has no chat template

    words = ["training.batch_size=5", "data.sequence_length=15", "parallel.layout=cp=2,dp=2"]
    lines = refused(gspo, "check", pretrain, *words, f"data.train=[{nothing}]")
    told = ["training.batch_size", "data.sequence_length"]
    assert [line.split(" = ")[0] for line in lines[:2]] == told
    assert str(nothing) in lines[2] and len(lines) == 3


def test_what_does_not_fit_the_stage_is_told(sft: Path, pretrain: Path, gspo: Command) -> None:
    nothing = "data.examples = null: needed to train"
    for path, word, stage, told in (
        (sft, "data.examples=", "--stage=sft", nothing),
        (sft, "data.examples=", "", nothing),  # only fine-tuning has epochs
        (pretrain, "data.train=[]", "--stage=pretrain", "data.train = []: needed to train"),
    ):
        assert refused(gspo, *filter(None, ("check", path, word, stage)))[0].startswith(told)
    assert "data.examples = " in "".join(refused(gspo, "check", sft, "--stage", "rl"))


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_the_configurations_on_the_page_about_slurm_are_sound(
    stage: str, tmp_path: Path, gspo: Command
) -> None:
    """The page also quotes the memory of the pre-training run. The estimate gives the same
    figure."""
    page = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"(?ms)cat > {stage}_30b.yaml <<'END'\n(.*?)^END$", page)
    path = tmp_path / f"{stage}_30b.yaml"
    path.write_text(text)
    words = ["check", path, "--no-files", "model.preset=qwen3-30b-a3b", "--stage", stage]
    assert gspo(*words)[0] == 0
    if stage == "pretrain":
        code, out, _ = gspo(*words, "--world-size", 32, "--gpu-memory", 80)
        (needed,) = re.findall(r"rank 0 needs ([\d.]+ GB)", out)
        assert code == 0 and f"estimates {needed} on the rank that needs most" in page
