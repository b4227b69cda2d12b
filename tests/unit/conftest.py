"""Shared fixtures: a single process with Megatron's process groups, a process that computes with
transformers, and a small Hub."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hub import SmallHub


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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A small Hub, which this process uses in place of the real one."""
    from tests.hub import small_hub, use_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with small_hub() as found:
        use_hub(found, tmp_path / "home", monkeypatch)
        yield found
