"""A reward model behind a URL in the rollout service. Its scores are stored with the responses, and
not requested again after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config import Config
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.rollout.asking import PROBE
from gspo_megatron.rollout.reward_model import ModelTexts
from gspo_megatron.types import Sample
from tests.unit.rollout.reward_server import right, score_of, served
from tests.unit.rollout.test_draws import draw


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_are_stored_as_they_are_and_once(
    configured: Callable[..., Config], tmp_path: Path, workers: int
) -> None:
    tokenizer, asked = load_tokenizer("toy/tokenizer.model"), []

    def answer(given: dict[str, Any]) -> Any:
        asked.extend(given["input"])
        return right(given)

    with served(answer, tokenizer.encode(PROBE)) as url:
        words = (
            f"reward.model.url={url}",
            "reward.model.tokenizer=toy/tokenizer.model",
            "reward.model.normalize=running",
            f"reward.workers={workers}",
        )
        config = configured(*words)
        count, groups = draw(config, tmp_path / "run")
        assert count == 6 and len(asked) == 6
        again, same = draw(config, tmp_path / "run")
    assert again == 0 and len(asked) == 6
    texts, rows = ModelTexts(config.reward), configured_rows(tmp_path)
    for number, group in groups.items():
        assert group.part_names == ("model", "reward") and group.parts is not None
        # The ranks add the model's part later, in the order of the steps.
        assert np.isnan(group.parts[:, 0]).all() and (group.parts[:, 1] == 0.25).all()
        assert group.rewards.tolist() == [0.25, 0.25]
        assert group.model_scores is not None and group.model_seconds is not None
        ends = (group.prompt_lengths + group.response_lengths).cumsum()
        for row, (end, length) in enumerate(zip(ends, group.response_lengths, strict=True)):
            ids = [i for i in group.tokens[end - length : end].tolist() if i != tokenizer.eos_id]
            sample = Sample(rows[number], None, tokenizer.decode(ids), False)
            assert group.model_scores[row] == score_of(texts.ids_of(sample))
        assert group.model_seconds.sum() > 0
        assert same[number].model_scores is not None
        assert same[number].model_scores.tolist() == group.model_scores.tolist()


def configured_rows(folder: Path) -> dict[int, str]:
    """The prompts of the request, by their numbers in the step."""
    lines = (folder / "toy" / "train.jsonl").read_text().splitlines()
    return {number: json.loads(lines[row])["prompt"] for number, row in enumerate((3, 0, 5))}
