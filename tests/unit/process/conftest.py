"""An ordinary user of this machine. All tests in one process of pytest share this user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.process.ordinary_user import User, ordinary_user


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    with ordinary_user() as found:
        yield found
