"""Preference models: import, the scores of transformers, and export."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import resolve_parallel
from gspo_megatron.rl.scorer import FrozenScorer
from tests.parallel.models import odd_moe
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.unit.hf.published import VOCABULARY
from tests.unit.hf.transformers_side import transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")

TOLERANCE = 1e-5
# of the families that have such a class in transformers
FAMILIES = ("qwen3_moe", "qwen3", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama")

_draw = random.Random(4)
SEQUENCES = [[_draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (4, 9, 1, 17)]


@pytest.fixture(scope="module")
def transformers() -> Iterator[ProcessPoolExecutor]:
    with transformers_process() as process:
        yield process


def frozen_scores(folder: Path) -> list[float]:
    config = odd_moe("tp=1", training={"micro_batch_tokens": 20})
    scorer = FrozenScorer(str(folder), config, resolve_parallel(config, 1))
    flat = torch.tensor([token for each in SEQUENCES for token in each])
    return scorer(flat, [*map(len, SEQUENCES)]).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_gives_its_scores(
    transformers: ProcessPoolExecutor, tmp_path: Path, family: str
) -> None:
    folder = write_score_model(tmp_path / family, family, seed=2)
    name, complaints, expected = transformers.submit(
        scores_by_transformers, folder, SEQUENCES
    ).result()
    assert name.endswith("ForSequenceClassification") and not complaints
    assert frozen_scores(folder) == pytest.approx(expected, abs=TOLERANCE)
