"""tools/bench_rollout.py with a vLLM server among the contenders."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs import ROOT, run_program


def test_vllm_is_measured(vllm_python: Path) -> None:
    tool = ROOT / "tools" / "bench_rollout.py"
    sizes = {"prompts": 2, "group": 3, "batch-size": 4, "steps": 2, "median": 4, "longest": 12}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    done = run_program(sys.executable, tool, "--vllm-python", vllm_python, *words)
    figures = dict(word.split("=") for word in done.stdout.splitlines()[-1].split())
    for name in ("vllm_first", "vllm_later", "vllm_ratio_first", "vllm_ratio_later"):
        assert float(figures[name]) > 0
