"""Routing Replay with several kinds of routers: a sigmoid with a bias and groups of experts, and
the package's own softmax with a bias. Every token goes to its replayed experts, and the update is
the same on all layouts."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from gspo_megatron.config import check_config, parse_config
from gspo_megatron.verify.parity import Cut
from gspo_megatron.verify.synthetic import synthetic_batch
from tests.parallel.pool import Pool
from tests.parallel.test_replay import Watched, watched, with_routes
from tests.parallel.updates import (
    FP64_TOLERANCE_OF_ROUTERS,
    assert_same_update,
    update,
    update_from_folder,
)
from tests.unit.hf.published import CONFIGS, VOCABULARY, write_model

FAMILIES = ("minimax_m2", "bailing_moe_v2", "ernie4_5_moe")


def watched_from_folder(**arguments: object) -> Watched:
    return watched(update_from_folder, **arguments)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_model(root / family, family, seed=1)
    return root


def run(pool: Pool, folder: Path, layout: str, mode: str) -> Watched:
    """Make an update of three mini-batches."""
    config = parse_config(
        {
            "model": {"hf_path": str(folder), "backend": "torch_native"},
            "parallel": {"layout": layout},
            "data": {"tokenizer": "none"},
            "objective": {"name": "grpo"},
            "optimizer": {"learning_rate": 1e-3},
            "routing": {"replay": mode, "volatility": True},
            "training": {"precision": "fp64"},
        }
    )
    check_config(config, config.world_size_hint())
    batch = synthetic_batch(config.objective, VOCABULARY)
    if mode == "r3":
        sizes = CONFIGS[folder.name]
        batch = with_routes(batch, sizes.get("moe_k") or sizes["num_experts_per_tok"])
    options = {"batch": batch, "cut": Cut(replicas=2, token_budget=40, multiple=2)}
    options |= {"mini_batches": 3, "vocab_size": VOCABULARY}
    return update(pool, config, watched_from_folder, **options)


@functools.cache
def of_one_rank(pool: Pool, folder: Path, mode: str) -> Watched:
    return run(pool, folder, "tp=1", mode)


QUICK = (("r2", "tp=2,pp=2,ep=2"), ("r3", "cp=2"))
REST = (("r3", "tp=2,pp=2,ep=2"), ("r2", "cp=2"), ("off", "tp=2,pp=2,ep=2"), ("off", "cp=2"))


@pytest.mark.parametrize(
    ("mode", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_goes_where_it_is_told(
    pool: Pool, folders: Path, family: str, mode: str, layout: str
) -> None:
    alone = of_one_rank(pool, folders / family, mode)
    sharded = run(pool, folders / family, layout, mode)
    assert 0.01 < alone.result.metrics["routing/volatility"] < 0.9
    assert alone.wrong == sharded.wrong == 0
    replays = mode != "off"
    bytes_of_padding = "replay/bytes" if replays else ""
    results = sharded.result, alone.result
    assert_same_update(*results, FP64_TOLERANCE_OF_ROUTERS, but=bytes_of_padding)
    assert (alone.replayed > 0) == (alone.moved > 0) == (sharded.replayed > 0) == replays
