"""`gspo-megatron reward-model`: a run that is resumed, exported and imported, and configurations
that are refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.checkpoint.convert_adapters import any_to_hf
from gspo_megatron.data.tokenizers import load_tokenizer
from tests.e2e.resuming import TINY_MODEL, assert_same_run, records
from tests.programs import gspo
from tests.unit.hf.preference_folder import scores_by_transformers
from tests.unit.hf.transformers_side import transformers_process

STEPS = 6
PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": ["6", "2"], "kind": "odd"}


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """Write pairs about sums. The chosen answer is right. One or two rejected answers end in an
    operator, so the task is easy to learn."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(1, 5), draw.randrange(1, 5)
        wrong = [f"{a + b}+", f"{a}+"][: draw.randint(1, 2)]
        kind = "odd" if (a + b) % 2 else "even"
        row = {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": wrong, "kind": kind}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def base(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration `rm.yaml`, a complete run of it on one rank (`run`), and the
    export of this run (`hf`)."""
    folder = tmp_path_factory.mktemp("reward-model")
    config = {
        "model": {"megatron": dict(TINY_MODEL)},
        "data": {
            "tokenizer": str(toy / "tokenizer.model"),
            "preferences": str(write_pairs(folder / "train.jsonl", 60, seed=1)),
            "eval_preferences": str(write_pairs(folder / "eval.jsonl", 30, seed=2)),
            "prompt_field": "prompt",
            "source_field": "kind",
        },
        "preference": {"center_coefficient": 0.01},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "training": {
            "precision": "fp32",
            "batch_size": 10,
            "micro_batch_tokens": 64,
            "evaluation_interval": 3,
        },
        "checkpoint": {"interval": 1, "keep_last": None},
        "logging": {"dir": str(folder / "run"), "plots": False},
        "export": {"hf_path": str(folder / "hf")},
    }
    (folder / "rm.yaml").write_text(yaml.safe_dump(config))
    gspo("reward-model", folder / "rm.yaml")
    return folder


def test_its_figures(base: Path) -> None:
    found = records(base / "run")
    assert [record["step"] for record in found] == list(range(STEPS + 1))
    assert {record["phase"] for record in found} == {"reward_model"}
    first, last = found[0], found[-1]
    assert last["evaluation/loss"] < first["evaluation/loss"]
    for each in (first, last):
        assert each["evaluation/accuracy_low"] <= each["evaluation/accuracy"]
        assert each["evaluation/accuracy"] <= each["evaluation/accuracy_high"]
        assert each["evaluation/prompts"] == 30
        share = [each[f"source/{kind}/prompts"] for kind in ("odd", "even")]
        right = [each[f"source/{kind}/accuracy"] for kind in ("odd", "even")]
        mean = sum(n * r for n, r in zip(share, right, strict=True)) / sum(share)
        assert sum(share) == 30 and mean == pytest.approx(each["evaluation/accuracy"])
    assert last["batch/preferences"] == 10 and last["batch/pairs"] >= 10


def test_a_resumed_run_is_the_same_bit_for_bit(base: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(base / "run", again)
    for step in range(3, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"reward_model_{step:08d}")
    words = [f"logging.dir={again}", f"export.hf_path={tmp_path / 'hf'}"]
    errors = gspo("reward-model", base / "rm.yaml", *words).stderr
    assert f"resuming from {again / 'checkpoints' / 'reward_model_00000002'}" in errors
    assert_same_run(again, base / "run", f"reward_model_{STEPS:08d}")
    exported = base / "hf" / "model.safetensors"
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == exported.read_bytes()


def test_the_export_is_a_folder_of_transformers(base: Path, tmp_path: Path) -> None:
    """With the export, transformers computes the same scores as the run. The export has the
    same bits as a conversion of the checkpoint. An import of the export, exported again, has the
    same bits, too."""
    config = json.loads((base / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]
    assert config["id2label"] == {"0": "score"} and config["problem_type"] == "regression"
    tokenizer = load_tokenizer(base / "hf" / "tokenizer.model")
    assert config["pad_token_id"] == tokenizer.pad_id != tokenizer.eos_id
    newest = base / "run" / "checkpoints" / f"reward_model_{STEPS:08d}"
    any_to_hf(newest, tmp_path / "converted", as_peft=False, base=None, dtype=None)
    assert json.loads((tmp_path / "converted" / "config.json").read_text()) == config
    hf_to_megatron(base / "hf", tmp_path / "imported")
    any_to_hf(tmp_path / "imported", tmp_path / "again", as_peft=False, base=None, dtype=None)
    bits = [
        {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
        for path in (each / "model.safetensors" for each in (
            base / "hf", tmp_path / "converted", tmp_path / "again"
        ))
    ]  # fmt: skip
    assert bits[0] == bits[1] == bits[2] and "lm_head.weight" not in bits[0]

    rows = [json.loads(line) for line in (base / "eval.jsonl").read_text().splitlines()]
    sequences, places = [], []
    for row in rows:
        places.append((len(sequences), len(row["rejected"])))
        for end in (row["chosen"], *row["rejected"]):
            ids = [*tokenizer.encode(row["prompt"]), *tokenizer.encode(end), tokenizer.eos_id]
            sequences.append(ids)
    with transformers_process() as process:
        name, complaints, scores = process.submit(
            scores_by_transformers, base / "hf", sequences, tokenizer.pad_id
        ).result()
    assert name == config["architectures"][0] and not complaints
    last = records(base / "run")[-1]
    assert sum(scores) / len(scores) == pytest.approx(last["evaluation/score_mean"], abs=1e-5)
    differences = [
        sum(scores[first] - other for other in scores[first + 1 : first + 1 + count]) / count
        for first, count in places
    ]
    mean = sum(differences) / len(rows)
    assert mean == pytest.approx(last["evaluation/difference"], abs=1e-5)


def test_it_starts_from_checkpoints_and_folders(base: Path, tmp_path: Path) -> None:
    """A new run starts from the export, with its head. `check` says where the weights of the run
    come from."""
    words = [f"model.hf_path={base / 'hf'}", "model.megatron={}", "training.steps=1"]
    words += [f"logging.dir={tmp_path / 'run'}", "export.hf_path="]
    gspo("reward-model", base / "rm.yaml", *words, is_new=True)
    first, last = records(tmp_path / "run")[0], records(base / "run")[-1]
    for name in ("evaluation/loss", "evaluation/score_mean"):
        assert first[name] == pytest.approx(last[name], rel=1e-6)


def refused(*words: object) -> list[str]:
    """The lines on standard error of a command that ends with exit code 2."""
    lines = gspo(*words, expect=2).stderr.splitlines()
    return [line for line in lines if not line.startswith("warning")]


def test_wrong_keys_and_rows_are_named_at_once(base: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        PAIR,
        PAIR | {"rejected": 3},
        {"prompt": "2+3=", "chosen": "5", "kind": "odd"},
    ]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = refused(
        *("check", base / "rm.yaml", f"data.preferences={path}", "preference.loss=regresion"),
        *("model.lora.rank=4", "data.rating_field=x", f"logging.dir={tmp_path / 'run'}"),
        "export.hf_path=",
    )
    text = "\n".join(lines)
    assert "preference.loss = 'regresion': unknown value; did you mean regression?" in text
    lines = refused(
        *("reward-model", base / "rm.yaml", f"data.preferences={path}", "model.lora.rank=4"),
        *("data.rating_field=x", f"logging.dir={tmp_path / 'run'}", "export.hf_path="),
    )
    assert lines == [
        "model.lora.rank = 4: the frozen weights would be random; allowed: 0, or set "
        "model.hf_path or model.checkpoint_path",
        "data.rating_field = 'x': nothing reads it with preference.loss = bradley_terry; allowed: "
        "rating",
        "model.lora.rank = 4: a preference model trains all weights: its new head has no place in "
        "an adapter; allowed: 0",
        f"{path}:2: field 'rejected' is a number; a string is wanted, or an array of messages",
        f"{path}:3: no field 'rejected'; the fields are: 'prompt', 'chosen', 'kind' "
        "(data.rejected_field chooses one)",
    ]


def test_other_stages_refuse_a_preference_model(base: Path, tmp_path: Path, toy: Path) -> None:
    wrong = "holds a preference model, which gives scores and no tokens"
    train = {"prompts": str(toy / "train.jsonl"), "tokenizer": str(toy / "tokenizer.model")}
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump({"data": train, "logging": {"dir": str(tmp_path / "run")}}))
    for key, given in (("hf_path", "hf"), ("checkpoint_path", "run")):
        lines = refused("check", path, f"model.{key}={base / given}")
        assert any(line.startswith(f"model.{key} = ") and wrong in line for line in lines), lines
    suites = tmp_path / "suites.yaml"
    suites.write_text(yaml.safe_dump({"sums": {"prompts": str(toy / "test.jsonl")}}))
    for given in ("hf", "run"):
        lines = refused("evaluate", base / given, "--suite", suites)
        assert any(wrong in line for line in lines), lines
