"""The kept tables of Transformer Engine's signatures, which tools/te_signatures.py makes."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
from pathlib import Path

from packaging.version import Version

from tests.programs import ROOT
from tools.te_calls import signature_of

FOLDER = ROOT / "tests/unit/platform/transformer_engine"
TABLES = {path.stem: path for path in FOLDER.glob("*.json")}
SITE = Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))


class Table:
    """What each name is: see te_calls.Look."""

    def __init__(self, version: str) -> None:
        content = json.loads(TABLES[version].read_text())
        assert content["version"] == version
        self.names: dict[str, str | None] = content["names"]

    def __call__(self, path: str) -> str | None:
        assert path in self.names, f"not in the table: make it again, for {path}"
        return self.names[path]


def versions() -> list[str]:
    """Of the tables: what we install with this Megatron-Core, and later ones."""
    found = importlib.metadata.version("megatron-core")
    pins = (ROOT / "requirements" / f"gpu-megatron-{found}.txt").read_text().splitlines()
    (pin,) = (line.partition("==")[2] for line in pins if line.startswith("transformer-engine=="))
    assert pin in TABLES
    return sorted((v for v in TABLES if Version(v) >= Version(pin)), key=Version)


class Unknown:
    """A default that is no literal."""


def literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unknown


def with_defaults(text: str) -> inspect.Signature:
    return signature_of(text, literal)


__all__ = ["SITE", "TABLES", "Table", "Unknown", "versions", "with_defaults"]
