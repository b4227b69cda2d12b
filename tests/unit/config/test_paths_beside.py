"""Paths relative to the configuration file, while the command runs in another folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.run_state import fingerprints
from gspo_megatron.cli.main import main
from gspo_megatron.config import load_config, parse_config
from gspo_megatron.config.load import load_any_config, suites_of_file
from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.errors import ConfigError, RewardError
from gspo_megatron.rewards.registry import get_reward

TEXT = """
data: {tokenizer: toy/tokenizer.model, prompts: [toy/train.jsonl], eval_prompts: toy/test.jsonl}
evaluation:
  suites: {here: {prompts: toy/test.jsonl}, there: more/suites.yaml, named: "more/suites.yaml:a"}
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and the files that it names. The current folder is its
    parent."""
    for name in ("GSPO_TOLD_PATHS", "GSPO_MODULE_FOLDERS"):
        monkeypatch.setenv(name, "")  # monkeypatch restores the variable after the test
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "task"
    write_toy_dataset(folder / "toy", "mixed", train=4, test=2, seed=1)
    (folder / "more").mkdir()
    (folder / "more" / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "more" / "suites.yaml").write_text("a: {prompts: rows.jsonl}\n")
    (folder / "config.yaml").write_text(TEXT)
    return folder


def test_the_present_folder_itself_is_one_that_is_there(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".", "./"):
        text = TEXT.replace("tokenizer: toy/tokenizer.model", f"tokenizer: {name}")
        (task / "config.yaml").write_text(text)
        assert Path(load_config("task/config.yaml").data.tokenizer) == Path()
    assert "data.tokenizer" not in capsys.readouterr().err


def test_they_are_read_from_its_folder_and_that_is_told(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("task/config.yaml")
    assert config.data.tokenizer == "task/toy/tokenizer.model"
    assert config.data.prompts == ["task/toy/train.jsonl"]
    suites = config.evaluation.suites
    assert suites["here"].prompts == ["task/toy/test.jsonl"]
    assert suites["there"].prompts == suites["named"].prompts == ["task/more/rows.jsonl"]
    told = capsys.readouterr().err.splitlines()
    assert (
        f"data.tokenizer = toy/tokenizer.model: not in {task.parent}; read beside "
        "task/config.yaml: task/toy/tokenizer.model"
    ) in told
    named = [line.split(" = ")[0] for line in told]
    suite = "evaluation.suites."
    assert named == [
        *("data.tokenizer", "data.prompts", "data.eval_prompts"),
        *(f"{suite}here.prompts", f"{suite}there", f"{suite}named", "a.prompts"),
    ]
    load_config("task/config.yaml")
    assert capsys.readouterr().err == ""  # the first load has reported it already


def test_teachers_are_found_beside_it(task: Path) -> None:
    (task / "math").mkdir()
    given = "{field: domain, teachers: {math: {teacher: math}, code: {url: math}, chat: {}}}"
    (task / "config.yaml").write_text(f"{TEXT}objective: {{distillation: {given}}}\n")
    teachers = load_config("task/config.yaml").objective.distillation.teachers
    assert teachers["math"].teacher == "task/math"
    assert teachers["code"].url == "math" and teachers["chat"].teacher is None


def test_the_present_folder_comes_first_and_outputs_go_there(
    task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = task.parent / "toy"
    here.mkdir()
    for name in ("tokenizer.model", "train.jsonl", "test.jsonl"):
        (here / name).write_text("")
    config = load_config("task/config.yaml", ["evaluation.suites={}", "data.eval_prompts=b.jsonl"])
    assert config.data.tokenizer == "toy/tokenizer.model"
    assert config.data.prompts == ["toy/train.jsonl"]
    # a path on the command line is relative to the current folder
    assert config.data.eval_prompts == ["b.jsonl"]
    assert config.logging.dir == "runs/config"
    monkeypatch.chdir(task)
    capsys.readouterr()
    assert load_config("config.yaml").data.prompts == ["toy/train.jsonl"]
    told = capsys.readouterr().err  # a path in a file of suites is looked for beside that file
    assert told.count("\n") == 1 and "read beside more/suites.yaml: more/rows.jsonl" in told


def test_what_is_nowhere_keeps_its_name(task: Path) -> None:
    (task / "sft.yaml").write_text("data: {tokenizer: t, examples: x/y.jsonl}\n")
    assert load_any_config("task/sft.yaml").data.examples == "x/y.jsonl"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (r'"a\0b"', "data.examples = .*: a path cannot contain a NUL"),
        ("a/" + "é" * 150 + "/b", "data.examples = .*: a name in it has 300 bytes; allowed: 255"),
    ],
)
def test_a_path_that_no_file_system_has_is_told(task: Path, value: str, told: str) -> None:
    (task / "sft.yaml").write_text(f"data: {{tokenizer: t, examples: {value}}}\n")
    with pytest.raises(ConfigError, match=told):
        load_any_config("task/sft.yaml")


def test_a_path_that_a_shell_would_expand_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise logging.dir = ~/b would make a folder named ~ in the current folder."""
    monkeypatch.setenv("HOME", "/me")
    keys = ["data.prompts", "environment.python", "logging.dir", "rollout.vllm.weights_dir"]
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"tokenizer": "t"}}, [f"{key}=~/b" for key in keys])
    wrong = "no shell expands ~ here; allowed: /me/b"
    assert sorted(caught.value.problems) == [f"{key} = '~/b': {wrong}" for key in keys]


