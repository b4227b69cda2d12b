"""Loads the rehearsed device into a process whose PYTHONPATH contains this folder. This happens
just before the first import of torch, so a launcher or a service that needs no torch loses no
time."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class _BeforeTorch:
    """A finder of modules. It loads the device before torch is imported, and completes the device
    after that."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if ROOT not in sys.path:
            sys.path.append(ROOT)
        from tests.cuda_rehearsal import runtime

        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            runtime.load_device()
            execute(module)
            runtime.complete()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CUDA_REHEARSAL_LIBRARY" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.meta_path.insert(0, _BeforeTorch())  # type: ignore[arg-type]
