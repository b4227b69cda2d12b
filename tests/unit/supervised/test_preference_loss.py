"""The loss and gradients of a preference model, compared with plain float64 formulas and with TRL's
RewardTrainer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.stages import PreferenceSection
from gspo_megatron.data.preferences import Preference, PreferenceCounts, PreferenceData
from gspo_megatron.families.weight_map import weight_map
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import build_policy
from gspo_megatron.models.optimizer import Schedule, build_trainer, zero_gradients
from gspo_megatron.supervised.preferences import (
    PreferenceBatches,
    PreferenceUpdater,
    ScoredRows,
)
from gspo_megatron.verify.parity import gather_gradients
from tests.unit.hf.preference_folder import write_score_model
from tests.unit.hf.published import VOCABULARY
from tests.unit.hf.transformers_side import transformers_process
from tests.unit.supervised.synthetic_preferences import preference_config
from tests.unit.supervised.trl_side import Group, Step, plain_step, trl_step

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    with transformers_process() as process:
        yield process


def groups_of(seed: int, most_rejected: int) -> list[Group]:
    """Groups of responses of different lengths. No token is the padding token."""
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(2, 12))]

    found = []
    for _ in range(6):
        rejected = [ids() for _ in range(draw.randint(1, most_rejected))]
        found.append(([ids(), *rejected], [draw.random() for _ in rejected]))
    return found


def data_of(groups: list[Group]) -> PreferenceData:
    def each() -> Iterator[tuple[Preference, str]]:
        for responses, margins in groups:
            flat = np.array([token for ids in responses for token in ids], np.int32)
            lengths = np.array([*map(len, responses)], np.int64)
            yield Preference(flat, lengths, np.array(margins), source=0), ""

    return PreferenceData(each(), PreferenceCounts())


def our_step(folder: Path, groups: list[Group], center: float, precision: str) -> Step:
    """The loss of our step, and its gradients by the names of the folder's tensors."""
    model = {"hf_path": str(folder), "megatron": {"moe_aux_loss_coeff": 0.0}}
    config = preference_config(
        preference={"center_coefficient": center}, training={"precision": precision}
    )
    config = config.model_copy(update={"model": type(config.model)(**model)})
    policy = build_policy(config, resolve_parallel(config, 1), VOCABULARY)
    load_hf(folder, policy)
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-3, 1e-3, 0, 1, "constant"))
    batches = PreferenceBatches(config, policy, 0, data_of(groups))
    updater = PreferenceUpdater(policy, trainer, config.preference, None)
    zero_gradients(policy.chunks, trainer.optimizer)
    metrics = updater.accumulate(batches.batch([batches.train[n] for n in range(len(groups))]))
    shape = config.resolved_model()
    weights = weight_map(config.model.family(shape), shape, VOCABULARY)
    gradients: dict[str, Tensor] = {}
    for name, gradient in gather_gradients(policy)[0].items():
        for box in weights[name].boxes:
            whole = gradients.setdefault(box.name, gradient.new_zeros(weights.shapes[box.name]))
            whole[box.source_slices] = box.to_source(gradient[box.target_slices])
    return metrics.reduce(updater.data_group)["loss"], gradients


def assert_same_step(found: Step, expected: Step, tolerance: float) -> None:
    """Compare loss and gradients. transformers has two tensors for all experts of a layer."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    ours = dict(found[1])
    for name, theirs in expected[1].items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            mine = joint(ours, name, len(theirs))
        else:
            mine = ours.pop(name)
        scale = float(theirs.abs().max())
        assert scale > 0, name
        assert float((mine - theirs).abs().max()) <= tolerance * max(scale, 1e-3), name
    assert not ours


def joint(ours: dict[str, Tensor], name: str, count: int) -> Tensor:
    """Join the gradients of single experts to transformers' tensor of all experts."""
    start, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return torch.stack([ours.pop(f"{start}.{n}.down_proj.weight") for n in range(count)])
    parts = (
        [ours.pop(f"{start}.{n}.{part}_proj.weight") for part in ("gate", "up")]
        for n in range(count)
    )
    return torch.stack([torch.cat(pair) for pair in parts])


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_in_float64_it_is_the_formula(
    other: ProcessPoolExecutor, tmp_path: Path, family: str
) -> None:
    """The groups have several rejected responses and margins, and the loss has a term for
    centering. The tolerance allows for transformers, which computes rotary embeddings in
    float32."""
    folder = write_score_model(tmp_path / "model", family, seed=3)
    groups = groups_of(1, most_rejected=3)
    expected = other.submit(plain_step, folder, groups, 0.05).result()
    assert_same_step(our_step(folder, groups, 0.05, "fp64"), expected, 1e-5)


