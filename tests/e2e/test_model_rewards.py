"""Runs whose rewards come from a reward model behind a URL. The model may fail in the middle of a
run; then one line says so, and nothing is lost. The server is in the process of the test;
tests/vllm uses a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.reward_model import RewardModelSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.process.failures import STOPPED
from gspo_megatron.rollout.asking import PROBE
from gspo_megatron.rollout.reward_model import ModelTexts
from gspo_megatron.types import Sample
from tests.e2e.conftest import write_config
from tests.e2e.failing_server import STEPS, assert_no_finished_step_is_lost
from tests.e2e.resuming import all_records, assert_same_run, edit, make_small, train
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.unit.hf.transformers_side import transformers_process
from tests.unit.rollout.reward_server import right, served
from tests.unit.test_metrics_doc import SCORED

pytestmark = pytest.mark.slow


def not_finite(given: dict[str, Any]) -> dict[str, Any]:
    """A server's right answer, except for one score."""
    found = right(given)
    found["data"][0]["probs"] = [float("nan")]
    return found


def config_in(toy: Path, folder: Path) -> Path:
    """A configuration with a reward function beside the reward model, and with running moments."""
    folder.mkdir()
    model = {"url": "http://127.0.0.1:1", "tokenizer": str(toy / "tokenizer.model")}
    reward = {
        "retries": 1,
        "timeout_seconds": 5.0,
        "weights": {"model": 0.5},
        "model": {**model, "normalize": "running", "batch_size": 3},
    }
    training, checkpoint = {"steps": STEPS}, {"interval": 10}
    config = write_config(toy, folder)
    return make_small(config, reward=reward, training=training, checkpoint=checkpoint)


def train_with(
    toy: Path, answer: Callable[[dict[str, Any]], Any], path: Path, *, expect: int = 0
) -> str:
    """Run the command. Returns its stderr."""
    tokens = load_tokenizer(toy / "tokenizer.model").encode(PROBE)
    with served(answer, tokens) as url:
        return train(path, f"reward.model.url={url}", expect=expect).stderr


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run."""
    path = config_in(toy, tmp_path_factory.mktemp("undisturbed") / "whole")
    train_with(toy, right, path)
    return path.parent / "run"


def test_a_run_learns_from_the_model_and_the_function_and_watches_both(undisturbed: Path) -> None:
    steps = [record for record in all_records(undisturbed) if record["step"] > 0]
    assert len(steps) == STEPS
    for record in steps:
        own, model = record["reward/reward"], record["reward/model"]
        assert record["reward/mean"] == pytest.approx(own + 0.5 * model, rel=1e-9)
        assert model == pytest.approx(record["reward_model/mean"], rel=1e-9)
        assert record.keys() >= SCORED
        assert record["perf/reward_model_seconds"] > 0 and record["reward_model/cut"] == 0
        assert record["perf/reward_model_scores_per_second"] > 0 <= record["response/repeated"]
        # Prompts and responses of the toy task have a few characters.
        assert 4 < record["reward_model/tokens"] < 40 and record["grad_norm"] > 0
    state = json.loads((undisturbed / f"checkpoints/rl_{STEPS:08d}/run.json").read_text())
    moments = state["reward_moments"]
    assert moments["count"] == STEPS * 16
    means = [record["reward_model/mean"] for record in steps]
    assert moments["mean"] == pytest.approx(sum(means) / STEPS, rel=1e-9)
    assert moments["mean"] == steps[-1]["reward_model/running_mean"]


def test_a_model_that_fails_loses_no_finished_step(
    toy: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """tests/unit/rollout/test_reward_model.py has the other faults of a server."""
    path = config_in(toy, tmp_path / "broken")
    failed = assert_no_finished_step_is_lost(
        partial(train_with, toy), path, undisturbed, right, (not_finite, "a score of nan")
    )
    assert failed.startswith("reward.model.url = http://127.0.0.1:")


def scorer_in(folder: Path, toy: Path) -> Path:
    """A reward model with its own tokenizer. Its shape and vocabulary differ from the policy's."""
    sizes = {"vocab_size": 128, "max_position_embeddings": 256}
    write_score_model(folder, "qwen3_moe", seed=3, **sizes)
    texts = (toy / "train.jsonl").read_text().splitlines()
    write_character_tokenizer(folder, texts, 128, byte_fallback=False)
    return folder


def test_a_folder_is_scored_on_the_ranks_and_a_stopped_run_goes_on_the_same(
    toy: Path, tmp_path: Path
) -> None:
    """The policy has experts and Routing Replay, which the reward model must not disturb."""
    scorer, runs = scorer_in(tmp_path / "scorer", toy), []
    for name in ("whole", "stopped"):
        model = {"folder": str(scorer), "normalize": "running"}
        path = edit(
            config_in(toy, tmp_path / name),
            reward={"model": model, "weights": {"reward": 0.0}},
            routing={"replay": "r2"},
            checkpoint={"interval": 1},
            logging={"samples_per_step": 16},
            training={"steps": 2},
        )
        if name == "stopped":  # during the rollout of step 2, after the evaluation and step 1
            (path.parent / "signal_at").write_text(str(8 + 16 + 3))
            train(path, expect=STOPPED)
        train(path)
        runs.append(path.parent / "run")
    whole, stopped = runs
    assert_same_run(stopped, whole, "rl_00000002")
    rows = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    section = RewardSection(name="reward_model", model=RewardModelSection(folder=str(scorer)))
    samples = [Sample(row["prompt"], None, row["response"], False) for row in rows]
    with transformers_process() as process:
        ids = ModelTexts(section).conversations(samples).ids
        _, complaints, expected = process.submit(scores_by_transformers, scorer, ids).result()
    assert not complaints and len({round(each, 2) for each in expected}) > 5
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-5)
