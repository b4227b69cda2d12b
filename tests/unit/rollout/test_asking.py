"""Servers of teachers and reward models in a rollout service, which scores many groups at the same
time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.process.coroutines import OwnLoop
from gspo_megatron.rollout import asking
from gspo_megatron.rollout.asking import Asker
from gspo_megatron.rollout.reward_model import ModelServer
from gspo_megatron.rollout.teacher import Teachers
from gspo_megatron.types import Sample
from tests.unit.rollout.reward_server import right as scored
from tests.unit.rollout.test_teacher import group_of
from tests.unit.rollout.test_teacher import right as judged

GROUPS, SLOTS = 6, 3
Result = tuple[float, int, np.ndarray]  # seconds, failures, and log-probs or scores
Score = Callable[[], Coroutine[Any, Any, Result]]
FAST: dict[str, Any] = {"retries": 1, "timeout_seconds": 20.0, "on_failure": "drop_group"}


class Calls:
    """Takes the place of the servers. Each call takes a moment."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.name, self.tokens = "", []  # the model's name, and its tokens of the probe
        self.counts: Counter[str] = Counter()
        self.running = self.most = 0

    async def answer(self, path: str, given: Any) -> Any:
        self.counts[path] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        if self.is_away:
            raise ConnectionError("nobody is here")
        if path == "completions":
            return judged(given)
        if path == "classify":
            return scored(given)
        return {"data": [{"id": self.name}]} if path == "models" else {"tokens": self.tokens}


@pytest.fixture(params=["teacher", "reward model"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def scoring(kind: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Return a function that scores a group of two responses."""

    async def asked(_: Asker, __: Any, ___: str, url: str, content: Any = None) -> Any:
        return await calls.answer(url.rpartition("/")[2], content)

    monkeypatch.setattr(Asker, "request_json", asked)
    monkeypatch.setattr(asking, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(asking, "CONCURRENT_CALLS", SLOTS)
    if kind == "teacher":
        calls.name, calls.tokens = "the teacher", [1, 2]
        tokenizer: Any = SimpleNamespace(encode=lambda text: [1, 2])
        section = DistillationSection(url="http://127.0.0.1:1/v1")
        teachers = Teachers(section, RewardSection(**FAST), tokenizer)

        async def judge() -> Result:
            group = group_of()
            failures = await teachers.judge(group, {})
            return float(group.teacher_seconds.sum()), failures, group.teacher_logprobs

        return judge
    write_character_tokenizer(tmp_path, ["012+="], 64, byte_fallback=False)
    model = {"url": "http://127.0.0.1:1", "tokenizer": str(tmp_path), "batch_size": 1}
    server = ModelServer(RewardSection(name="reward_model", model=model, **FAST))
    calls.name, calls.tokens = "scorer", server.texts.tokenizer.encode(asking.PROBE)
    samples = [Sample("1+1=", None, "2", False), Sample("1+0=", None, "1", False)]

    async def score() -> Result:
        found = await server.score(samples)
        return found.seconds, found.failures, found.scores

    return score


def together(loop: OwnLoop, score: Score) -> tuple[list[Result], float]:
    """Score several groups at the same time. Returns the results and the wall seconds."""

    async def all_groups() -> list[Result]:
        return await asyncio.gather(*(score() for _ in range(GROUPS)))

    began = time.perf_counter()
    return loop.run(all_groups()), time.perf_counter() - began


def test_groups_share_the_slots_and_each_second_counts_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, loop = Calls(), OwnLoop()
    score = scoring(kind, calls, tmp_path, monkeypatch)
    found, seconds = together(loop, score)
    assert calls.counts["models"] == calls.counts["tokenize"] == 1
    assert calls.counts["completions"] + calls.counts["classify"] == 2 * GROUPS
    assert calls.most == SLOTS
    assert 0 < sum(each for each, _, _ in found) <= seconds


def test_a_server_that_is_away_is_not_asked_again_for_each_group(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, loop = Calls(is_away=True), OwnLoop()
    score = scoring(kind, calls, tmp_path, monkeypatch)
    found, _ = together(loop, score)
    assert calls.counts == {"models": 2}
    assert sum(failures for _, failures, _ in found) == 2
    calls.is_away = False  # a later group asks again
    found, _ = together(loop, score)
    assert np.isfinite([column for _, _, column in found]).all()
