"""Servers for tests of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.rewards.judges import Answer, Judge


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    made: list[Judge] = []

    def make(*answers: Answer) -> Judge:
        made.append(Judge(*answers))
        return made[-1]

    yield make
    for each in made:
        each.close()
