"""Fixtures that the tests of a module share: a single process with Megatron's process groups, and
a process that computes with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from tests.unit.models.one_rank import one_rank_groups

    with one_rank_groups():
        yield


@pytest.fixture(scope="module")
def transformers_side() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("transformers")
    from tests.unit.hf.transformers_side import transformers_process

    with transformers_process() as process:
        yield process
