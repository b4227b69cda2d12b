"""A reward function gets its own copies of rows."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.rewards.registry import get_reward
from gspo_megatron.rewards.scoring import Scorer
from gspo_megatron.types import Sample


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["one", "batch", "waiting"])
def test_what_a_reward_changes_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int
) -> None:
    """The samples of a prompt share its row. A function's changes must not reach other samples,
    with or without workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"changing_{kind}_{workers}"
    (tmp_path / f"{name}.py").write_text(
        "def one(sample, seen):\n"
        "    seen.append(1)\n"
        "    sample.fields['tests'].append(1)\n"
        "    sample.messages[0]['content'] += '!'\n"
        "    sample.answer['value'] += 1\n"
        "    return len(sample.fields['tests']) + sample.answer['value'] + 10 * len(seen)\n"
        "def batch(samples, seen):\n"
        "    return [one(sample, list(seen)) for sample in samples]\n"
        "async def waiting(sample, seen):\n"
        "    return one(sample, seen)\n"
    )
    options: dict[str, Any] = {"seen": []}
    section = RewardSection(import_path=f"{name}:{kind}", options=options, workers=workers)
    reward = get_reward("", section.import_path, options, workers)
    prompt = {"role": "user", "content": "p"}
    row = Sample("p", {"value": 0}, "r", False, {"tests": []}, 1, (prompt,))
    with closing(Scorer(reward, section)) as scorer:
        for _ in range(2):
            found, _ = scorer.score([row, replace(row, response="s")])
            assert [float(each.rewards.sum()) for each in found if each] == [12.0, 12.0]
    assert row.fields == {"tests": []} and row.answer == {"value": 0} and options == {"seen": []}
    assert prompt == {"role": "user", "content": "p"}
