"""The configurations in examples/objectives. Each is valid, and its run does not make the policy
worse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from gspo_megatron.config import check_config, load_config
from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.data.toy import write_toy_dataset
from gspo_megatron.objectives import build_objective
from gspo_megatron.rewards.registry import get_reward
from tests.e2e.resuming import all_records
from tests.programs import ROOT, gspo

FOLDER = ROOT / "examples" / "objectives"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
CUSTOM = "custom_objective"
EACH = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the root of the repository, because the paths and modules of the examples are
    relative to it."""
    monkeypatch.chdir(ROOT)


def test_there_is_one_for_each_preset_and_one_for_custom_functions() -> None:
    assert {path.stem for path in EXAMPLES} == {*RECIPES, CUSTOM}


@EACH
def test_an_example_is_sound(path: Path) -> None:
    """Make the checks of `gspo-megatron check`, except those of the prompt files, which run.sh
    makes."""
    config = load_config(path)
    check_config(config, config.world_size_hint(), for_training=True)
    get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    assert path.stem == CUSTOM or objective.name == path.stem
    assert config.logging.dir == f"runs/objectives/{path.stem}"


@EACH
def test_the_examples_differ_in_their_objective_alone(path: Path) -> None:
    def rest(of: Path) -> dict[str, object]:
        values = yaml.safe_load(of.read_text(encoding="utf-8"))
        changed = ("objective", "logging", "reward" if of.stem == CUSTOM else "")
        mini_batches = values["objective"]["mini_batches"]
        kept = {key: value for key, value in values.items() if key not in changed}
        return kept | {"mini_batches": mini_batches}

    expected = rest(FOLDER / "gspo.yaml")
    if path.stem == CUSTOM:
        expected.pop("reward")
    assert rest(path) == expected


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data that run.sh makes."""
    folder = tmp_path_factory.mktemp("data")
    write_toy_dataset(folder, "mixed", train=4000, test=400, seed=1)
    gspo(
        "sft",
        FOLDER / "start" / "sft.yaml",
        f"data.examples={folder / 'train.jsonl'}",
        f"data.tokenizer={folder / 'tokenizer.model'}",
        f"logging.dir={folder / 'start'}",
    )
    return folder


@pytest.mark.full
@EACH
def test_an_example_trains(path: Path, data: Path, tmp_path: Path) -> None:
    """The run makes twenty steps, every metric is finite, and the policy does not get worse.

    A step has 16 prompts. The responses to one prompt are similar, so a step counts as 16
    observations, and five steps count as 80. By chance, the means of the first and the last five
    steps differ with a standard deviation of std * sqrt(2 / 80), about 0.05. The end may be two
    standard deviations below the start. This finds a gradient with the wrong sign easily: with
    negated advantages, GSPO ends at 0.07 instead of 0.65. It does not prove that the policy learns.
    """
    run = tmp_path / "run"
    gspo(
        "train",
        path,
        f"data.prompts={data / 'train.jsonl'}",
        f"data.tokenizer={data / 'tokenizer.model'}",
        f"model.checkpoint_path={data / 'start'}",
        f"logging.dir={run}",
        "logging.plots=false",
    )
    records = all_records(run)
    steps = [record for record in records if record["phase"] == "rl"]
    assert [record["step"] for record in steps] == list(range(1, 21))
    for record in records:
        numbers = {key: value for key, value in record.items() if not isinstance(value, str)}
        assert [key for key, value in numbers.items() if not math.isfinite(value)] == []
    rewards = [record["reward/mean"] for record in steps]
    start, end = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    deviation = max(record["reward/std"] for record in steps)
    assert end >= start - 2 * deviation * math.sqrt(2 / 80)
    # The updates had an effect: in the last mini-batches, the policy differs from the policy that
    # sampled the responses.
    assert all(record["kl/k3"] > 0 and record["grad_norm"] > 0 for record in steps)
