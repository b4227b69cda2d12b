"""Runs whose policy acts in several turns: the example with a calculator, and an agent that is a
separate program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.e2e.resuming import all_records
from tests.programs import ROOT, gspo, run_program

EXAMPLE = ROOT / "examples" / "tool_use"
AGENT = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
def post(path, content):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(content).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": row["prompt"]}]
for more in ("sure?", None):
    asked = {"messages": messages, "max_tokens": 4}
    message = post("/chat/completions", asked)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": more}]
post("/reward", {"reward": len(message["content"]) / 9})
"""


def example(folder: Path, *words: str, **environ: str) -> None:
    """Run the example's run.sh with `folder` as the current folder."""
    environ |= forks.shell_environ()
    run_program("bash", EXAMPLE / "run.sh", *words, environ=environ, cwd=folder, timeout=900)


def test_the_example_with_a_calculator(tmp_path: Path) -> None:
    fine_tuning = "training.steps=30 checkpoint.interval=30 logging.plots=false"
    short = ["rollout.prompts_per_step=8", "training.evaluation_prompts=8", "logging.plots=false"]
    example(tmp_path, *short, "training.steps=2", SFT=fine_tuning)
    records = all_records(tmp_path / "runs" / "tool_use" / "rl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records[1:]:
        assert 1 <= record["environment/turns"] <= 3
        assert 0 < record["environment/sampled_share"] <= 1
        # The turns have the log-probs that the trainer computes.
        assert record["mismatch/abs_mean"] <= 1e-5
    lines = (tmp_path / "runs" / "tool_use" / "rl" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert all(sample["transcript"] for sample in samples)
    for sample in samples:
        asked, *_, last = sample["turns"]
        assert (asked["role"], last["role"]) == ("user", "assistant")
        assert asked["text"] == sample["prompt"] and last["trained"] and not sample["error"]


@pytest.mark.full
def test_a_tiny_model_learns_to_use_a_calculator(tmp_path: Path) -> None:
    example(tmp_path)
    records = all_records(tmp_path / "runs" / "tool_use" / "rl")
    accuracies = [r["evaluation/accuracy"] for r in records if "evaluation/accuracy" in r]
    assert accuracies[0] < 0.2 and accuracies[-1] > 0.8


def test_an_agent_of_its_own_trains_on_two_ranks(tmp_path: Path) -> None:
    run_program(sys.executable, EXAMPLE / "make_data.py", "-o", tmp_path / "data")
    (tmp_path / "agent.py").write_text(AGENT)
    words = {
        "model.vocab_size": "112",
        "parallel.layout": "tp=2",
        "data.prompts": str(tmp_path / "data" / "train.jsonl"),
        "data.tokenizer": str(tmp_path / "data" / "tokenizer.model"),
        "data.chat_template": "true",
        "model.checkpoint_path": "null",
        "environment.name": "agent",
        "environment.options": f"{{command: '{sys.executable} {tmp_path / 'agent.py'}'}}",
        "rollout.prompts_per_step": "2",
        "rollout.group_size": "2",
        "rollout.max_response_tokens": "24",
        "training.steps": "2",
        "training.evaluation_interval": "0",
        "training.precision": "fp32",
        "logging.dir": str(tmp_path / "run"),
        "logging.plots": "false",
    }
    overrides = [f"{key}={value}" for key, value in words.items()]
    gspo("train", EXAMPLE / "config.yaml", *overrides, "data.eval_prompts=null")
    records = all_records(tmp_path / "run")
    assert [record["environment/turns"] for record in records] == [2.0, 2.0]
    assert all(record["mismatch/abs_mean"] <= 1e-5 for record in records)
    assert all(record["environment/errors"] == 0 for record in records)


GAME = """
from gspo_megatron.environments.episode import Trajectory

class Game:
    gives_rewards = True

    async def rollout(self, client, task):
        await client.generate(max_tokens=4)
        if task.row_id.endswith(":2"):
            raise ConnectionError("no tool")
        await client.generate([{"role": "user", "content": "lower"}], max_tokens=4)
        return Trajectory(turn_rewards=[0.25, -0.5])
"""


def test_episodes_are_played_without_a_run(tmp_path: Path) -> None:
    run_program(sys.executable, EXAMPLE / "make_data.py", "-o", tmp_path / "data")
    (tmp_path / "game.py").write_text(GAME)
    words = [
        "model.checkpoint_path=null",
        f"data.prompts={tmp_path / 'data' / 'train.jsonl'}",
        f"data.tokenizer={tmp_path / 'data' / 'tokenizer.model'}",
        "environment.name=single_turn",
        "environment.import_path=game:Game",
        "environment.options={}",
        f"logging.dir={tmp_path / 'run'}",
        "data.eval_prompts=null",
        "--episodes=3",
    ]
    play = (sys.executable, "-m", "gspo_megatron", "play", EXAMPLE / "config.yaml", *words)
    told = run_program(*play, "parallel.layout=tp=2", cwd=tmp_path, is_new=True).stdout
    assert "weights: random" in told and "=== episode 3 of 3: row train.jsonl:3" in told
    assert told.count("[reward 0.25]\nuser: lower\nassistant: ") == 2
    assert told.count("[reward -0.5]\n--- reward -0.25, answer ") == 2
    assert told.count("failed: environment Game: ConnectionError: no tool (game.py:") == 1
    assert told.endswith("episodes: 3, mean reward -0.250, 1 failed\n")
    assert not (tmp_path / "run").exists()
    refused = run_program(*play, "environment.import_path=game:Gane", cwd=tmp_path, expect=2)
    assert "game has no class Gane; it has: Game" in refused.stderr
