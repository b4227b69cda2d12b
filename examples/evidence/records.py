"""The kept results: one JSON line for each result, with the version of the code that made it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.observe.metrics_files import read_json_lines

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# How the rollout engine differs from the trainer.
MISMATCHES = ("none", "bf16_vllm", "router_noise")


def code_version() -> str:
    """The state of the repository, as git names it; "unknown" without git."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a results file; an empty list if the file does not exist yet. Raises
    DataError."""
    return read_json_lines(path) if path.exists() else []


def add(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line, with the code's version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(rounded({**record, "code": code_version()}), ensure_ascii=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def rounded(value: Any) -> Any:
    """The JSON value with all floats rounded to five digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
