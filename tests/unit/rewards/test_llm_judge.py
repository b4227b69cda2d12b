"""The reward `llm_judge`, with a server on the loopback interface."""

from __future__ import annotations

import datetime
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron import addresses
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards import scoring
from gspo_megatron.rewards.registry import check_section, get_reward
from gspo_megatron.rewards.scoring import Scorer
from gspo_megatron.types import Sample
from tests.unit.data.corpora import refusal
from tests.unit.rewards.judges import Judge

FIELDS = {"hint": "{response}", "day": datetime.date(2025, 1, 31)}


def score(judge: Judge, *responses: str, section: dict[str, Any] | None = None, **options: Any):
    options = {"url": judge.url, "model": "judge", **options}
    wanted = RewardSection(name="llm_judge", options=options, **(section or {"retries": 0}))
    samples = [
        Sample("What?", ["a", 1], each, truncated=False, fields=FIELDS, row_id="1")
        for each in responses
    ]
    with closing(Scorer(get_reward("llm_judge", None, options, wanted.workers), wanted)) as scorer:
        found, failed = scorer.score(samples)
    return [None if each is None else float(each.rewards.sum()) for each in found], failed


def test_the_last_score_counts(judges: Any) -> None:
    judge = judges("Not score: 2.\nScore: 7.5")
    template = "{prompt} | {answer} | {hint} | {response} | {day} | {}"
    rewards, failed = score(judge, "{answer} {nothing}", template=template)
    assert rewards == [0.75] and not any(failed)
    ((path, key, request),) = judge.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    # Placeholders are filled in once, so placeholders inside the values stay.
    content = 'What? | ["a", 1] | {response} | {answer} {nothing} | "2025-01-31" | {}'
    assert request["messages"] == [{"role": "user", "content": content}]
    assert (request["model"], request["temperature"]) == ("judge", 0.0)
    assert score(judges("**Score:** 3"), "x", best=4.0)[0] == [0.75]
    # the scale of the score is not the score
    marked = "**Score (from 0 to 10)**: 8", "**Score**: **8**"
    for text in ("Score (0-10): 8", "Score (8/10)", *marked):
        assert score(judges(text), "x")[0] == [0.8], text


def test_a_response_writes_no_control_token_of_the_judge(judges: Any) -> None:
    judge = judges("Score: 7.5")
    marks = ["<|im_end|>", "<|im_start|>", "<｜Assistant｜>", "</s>", "[/INST]", "<end_of_turn>"]
    marks += ["]~b]", "]~!b[", "[e~[", "[|endofturn|]", "<seed:eos>", "<turn|>", "<role>", "[EOT]"]
    text = "".join(marks) + "a < b | c > d, x[INST], <sup> <think>"
    template = "<|keep|> {response} {hint}"
    score(judge, text, template=template)
    ((_, _, request),) = judge.requests
    sent = request["messages"][0]["content"]
    assert sent.replace("\u200b", "") == f"<|keep|> {text} {{response}}"
    assert not any(mark in sent for mark in [*marks, "[INST]"])
    assert sent.count("\u200b") == len(marks) + 1


def test_what_a_repetition_may_mend_is_repeated(
    judges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "FIRST_WAIT_SECONDS", 0.001)
    wrong = ["no number", "Score: -3", "Score: 99", "Score: " + "9" * 999]
    judge = judges(503, *wrong, "Score: 10")
    rewards, failed = score(judge, "x", section={"retries": 5})
    assert rewards == [1.0] and failed.errors == 5
    (line,) = refusal(score, judges(429), "x")
    assert "raised ConnectionError: http://127.0.0.1:" in line
    assert "/chat/completions says 429" in line
    rewards, failed = score(judges("no"), "x", section={"retries": 0, "on_failure": "drop_group"})
    assert rewards == [None] and failed.errors == 1


def test_an_overloaded_judge_is_asked_again_when_it_says(
    judges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "FIRST_WAIT_SECONDS", 0.001)
    for wanted, longest, seconds in (("1", 30.0, 2.0), ("3600", 0.5, 1.0), ("tomorrow", 30.0, 0.0)):
        monkeypatch.setattr(addresses, "_LONGEST_WAIT", longest)
        judge = judges(429, 503, "Score: 10")
        judge.retry_after, start = wanted, time.monotonic()
        assert score(judge, "x", section={"retries": 2})[0] == [1.0]
        assert seconds <= time.monotonic() - start < seconds + 20


@pytest.mark.parametrize("status", [401, 403, 404])
def test_mistakes_of_the_user_end_the_run_at_once(judges: Any, status: int) -> None:
    judge = judges(status)
    section = {"retries": 5, "on_failure": "drop_group"}
    (line,) = refusal(score, judge, "x", section=section)
    assert f"says {status}" in line and len(judge.requests) == 1
    (line,) = refusal(score, judge, "x", template="{task}")
    assert line == (
        "reward.options.template: no {task}; allowed: answer, day, hint, prompt, response"
    )
    assert len(judge.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_question_is_the_failure_of_its_response(judges: Any, status: int) -> None:
    """The question may be too long for the judge, for example. reward.on_failure then decides."""
    dropped = {"retries": 0, "on_failure": "drop_group", "workers": 0}
    rewards, failed = score(judges(status, "Score: 5"), "x", "y", section=dropped)
    assert sorted(rewards, key=str) == [0.5, None] and failed.errors == 1
    (line,) = refusal(score, judges(status), "x")
    assert f"/chat/completions says {status}: " in line and "raised ConnectionError" in line


def test_a_question_is_asked_once(judges: Any, tmp_path: Path) -> None:
    judge, cache = judges("Score: 5", "Score: 6", "Score: 7"), str(tmp_path / "cache")
    assert score(judge, "x", cache=cache)[0] == [0.5]
    assert score(judge, "x", "y", cache=cache)[0] == [0.5, 0.6]
    files = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(files) == 2 and len(judge.requests) == 2
    for text in ("{", "[]", '{"score": [1]}', '{"score": NaN}', '{"score": 1e999}', "[" * 99_999):
        for file in files:
            file.write_text(text)  # the cache is damaged
        assert score(judge, "x", cache=cache)[0] == [0.7]
    # The same prompt with other parameters is another question.
    assert score(judge, "x", cache=cache, max_tokens=5)[0] == [0.7]
    assert len(judge.requests) == 9


def test_options_are_checked_before_the_run() -> None:
    def checked(**options: Any) -> None:
        options = {"url": "http://x:8000/v1", "model": "m", **options}
        section = RewardSection(name="llm_judge", options=options)
        check_section(get_reward("llm_judge", None, options), section, 1)

    checked(url="https://x", template="{response}")
    assert refusal(checked, template="{prompt}") == [
        "reward.options.template: lacks {response}, the text to judge"
    ]
    for url in ("", "x:8000/v1", "http:///v1"):
        assert refusal(checked, url=url) == [
            f"reward.options.url = {url}: allowed: http://host:port/v1"
        ]
