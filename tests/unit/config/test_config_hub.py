"""Names of the Hub in a configuration. When a configuration is loaded, folders take the place of
the names. A written configuration has the names, with their commits."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron import hub
from gspo_megatron.config import hub as config_hub
from gspo_megatron.config import load_config
from gspo_megatron.config.load import parse_config, parse_suites, to_yaml
from gspo_megatron.config.phases import phase_configs
from gspo_megatron.config.stages import PreferenceConfig
from gspo_megatron.errors import ConfigError, DataError
from tests.hub import SmallHub
from tests.unit.hf.published import model_config

MODEL, ROWS = "org/model", "org/rows"
FILES = {
    "config.json": json.dumps(model_config("qwen3_moe")).encode(),
    "tokenizer.model": b"pieces",
    "model.safetensors": b"weights",
}


def values(**more: Any) -> dict[str, Any]:
    data = {"tokenizer": f"{MODEL}@main", "prompts": [ROWS, f"{ROWS}:test"]}
    return {"model": {"hf_path": MODEL}, "data": data, "logging": {"dir": "run"}, **more}


def add_both(server: SmallHub) -> tuple[str, str]:
    rows = {"train.jsonl": b'{"prompt": "a"}', "test.jsonl": b'{"prompt": "b"}'}
    return server.add(MODEL, FILES), server.add(ROWS, rows, "dataset")


def test_loaded_are_folders_and_written_are_names_with_commits(server: SmallHub) -> None:
    model, rows = add_both(server)
    config = parse_config(values())
    assert Path(str(config.model.hf_path), "config.json").is_file()
    # for a sentencepiece model, the path is that of the file, not of its folder
    assert Path(config.data.tokenizer).read_bytes() == b"pieces"
    texts = [next(Path(path).glob("*.jsonl")).read_text() for path in config.data.prompts or ()]
    assert texts == ['{"prompt": "a"}', '{"prompt": "b"}']
    written = yaml.safe_load(to_yaml(config))
    assert written["model"]["hf_path"] == written["data"]["tokenizer"] == f"{MODEL}@{model}"
    assert written["data"]["prompts"] == [f"{ROWS}@{rows}", f"{ROWS}:test@{rows}"]
    server.requests.clear()
    assert parse_config(written) == config and server.requests == []


def test_preferences_take_names_too(server: SmallHub) -> None:
    add_both(server)
    data = {"tokenizer": MODEL, "preferences": f"{ROWS}:train", "eval_preferences": f"{ROWS}:test"}
    config = parse_config({"data": data}, (), "rm", PreferenceConfig)
    given = [config.data.preferences, config.data.eval_preferences]
    texts = [next(Path(str(path)).glob("*.jsonl")).read_text() for path in given]
    assert texts == ['{"prompt": "a"}', '{"prompt": "b"}']


def test_every_key_of_a_folder_or_a_file_takes_a_name(server: SmallHub) -> None:
    add_both(server)
    teachers = {"math": {"teacher": MODEL}, "code": {"url": "http://127.0.0.1:9/v1"}}
    more = {
        "evaluation": {"suites": {"one": {"prompts": f"{ROWS}:test"}}},
        "objective": {"distillation": {"field": "source", "teachers": teachers}},
    }
    given = values(**more)
    given["model"] |= {"lora": {"rank": 4, "checkpoint": MODEL}}
    given["data"]["eval_prompts"] = f"{ROWS}:test"
    given["reward"] = {"name": "reward_model", "model": {"folder": MODEL, "tokenizer": MODEL}}
    config = parse_config(given)
    paths = [*(config.data.eval_prompts or ()), *config.evaluation.suites["one"].prompts]
    assert len(set(paths)) == 1 and Path(paths[0]).is_dir()
    named = [path for _, path in config_hub.model_paths(config)]
    assert named == [config.model.hf_path] * 4
    assert config.reward.model.tokenizer == config.reward.model.folder == named[0]
    written = yaml.safe_load(to_yaml(config))["reward"]["model"]
    assert written["folder"] == written["tokenizer"] == hub.written(named[0]) != named[0]
    config_hub.fetch_weights(config)
    assert Path(named[0], "model.safetensors").read_bytes() == b"weights"


def test_a_folder_of_the_name_comes_first_here_and_beside_the_file(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "task/config.yaml"
    (tmp_path / "task/org/model").mkdir(parents=True)
    (tmp_path / "task/org/rows").touch()
    given = values()
    given["data"] |= {"tokenizer": MODEL, "prompts": ROWS}
    file.write_text(yaml.safe_dump(given))
    config = load_config(file)
    assert config.model.hf_path == config.data.tokenizer == str(tmp_path / "task/org/model")
    monkeypatch.chdir(tmp_path / "task")
    assert load_config(file).data.prompts == [ROWS]
    assert server.requests == []


def test_a_phase_has_folders_too(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the run, and names that only a phase has."""
    add_both(server)
    teacher = server.add("org/teacher", FILES)
    second = {
        "data": {"prompts": f"{ROWS}:test"},
        "objective": {"distillation": {"teacher": "org/teacher"}},
    }
    training = {"steps": 9, "phases": [{"until_step": 5}, second]}
    given = values(training=training, checkpoint={"interval": 1}, logging={})
    config = parse_config(given, (), "my")
    first, later = phase_configs(config)
    assert first == config and len(config.data.prompts or ()) == 2
    assert (later.model.hf_path, later.data.tokenizer) == (
        config.model.hf_path,
        config.data.tokenizer,
    )
    [prompts] = later.data.prompts
    assert next(Path(prompts).glob("*.jsonl")).read_text() == '{"prompt": "b"}'
    found = later.objective.distillation.teacher
    assert hub.written(found) == f"org/teacher@{teacher}" and Path(found, "config.json").is_file()
    # the ranks of the run find its commits in the run folder
    monkeypatch.setenv("RANK", "0")
    parse_config(given, (), "my")
    assert "models/org/teacher@main" in json.loads((tmp_path / "runs/my/hub.json").read_text())