def test_prefixes_of_corpora_and_weights_are_found(task: Path) -> None:
    (task / "corpus.idx").touch()
    (task / "weights").mkdir()
    (task / "pre.yaml").write_text(
        "data: {tokenizer: toy/tokenizer.model, train: [corpus]}\n"
        "model: {checkpoint_path: weights}\n"
    )
    config = load_any_config("task/pre.yaml")
    assert config.data.train == ["task/corpus"]
    assert config.model.checkpoint_path == "task/weights"


def test_preferences_and_adapters_are_found(task: Path) -> None:
    (task / "pairs.jsonl").touch()
    (task / "adapters").mkdir()
    (task / "scores.yaml").write_text(
        "data: {tokenizer: toy/tokenizer.model, preferences: pairs.jsonl}\n"
    )
    (task / "lora.yaml").write_text(f"{TEXT}model: {{lora: {{rank: 4, checkpoint: adapters}}}}\n")
    assert load_any_config("task/scores.yaml").data.preferences == "task/pairs.jsonl"
    assert load_any_config("task/lora.yaml").model.lora.checkpoint == "task/adapters"


def test_modules_are_found_by_all_processes_of_a_run(
    task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "a_reward_beside_its_configuration"
    named = f"reward: {{import_path: {module}:score, workers: 1}}\n"
    (task / "config.yaml").write_text(TEXT + named)
    (task / f"{module}.py").write_text("def score(sample):\n    return float(len(sample.prompt))\n")
    config = load_config("task/config.yaml")
    told = capsys.readouterr().err
    assert f"reward.import_path = {module}:score: {module} is not in {task.parent}; read" in told
    assert "+" not in fingerprints(config)["reward.import_path"]
    reward = get_reward("", config.reward.import_path, {}, 1)
    try:
        assert reward.function.__module__ == module
    finally:
        sys.modules.pop(module, None)
    wrong = f"no module named nowhere, neither installed nor in {task.parent} nor in {task}"
    with pytest.raises(RewardError, match=wrong):
        get_reward("", "nowhere:score", {}, 0)


def test_a_runner_of_programs_is_found_too(
    task: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "a_runner_beside_its_configuration"
    code = f"{{name: code, options: {{runner: '{module}:Service'}}}}"
    suite = f"{{prompts: toy/test.jsonl, reward: {code}}}"
    (task / f"{module}.py").write_text("class Service:\n    def run(self, *_): ...\n")
    (task / "config.yaml").write_text(f"{TEXT}reward: {code}\n")
    (task / "suite.yaml").write_text(f"mine: {suite}\n")
    config = load_config("task/config.yaml", ["evaluation.suites={}"])
    key = f"reward.options.runner = {module}:Service: {module} is not in {task.parent}; read"
    assert key in capsys.readouterr().err
    try:
        get_reward("code", None, config.reward.options)  # imports the class
    finally:
        sys.modules.pop(module, None)
    monkeypatch.setenv("GSPO_TOLD_PATHS", "")
    monkeypatch.setenv("GSPO_MODULE_FOLDERS", "")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(task)])
    suites_of_file("task/suite.yaml")
    assert f"mine.{key}" in capsys.readouterr().err


def test_check_works_from_another_folder(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "task/config.yaml"]) == 0
    assert capsys.readouterr().err.count("read beside task/config.yaml") == 6
    (task / "toy" / "test.jsonl").unlink()
    assert main(["check", "task/config.yaml"]) == 2
    looked = f"toy/test.jsonl: no such prompt file; the current folder is {task.parent}"
    assert looked in capsys.readouterr().err


def test_what_a_phase_names_is_looked_for_beside_the_file_too(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same holds for prompts, suites, and the module of a reward."""
    (task / "reward_of_a_phase.py").write_text("def reward(sample):\n    return 1.0\n")
    phase = "{until_step: 5, data: {prompts: more/rows.jsonl}, evaluation: {suites: {a: {prompts: "
    phase += "toy/test.jsonl}}}, reward: {import_path: 'reward_of_a_phase:reward'}}"
    text = f"{TEXT}training: {{steps: 9, phases: [{{until_step: 2}}, {phase}, {{}}]}}\n"
    text += "checkpoint: {interval: 1}\n"
    (task / "config.yaml").write_text(text)
    config = load_config("task/config.yaml")
    found = config.training.phases[1]
    assert found.data == {"prompts": "task/more/rows.jsonl"}
    assert found.evaluation["suites"]["a"]["prompts"] == "task/toy/test.jsonl"
    reward = get_reward("", found.reward["import_path"], {}, 0)
    assert reward is not None
    told = capsys.readouterr().err
    assert "training.phases[1].data.prompts = more/rows.jsonl: not in" in told
