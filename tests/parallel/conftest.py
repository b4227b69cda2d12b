"""One pool of processes for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool
from tests.parallel.updates import Updates


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def updates(pool: Pool) -> Updates:
    return Updates(pool)
