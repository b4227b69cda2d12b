"""A reward model in a folder, computed on the training ranks. On every layout the scores equal
those of transformers, and the running moments are the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.reward_model import RewardModelSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.errors import DataError, RewardError
from gspo_megatron.platform.groups import data_parallel_group, set_up_model_parallel
from gspo_megatron.rl.reward_model import FolderScores, ModelRewards
from gspo_megatron.types import Sample
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.unit.hf.published import VOCABULARY
from tests.unit.hf.transformers_side import transformers_process

LAYOUTS = ("tp=2,pp=2,ep=2", "dp=4,ep=2", "cp=2,dp=2")
TOLERANCE = 1e-5  # for fp32: sums over shards have another order than sums on one rank
_source = np.random.default_rng(3)
CONVERSATIONS = [_source.integers(1, VOCABULARY, size=n).tolist() for n in (5, 1, 12, 7, 30, 2, 9)]


def with_folder(layout: str, folder: Path) -> Config:
    """A configuration with the tiny MoE as policy, and a reward model of another shape and
    vocabulary."""
    config = odd_moe(layout, training={"micro_batch_tokens": 24})
    reward = RewardSection(
        name="reward_model",
        model=RewardModelSection(folder=str(folder), normalize="running"),
    )
    return config.model_copy(update={"reward": reward})


def scored(config: Config) -> tuple[dict[int, float], dict[str, float], str]:
    """The scores of this rank's conversations, the moments over all ranks, and the error text."""
    set_up_model_parallel(resolve_parallel(config, dist.get_world_size()), config.training.seed)
    # the group of rollouts, in which context-parallel ranks have different sequences
    group = data_parallel_group()
    numbers = [*range(len(CONVERSATIONS))][group.rank() :: group.size()]
    score = FolderScores(config)
    rewards = ModelRewards(config, torch.device("cpu"), score)
    assert rewards.texts is not None and rewards.texts.longest == 64
    try:
        scores = score([CONVERSATIONS[n] for n in numbers])
    except DataError as error:
        return {}, {}, str(error)
    rewards.moments.add(rewards._everyones(scores, np.array(numbers, np.int64)))
    return dict(zip(numbers, scores.tolist(), strict=True)), rewards.moments.kept, ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_score_model(tmp_path_factory.mktemp("scorer") / "model", "qwen3_moe", seed=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    with transformers_process() as process:
        name, complaints, scores = process.submit(
            scores_by_transformers, folder, CONVERSATIONS
        ).result()
    assert name == "Qwen3MoeForSequenceClassification" and not complaints
    assert len({round(each, 3) for each in scores}) > 5
    return scores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scores_are_those_of_transformers(
    pool: Pool, folder: Path, expected: list[float], layout: str
) -> None:
    found: dict[int, float] = {}
    for scores, moments, _ in pool.each(with_folder(layout, folder), scored):
        found |= scores
        assert moments["count"] == len(expected)
        assert moments["mean"] == pytest.approx(np.mean(expected), abs=TOLERANCE)
        assert moments["squares"] == pytest.approx(
            np.var(expected) * len(expected), abs=10 * TOLERANCE
        )
    assert sorted(found) == [*range(len(expected))]
    assert [found[n] for n in sorted(found)] == pytest.approx(expected, abs=TOLERANCE)


def test_a_score_that_is_not_finite_is_one_line_on_all_ranks(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["score.weight"][0, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    for _, _, said in pool.each(with_folder("dp=4,ep=2", tmp_path), scored):
        wrong = "a score is not finite; give an undamaged folder"
        assert said == f"reward.model.folder = {tmp_path}: {wrong}"


def refused(config: Config) -> str:
    """The error text if the template refuses a message that only one rank has."""
    set_up_model_parallel(resolve_parallel(config, dist.get_world_size()), config.training.seed)
    rewards = ModelRewards(config, torch.device("cpu"), FolderScores(config))
    asked = ({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    odd = Sample(
        "b", None, "c", False, messages=asked if dist.get_rank() == 1 else (), row_id="r:7"
    )
    share: Any = SimpleNamespace(group=SimpleNamespace(model_scores=None))
    try:
        rewards._scores(share, [odd])
    except RewardError as error:
        return str(error)
    return ""


def test_a_prompt_that_the_model_cannot_read_is_told_on_all_ranks(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_character_tokenizer(tmp_path, ["abc"], VOCABULARY, byte_fallback=False)
    for said in pool.each(with_folder("dp=4,ep=2", tmp_path), refused):
        assert said.startswith(f"reward.model.folder = {tmp_path}: a prompt has 2 messages (r:7)")
        assert "\n" not in said
