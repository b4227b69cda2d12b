"""Hosts with rehearsed devices, and the same ranks on CPUs to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config
from gspo_megatron.config.load import load_config, override
from gspo_megatron.data.toy import write_toy_dataset
from tests.cuda_rehearsal.build import missing
from tests.cuda_rehearsal.host import Host
from tests.e2e.conftest import write_config
from tests.parallel.pool import Pool

MakeConfig = Callable[..., Config]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where the device cannot be built."""
    folder = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(folder)]
    if ours and (reason := missing()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Ranks on rehearsed devices."""
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="session")
def cpus() -> Iterator[Pool]:
    """The same ranks on CPUs."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """make_config(key=value, ...) is the configuration of a run of two steps, in a new folder; `__`
    stands for the dot."""
    toy = tmp_path_factory.mktemp("toy")
    write_toy_dataset(toy, "mixed", train=64, test=8, seed=1)

    def make(**overrides: Any) -> Config:
        path = write_config(toy, tmp_path_factory.mktemp("run"))
        overrides = {"logging__plots": False, **overrides}
        return load_config(path, [override(k.replace("__", "."), v) for k, v in overrides.items()])

    return make
