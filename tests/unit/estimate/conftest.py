"""The configurations that these tests estimate."""

from __future__ import annotations

from collections.abc import Callable
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