def test_all_mistakes_are_told_each_once(server: SmallHub) -> None:
    server.add("org/gated", FILES, gated=True)
    given = values(training={"steps": "ten"})
    given["data"] |= {"tokenizer": "org/gated", "prompts": "org/none:test"}
    with pytest.raises(ConfigError) as raised:
        parse_config(given)
    lines = [line for line in raised.value.problems if "org/" in line]
    assert [line.partition(": ")[0] for line in lines] == [
        "model.hf_path = 'org/model'",
        "data.tokenizer = 'org/gated'",
        "data.prompts = 'org/none:test'",
    ]
    assert any(line.startswith("training.steps") for line in raised.value.problems)


def test_a_run_holds_its_commits(server: SmallHub, tmp_path: Path) -> None:
    model, _ = add_both(server)
    config_hub.hold_commits(parse_config(values()))
    held = json.loads((tmp_path / "run/hub.json").read_text())
    server.repositories[f"models/{MODEL}"].commit({**FILES, "config.json": b"{}"})
    os.environ[hub.COMMITS] = ""  # as in a process that starts later
    assert hub.written(str(parse_config(values()).model.hf_path)) == f"{MODEL}@{model}"
    other = parse_config(values(logging={"dir": "other"}))
    # this commit is known from the first run
    assert hub.known_commits()[f"models/{MODEL}@main"] == model
    assert held[f"models/{MODEL}@main"] == model and other.model.hf_path is not None


def test_ranks_of_other_nodes_take_the_commits_of_rank_0(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 starts first and waits for rank 0. Meanwhile the branch gets a new commit."""
    first, _ = add_both(server)
    rank_0 = parse_config(values())
    server.repositories[f"models/{MODEL}"].commit({**FILES, "config.json": b"{}"})

    def write_late() -> None:
        time.sleep(0.5)
        held = {f"models/{MODEL}@main": first}
        held |= {f"datasets/{ROWS}@main": server.repositories[f"datasets/{ROWS}"].branches["main"]}
        (tmp_path / "run").mkdir()
        (tmp_path / "run/hub.json").write_text(json.dumps(held))

    monkeypatch.setenv(hub.COMMITS, "")
    monkeypatch.setenv("RANK", "1")
    server.requests.clear()
    thread = threading.Thread(target=write_late)
    thread.start()
    assert parse_config(values()) == rank_0
    thread.join()
    assert server.requests == []


def test_rank_0_writes_the_commits_and_others_wait_no_longer_than_their_deadline(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = add_both(server)
    monkeypatch.setattr(config_hub, "RANK_SECONDS", 0.3)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(DataError, match=r"rank 0 has not written the commits of .* in 0.3 sec"):
        parse_config(values())
    monkeypatch.setenv("RANK", "0")
    parse_config(values())
    held = json.loads((tmp_path / "run/hub.json").read_text())
    assert held[f"models/{MODEL}@main"] == model


def test_rank_0_writes_the_commits_before_the_downloads(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_both(server)
    monkeypatch.setenv("RANK", "0")
    native, held = hub.fetch, []

    def fetch(*given: Any, **options: Any) -> Path:
        held.append(json.loads((tmp_path / "run/hub.json").read_text()))
        return native(*given, **options)

    monkeypatch.setattr(hub, "fetch", fetch)
    parse_config(values())
    assert held and all(len(each) == 2 for each in held)


def test_a_suite_for_a_server_takes_names_too(server: SmallHub) -> None:
    add_both(server)
    suites = {"s": {"prompts": ROWS, "answer_field": "answer", "reward": {"name": "math"}}}
    section = parse_suites(suites, [])
    [path] = section.suites["s"].prompts
    assert Path(path).is_dir()
