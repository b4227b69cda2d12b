"""The kept results: JSON lines, one a result, each with the version of the code that made it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MISMATCHES = ("none", "bf16_vllm", "router_noise")  # what the engine that samples does otherwise


def code_version() -> str:
    """As git names the present state of the repository; "unknown" without git."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add(path: Path, record: Mapping[str, Any]) -> None:
    """One more line, with the code's version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(rounded({**record, "code": code_version()}), ensure_ascii=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def rounded(value: Any) -> Any:
    """Floats with five digits, all through a JSON value."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