def test_it_is_the_step_of_trl(other: ProcessPoolExecutor, tmp_path: Path) -> None:
    folder = write_score_model(tmp_path / "model", "qwen3_moe", seed=4)
    groups = groups_of(2, most_rejected=1)
    expected = other.submit(trl_step, folder, groups, 0.01, tmp_path / "trl").result()
    assert_same_step(our_step(folder, groups, 0.01, "fp32"), expected, 1e-4)


def figures_of(
    section: PreferenceSection, scores: Tensor, rows: ScoredRows
) -> tuple[float, dict[str, float]]:
    """The loss of a batch of nine preferences, and its figures."""
    updater: Any = SimpleNamespace(section=section)
    total, means = PreferenceUpdater._loss(updater, scores, rows, count=9)
    return float(total), {name: float(a / b) for name, (a, b) in means.items()}


def test_the_figures_of_an_update_are_means_over_prompts() -> None:
    """The scores of a micro-batch with three prompts. In one pair the scores are equal, and in one
    the rejected response is better."""
    scores = torch.tensor([1.5, 0.25, 1.5, 2.0, -0.5, 3.0, -1.0, 0.5], dtype=torch.float64)
    pairs = [(0, 1, 0.1, 1 / 2), (0, 2, 0.2, 1 / 2), (3, 4, 0.3, 1 / 2), (3, 5, 0.4, 1 / 2)]
    pairs += [(6, 7, 0.5, 1.0)]
    chosen, rejected, margins, weights = (torch.tensor(each) for each in zip(*pairs, strict=True))
    rows = ScoredRows(chosen, rejected, margins.double(), weights.double())
    loss, found = figures_of(PreferenceSection(center_coefficient=0.05), scores, rows)
    expected = dict.fromkeys(("accuracy", "difference", "chosen", "rejected", "loss"), 0.0)
    for first, second, margin, weight in pairs:
        one, other = float(scores[first]), float(scores[second])
        share = weight / 3
        expected["accuracy"] += share * (1.0 if one > other else 0.5 * (one == other))
        expected["difference"] += share * (one - other)
        expected["chosen"] += share * one
        expected["rejected"] += share * other
        expected["loss"] += share * math.log1p(math.exp(margin - (one - other)))
        expected["loss"] += share * 0.05 * (one + other) ** 2
    assert loss == pytest.approx(expected["loss"] * 3 / 9, rel=1e-6)
    mean = expected.pop("loss")
    named = {f"preference/{name}": value for name, value in expected.items()} | {"loss": mean}
    assert found == pytest.approx(named, rel=1e-6)


def test_the_figures_of_ratings_are_means_over_responses() -> None:
    scores = torch.tensor([1.5, 0.25, -1.0], dtype=torch.float64)
    ratings, nothing = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64), torch.zeros(0)
    rows = ScoredRows(nothing.long(), nothing.long(), ratings, nothing.double())
    loss, found = figures_of(PreferenceSection(loss="regression"), scores, rows)
    squares = 0.5**2 + 0.25**2 + 2.0**2
    assert loss == pytest.approx(squares / 9)
    assert found == pytest.approx({"preference/score": 0.25, "loss": squares / 3})
