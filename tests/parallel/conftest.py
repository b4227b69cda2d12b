"""One pool of processes for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()
