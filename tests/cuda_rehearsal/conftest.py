"""Fixtures for ranks on rehearsed CUDA devices, and for the same ranks on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config
from gspo_megatron.config.load import STAGES, load_config, override, parse_config
from gspo_megatron.data.toy import write_toy_dataset
from tests.cuda_rehearsal.build import missing
from tests.cuda_rehearsal.host import Host
from tests.e2e.conftest import write_config
from tests.e2e.resuming import TINY_MODEL, write_corpus
from tests.parallel.pool import Pool

MakeConfig = Callable[..., Config]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests of this folder if the device cannot be built."""
    folder = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(folder)]
    if ours and (reason := missing()):
        for item in ours:
            # `reason`: there is no compiler, or torch has CUDA kernels.
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package")
def host() -> Iterator[Host]:
    """A host whose ranks are on rehearsed devices."""
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="package")
def cpus() -> Iterator[Pool]:
    """A pool of ranks on CPUs."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, answers and a tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy_dataset(folder, "mixed", train=64, test=8, seed=1)
    return folder


@pytest.fixture(scope="session")
def make_config(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """make_config(key=value, ...) makes the configuration of a run of two steps in a new folder. In
    a key, `__` stands for a dot."""

    def make(**overrides: Any) -> Config:
        path = write_config(toy, tmp_path_factory.mktemp("run"))
        return load_config(path, [override(k.replace("__", "."), v) for k, v in overrides.items()])

    return make


@pytest.fixture(scope="session")
def make_stage(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """make_stage("sft" or "pretrain", layout) makes the configuration of a run of two steps in a
    new folder."""
    write_corpus(toy / "tokenizer.model", toy / "corpus")
    data = {
        "sft": {"examples": str(toy / "train.jsonl"), "eval_examples": str(toy / "test.jsonl")},
        "pretrain": {
            "train": [str(toy / "corpus")],
            "evaluation_share": 0.3,
            "sequence_length": 16,
        },
    }

    def make(stage: str, layout: str) -> Any:
        values = {
            "model": {"megatron": TINY_MODEL},
            "parallel": {"layout": layout},
            "data": {"tokenizer": str(toy / "tokenizer.model"), **data[stage]},
            "training": {
                "precision": "fp32",
                "steps": 2,
                "batch_size": 8,
                "micro_batch_tokens": 48,
                "evaluation_interval": 1,
            },
            "checkpoint": {"interval": 1},
            "logging": {"dir": str(tmp_path_factory.mktemp("run")), "plots": False},
        }
        return parse_config(values, schema=STAGES[stage])

    return make
