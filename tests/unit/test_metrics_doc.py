"""docs/metrics.md has every key that a run writes to metrics.jsonl, and no other key."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from gspo_megatron.config.objectives import CORRECTIONS, RECIPES
from gspo_megatron.data.toy import write_toy_dataset
from tests.e2e.resuming import TINY_MODEL, all_records, write_corpus
from tests.programs import ROOT, gspo
from tests.unit.objectives.batches import make_inputs, make_objective

PAGE = ROOT / "docs" / "metrics.md"
# The page writes NAME in place of the name of a reward's part, so the part of this reward is called
# NAME.
REWARD = "def reward(sample):\n    return {'NAME': sample.num_tokens % 3 / 3}\n"
ENVIRONMENT = """
class Twice:
    async def rollout(self, client, task):
        await client.generate(max_tokens=2)
        await client.generate(text="+", max_tokens=2)
"""
ALL_OPTIONS = {  # an RL run with every option that adds metrics
    "rollout": {
        "group_size": 4,
        "prompts_per_step": 4,
        "max_response_tokens": 6,
        "dynamic_sampling": True,
        "max_refills": 1,
    },
    "environment": {"import_path": "turns:Twice"},
    "reward": {"import_path": "parts:reward", "scale": 2.0, "on_failure": "drop_group"},
    "objective": {
        "mini_batches": 2,
        "kl": "k3",
        "kl_coefficient": 0.01,
        "correction": ["sequence_mask", "k3_mask"],
        "off_policy_mask": 0.1,
    },
    "routing": {"replay": "r2", "volatility": True},
}
# Only runs with servers write these keys. tests/vllm compares such a run with this set.
SERVED = {
    *("sync/seconds", "sync/bytes", "sync/version"),
    *("engine/tokens_per_second", "engine/kv_usage", "engine/restarts"),
    *("rollout/resubmitted", "replay/missing_rows", "perf/trainer_idle_share"),
    *("engine/busy_share", "perf/engines_idle_share"),
    *("staleness/mean", "staleness/max", "staleness/masked", "staleness/tokens_older_than_1"),
}
# Only runs with a teacher write these keys: tests/e2e/test_distillation.py,
# tests/vllm/test_distillation.py.
DISTILLED = {
    *("distill/kl", "distill/teacher_seconds"),
    *("distill/loss", "distill/greedy_agreement", "distill/top_k_mass"),
}
# Only runs with a reward model write these keys: tests/e2e/test_model_rewards.py.
SCORED = {
    *("reward_model/mean", "reward_model/std", "reward_model/tokens", "reward_model/cut"),
    *("reward_model/running_mean", "reward_model/running_std", "response/repeated"),
    *("perf/reward_model_seconds", "perf/reward_model_scores_per_second"),
    "perf/reward_model_tokens_per_second",
}
# Only runs that collapse write these keys: tests/e2e/test_collapse.py.
COLLAPSED = {"collapse/alarm", "collapse/rollbacks"}


def documented() -> set[str]:
    """The keys in the first columns of the page's tables. {a,b} stands for two keys."""
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    keys = set()
    for name in re.findall(r"`([^`]+)`", " ".join(cells)):
        head, _, several = name.removesuffix("}").partition("{")
        keys |= {head + each for each in several.split(",")}
    return keys


def normalised(keys: set[str]) -> set[str]:
    names = {
        r"_at_\d+$": "_at_K",
        r"layer_\d+": "layer_NN",
        r"^source/SOURCE\d/": "source/SOURCE/",
        f"correction/({'|'.join(CORRECTIONS)})/": "correction/NAME/",
    }
    for pattern, name in names.items():
        keys = {re.sub(pattern, name, key) for key in keys}
    return keys


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The keys that small runs of all stages write."""
    folder = tmp_path_factory.mktemp("metrics")
    write_toy_dataset(folder, "mixed", train=32, test=4, seed=1)
    write_corpus(folder / "tokenizer.model", folder / "text", 30)
    files = ("train.jsonl", "test.jsonl", "text", "pairs.jsonl")
    train, test, text, pairs = (str(folder / name) for name in files)
    data = {
        "train": {"prompts": train, "eval_prompts": test, "selection": {"by": "pass_rate"}},
        "sft": {"examples": train, "eval_examples": test},
        "pretrain": {"train": [text], "evaluation_share": 0.3, "sequence_length": 16},
        "reward-model": {"preferences": pairs, "eval_preferences": pairs, "source_field": "source"},
        "reward-model ratings": {
            "preferences": pairs,
            "eval_preferences": pairs,
            "source_field": "source",
            "response_field": "chosen",
            "rating_field": "rating",
        },
    }
    rows = [
        {"chosen": f"{n}", "rejected": f"{n}+", "rating": n, "source": f"SOURCE{n % 2}"}
        for n in range(8)
    ]
    Path(pairs).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parts.py").write_text(REWARD)
    (folder / "turns.py").write_text(ENVIRONMENT)
    keys = set()
    for name, files in data.items():
        stage, *ratings = name.split()
        suite = {"prompts": test, "samples": 2, "reward": {"on_failure": "drop_group"}}
        suites = {"evaluation": {"suites": {"SUITE": suite}}}
        own = ALL_OPTIONS | suites if stage == "train" else {"training": {"batch_size": 4}}
        config = own | {
            "model": {"megatron": TINY_MODEL},
            "data": files | {"tokenizer": str(folder / "tokenizer.model")},
            "training": {"steps": 1, "precision": "fp32"} | own.get("training", {}),
            "logging": {"dir": str(folder / name), "plots": False},
        }
        if ratings:
            config["preference"] = {"loss": "regression"}
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config))
        gspo(stage, folder / f"{stage}.yaml", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
        keys |= {key for record in all_records(folder / name) for key in record}
    return normalised(keys)


@pytest.mark.slow
def test_the_page_has_every_key_and_no_other(written: set[str]) -> None:
    assert written - documented() == set(), "missing on the page"
    assert documented() - written == SERVED | DISTILLED | SCORED | COLLAPSED, (
        "on the page, but never written"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_objectives_have_no_other_keys(name: str) -> None:
    objective = make_objective(name)
    outputs = objective(make_inputs(1, with_reference=objective.needs_reference))
    keys = set(objective.complete(dict.fromkeys(outputs.means, 1.0)))
    keys |= {f"{key}/p50" for key in outputs.values}
    assert keys - documented() == set()
