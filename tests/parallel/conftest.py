"""One pool of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool
from tests.parallel.updates import Updates


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()


@pytest.fixture(scope="package")
def updates(pool: Pool) -> Updates:
    return Updates(pool)
