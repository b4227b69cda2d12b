"""Preference models: import, the scores of transformers, and export."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import resolve_parallel
from gspo_megatron.families import FAMILIES as FAMILY_TABLE
from gspo_megatron.rl.scorer import FrozenScorer
from tests.parallel.models import odd_moe
from tests.programs import ROOT
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.unit.hf.published import VOCABULARY
from tests.unit.hf.transformers_side import transformers_process

pytestmark = pytest.mark.usefixtures("one_rank")

TOLERANCE = 1e-5
# of the families that have such a class in transformers
FAMILIES = (
    *("qwen3_moe", "qwen3", "qwen2_moe", "qwen2", "mixtral", "deepseek_v3", "gpt_oss", "llama"),
    *("qwen3_next", "qwen3_5_text"),
)

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


def classes() -> set[str]:
    """The families whose preference models transformers has."""
    import transformers

    return {
        name
        for name, each in FAMILY_TABLE.items()
        if hasattr(transformers, each.score_architecture)
    }


def test_the_page_names_the_families_without_a_class(transformers: ProcessPoolExecutor) -> None:
    present = transformers.submit(classes).result()
    text = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"has no such class for (.*?)\. Their", text, re.DOTALL)
    assert {*re.findall(r"`([^`]+)`", told)} == FAMILY_TABLE.keys() - present
    assert present >= {*FAMILIES}


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
