"""Megatron-Core as it is on disk, beside what platform.megatron_fixes made of the imported one."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType

import megatron.core
import pytest

needs_no_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)


def fresh(module: ModuleType) -> ModuleType:
    """A module imported anew, which replaces nothing."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(made)
    return made


def is_0_16() -> bool:
    """Of the line for Python 3.10 and 3.11."""
    return megatron.core.__version__.startswith("0.16")
