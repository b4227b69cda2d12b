"""An ordinary user of this machine, shared by the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.process.ordinary_user import User, ordinary_user


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    with ordinary_user() as found:
        yield found
