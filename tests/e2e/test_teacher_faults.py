"""The server of a teacher fails in the middle of a run. The run ends with one line and loses
nothing. The server is part of the test's process; tests/vllm uses a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.rollout.teacher import PROBE
from tests.e2e.conftest import write_config
from tests.e2e.resuming import assert_same_run, make_small, records, train
from tests.unit.rollout.test_teacher import served

pytestmark = pytest.mark.slow

STEPS, GOOD_STEPS, K = 4, 2, 3


def right(given: dict[str, Any]) -> dict[str, Any]:
    """A server's right answer. Its log-probs depend on the earlier tokens only."""
    tokens, entries = given["prompt"], []
    assert given["prompt_logprobs"] == K
    for number, token in enumerate(tokens):
        seed = sum(tokens[:number])
        found = {(7 + seed + 5 * each) % 53: -1.5 - each - seed % 9 / 10 for each in range(K)}
        found.setdefault(token, -6.0)
        entries.append({str(each): {"logprob": value} for each, value in found.items()})
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


def spoilt(change: Callable[[dict[str, Any], str], Any]) -> Callable[[dict[str, Any]], Any]:
    """A server's answer that `change` makes wrong for the last token."""

    def answer(given: dict[str, Any]) -> Any:
        found = right(given)
        change(found["choices"][0]["prompt_logprobs"][-1], str(given["prompt"][-1]))
        return found

    return answer


def slow(_: dict[str, Any]) -> Any:
    raise TimeoutError


def gone(_: dict[str, Any]) -> Any:
    raise web.HTTPServiceUnavailable(text="shutting down")


def killed(_: dict[str, Any]) -> Any:
    raise ConnectionAbortedError


FAULTS = {
    "NaN": (spoilt(lambda entry, token: entry[token].update(logprob=float("nan"))), "of nan"),
    "null": (spoilt(lambda entry, token: entry[token].update(logprob=None)), "TypeError"),
    "slow": (slow, "TimeoutError"),
    "ends": (gone, "says 503: shutting down"),
    "killed": (killed, "ServerDisconnectedError"),
}


def config_in(toy: Path, folder: Path) -> Path:
    folder.mkdir()
    reward = {"retries": 1, "timeout_seconds": 5.0}
    path = make_small(write_config(toy, folder), reward=reward, checkpoint={"interval": 10})
    config = yaml.safe_load(path.read_text())
    config["training"]["steps"] = STEPS
    distillation = {"url": "http://127.0.0.1:1/v1", "form": "reverse_kl_topk", "top_k": K}
    config["objective"]["distillation"] = distillation
    path.write_text(yaml.safe_dump(config))
    return path


def train_with(
    answer: Callable[[dict[str, Any]], Any], toy: Path, path: Path, *, expect: int = 0
) -> str:
    """Run the command. Returns its stderr."""
    tokens = load_tokenizer(toy / "tokenizer.model").encode(PROBE)
    with served(answer, tokens, []) as url:
        return train(path, f"objective.distillation.url={url}", expect=expect).stderr


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run."""
    path = config_in(toy, tmp_path_factory.mktemp("undisturbed") / "whole")
    train_with(right, toy, path)
    return path.parent / "run"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_teacher_that_fails_loses_no_finished_step(
    toy: Path, tmp_path: Path, undisturbed: Path, fault: str
) -> None:
    path = config_in(toy, tmp_path / "broken")
    run = path.parent / "run"
    wrong, said = FAULTS[fault]

    def answer(given: dict[str, Any]) -> Any:
        metrics = run / "metrics.jsonl"  # also has step 0
        finished = metrics.read_text().count("\n") - 1 if metrics.exists() else 0
        return wrong(given) if finished >= GOOD_STEPS else right(given)

    lines = train_with(answer, toy, path, expect=2).splitlines()
    [failed] = [line for line in lines if "in the last of 2 calls" in line]
    assert failed.startswith("objective.distillation.url = http://127.0.0.1:") and said in failed
    assert [record["step"] for record in records(run)] == [*range(GOOD_STEPS + 1)]
    train_with(right, toy, path)
    assert [record["step"] for record in records(run)] == [*range(STEPS + 1)]
    assert_same_run(run, undisturbed, f"rl_{STEPS:08d}")
