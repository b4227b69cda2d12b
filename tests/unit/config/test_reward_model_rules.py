"""The rules for the keys of a reward model, and their messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.config import load_config
from gspo_megatron.config.resume import decides_rollouts
from tests.unit.config.configs import config_with, problems_of
from tests.unit.hf.preference_folder import write_score_model

URL = ["reward.model.url=http://h:1", "reward.model.tokenizer=t"]
SUITE = "evaluation.suites.s.prompts=p.jsonl"
OTHER_STD = ["objective.advantage=group_mean", "objective.advantage_std=population"]


@pytest.mark.parametrize(
    "overrides",
    [
        URL,
        ["reward.name=reward_model", *URL],
        ["reward.name=reward_model", *URL, "reward.model.normalize=running", "reward.clip=5"],
        [*URL, "reward.model.batch_size=3", "reward.model.max_tokens=7"],
        [*URL, "objective.advantage=gdpo"],
        [*URL, "reward.model.normalize=group", *OTHER_STD],
    ],
)
def test_sound_keys_pass(overrides: list[str]) -> None:
    assert problems_of(1, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["reward.name=reward_model"], "reward.name", "needs a model that scores"),
        (["reward.model.normalize=group"], "reward.model.normalize", "nothing reads it without"),
        ([*URL, *OTHER_STD], "objective.advantage_std", "group_mean does not read it"),
        (["reward.model.tokenizer=t"], "reward.model.tokenizer", "allowed: leave it out"),
        (["reward.model.url=h:1", "reward.model.tokenizer=t"], "reward.model.url", "http://host"),
        (["reward.model.url=http://h/v1", "reward.model.tokenizer=t"], "reward.model.url", ":port"),
        (["reward.model.url=http://h:1"], "reward.model.tokenizer", "needs the model's own"),
        (
            [*URL, "reward.model.chat_template=false", "reward.model.chat_template_options={a: 1}"],
            "reward.model.chat_template_options",
            "nothing reads it with chat_template = false",
        ),
        ([*URL, "environment.name=calculator"], "reward.model.url", "not an environment's epis"),
        (
            [*URL, "objective.advantage=gdpo", "reward.model.normalize=running"],
            "reward.model.normalize",
            "gdpo normalises each part",
        ),
        (
            [SUITE, "evaluation.suites.s.reward.model.folder=f"],
            "evaluation.suites.s.reward.model.folder",
            "compute only the run's own",
        ),
        (
            [SUITE, *(f"evaluation.suites.s.{each}" for each in URL),
             "evaluation.suites.s.reward.model.normalize=group"],
            "evaluation.suites.s.reward.model.normalize",
            "not normalised; allowed: none",
        ),
        (
            [SUITE, "evaluation.suites.s.reward.name=reward_model"],
            "evaluation.suites.s.reward.name",
            "needs a model that scores",
        ),
    ],
)  # fmt: skip
def test_a_rule_says_what_is_wrong(overrides: list[str], key: str, said: str) -> None:
    [line] = problems_of(1, *overrides)
    assert line.startswith(f"{key} = ") and said in line, line


def test_a_folder_must_hold_one_score_that_the_layout_divides(tmp_path: Path) -> None:
    good = write_score_model(tmp_path / "good", "qwen3_moe", 1)
    assert problems_of(1, f"reward.model.folder={good}") == []
    [line] = problems_of(4, f"reward.model.folder={good}", "parallel.layout=tp=4")
    key = "parallel.tensor_model_parallel_size = 4"
    assert line.startswith(f"{key}: the model in {good}: does not divide num_attention_heads")
    [line] = problems_of(1, "reward.model.folder=/nowhere")
    assert line == "reward.model.folder = '/nowhere': no such folder"
    [line] = problems_of(1, f"reward.model.folder={good}", "reward.model.batch_size=3")
    assert line.startswith("reward.model.batch_size = 3: nothing reads it without")
    config = json.loads((good / "config.json").read_text())
    two = {"0": "a", "1": "b"}
    for change, said in (
        ({"id2label": two}, "a preference model has one label"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "ForSequenceClassification"),
    ):
        (good / "config.json").write_text(json.dumps(config | change))
        [line] = problems_of(1, f"reward.model.folder={good}")
        assert line.startswith("reward.model.folder") and str(good) in line and said in line, line


def test_its_paths_are_found_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_TOLD_PATHS", "")
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "task"
    (task / "rm").mkdir(parents=True)
    suite = "{prompts: p.jsonl, reward: {model: {url: 'http://h:1', tokenizer: rm}}}"
    (task / "c.yaml").write_text(
        "data: {tokenizer: t, prompts: p.jsonl}\nreward: {model: {folder: rm, tokenizer: none}}\n"
        f"evaluation: {{suites: {{s: {suite}}}}}\n"
    )
    config = load_config("task/c.yaml")
    assert config.reward.model.folder == "task/rm" and config.reward.model.tokenizer == "none"
    assert config.evaluation.suites["s"].reward.model.tokenizer == "task/rm"


def test_a_server_may_move_without_new_rollouts() -> None:
    here, there = config_with(*URL), config_with("reward.model.url=http://other:2", URL[1])
    assert decides_rollouts(here) == decides_rollouts(there)
    for other in (["reward.model.tokenizer=u", URL[0]], ["reward.model.folder=f"], []):
        assert decides_rollouts(config_with(*other)) != decides_rollouts(here)
