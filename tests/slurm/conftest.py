"""One real Slurm cluster for all tests of this folder, and small runs to submit to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not_isolated
from tests.slurm.jobs import Run, make_run
from tests.slurm.packages import Unavailable, slurm_prefix


@pytest.hookimpl(tryfirst=True)  # before the function in tests/conftest.py
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that use the undisturbed run to one process of pytest-xdist."""
    folder = Path(__file__).parent
    for item in items:
        is_ours = item.path.is_relative_to(folder)
        if is_ours and "undisturbed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("undisturbed"))


@pytest.fixture(scope="session")
def prefix() -> Path:
    """The folder with Slurm's programs."""
    if sys.platform != "linux":
        pytest.skip("Slurm runs on Linux")
    try:
        return slurm_prefix()
    except Unavailable as reason:
        pytest.skip(f"no Slurm: {reason}")


@pytest.fixture(scope="package")
def shared_cluster(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), prefix) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster of two nodes on loopback, which are idle before and after the test."""
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture
def isolated_cluster(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes whose only common network is a bridge."""
    reason = why_not_isolated()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm"), prefix, isolated=True) as cluster:
        yield cluster


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A very small run with one rank on each node. It is not submitted yet."""
    return make_run(tmp_path)


@pytest.fixture(scope="package")
def undisturbed(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run like that of `run`, finished without interruption."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"))
    job = shared_cluster.finish(run.submit(shared_cluster))
    assert job["JobState"] == "COMPLETED", shared_cluster.log(job)
    assert job["Restarts"] == "0"
    return run
