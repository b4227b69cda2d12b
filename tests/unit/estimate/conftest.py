"""The configurations that these tests estimate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config, parse_config

ConfigMaker = Callable[..., Config]


@pytest.fixture
def make_config() -> ConfigMaker:
    """A configuration from a preset, a layout and further sections."""

    def make(preset: str, layout: str, **sections: Any) -> Config:
        values = {
            "model": {"preset": preset} | sections.pop("model", {}),
            "parallel": {"layout": layout},
            "data": {"tokenizer": "none"} | sections.pop("data", {}),
        }
        return parse_config(values | sections)

    return make


@pytest.fixture
def own_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with two objectives: `guarded` needs a reference policy."""
    name = "objectives_of_estimates"
    (tmp_path / f"{name}.py").write_text(
        "def guarded(inputs): ...\ndef plain(inputs): ...\nguarded.needs_reference = True\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name
