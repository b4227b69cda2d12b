"""A single process with Megatron's process groups, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from tests.unit.models.one_rank import one_rank_groups

    with one_rank_groups():
        yield
