"""Make docs/costs.md: GPUs and hours of the recipes, as `gspo-megatron check` estimates them.

python tools/make_costs_doc.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "costs.md"

# Folder of each recipe in examples/ -> number of ranks, and the preset of the model's shape. The
# preset is None if the folder has a config.json.
RECIPES = {
    "moonlight_16b_a3b": (16, None),
    "gpt_oss_20b": (16, None),
    "qwen3_30b_a3b": (32, "qwen3-30b-a3b"),
    "qwen3_5_35b_a3b": (32, None),
    "glm_4_5_air": (64, None),
    "qwen3_235b_a22b": (256, "qwen3-235b-a22b"),
}
_TEXT = """# What it costs

GPUs and hours of the recipes, as `gspo-megatron check --no-files CONFIG --world-size GPUS` prints
them for the configurations in `examples/` ([recipes](recipes.md)). `python
tools/make_costs_doc.py` makes this page, and a test compares it with the command.

**Nothing here is measured.** The figures are lower bounds for H100s, and for responses that all
have the full length `rollout.max_response_tokens`: training computes at 40% of the peak and sends
at 75 to 80% of the speed of the links; generation by the training model reads weights and half of
the key-value cache once for each token, at 60% of the speed of the memory. Left out: latencies,
overlap, evaluation, checkpoints, the start. Shorter responses cost less, in proportion.

{table}

For a run of your own: `gspo-megatron check CONFIG.yaml --world-size N` prints the line `time`, and
`train_step_seconds`, `generate_step_seconds`, `run_hours` and `run_gpu_hours` in its last line.
With servers (`rollout.engine: vllm`) these figures leave the generation out:
`check --rollout-plan` simulates it with the speeds of your servers ([servers](servers.md)).
The first steps of a real run replace the estimate: `perf/step_seconds` of
[metrics](metrics.md), times the steps.
"""


def figures(name: str) -> dict[str, str]:
    """Return the name=value pairs that `check` prints for a recipe."""
    ranks, preset = RECIPES[name]
    model = f"model.preset={preset}" if preset else f"model.hf_path=examples/{name}"
    words = (f"examples/{name}/config.yaml", model, "--no-files", "--gpu-memory", "80")
    command = [sys.executable, "-m", "gspo_megatron", "check", *words, "--world-size", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return dict(re.findall(r"(\w+)=(\S+)", done.stdout.splitlines()[-1]))


def row(name: str) -> str:
    """Return the table's row for a recipe."""
    found = figures(name)
    gigabytes = int(found["worst_rank_bytes"]) / 1e9
    times = [found[key] for key in ("train_step_seconds", "generate_step_seconds", "run_hours")]
    cells = [f"[{name}](../examples/{name}/README.md)", found["world_size"], f"{gigabytes:.1f}"]
    return "| " + " | ".join([*cells, *times, found["run_gpu_hours"]]) + " |"


def markdown() -> str:
    """Return the text of docs/costs.md."""
    head = "| recipe | GPUs | GB of a GPU | training, s a step | generation, s a step "
    head += "| hours | GPU-hours |"
    return _TEXT.format(table="\n".join([head, "| --- " * 7 + "|", *map(row, RECIPES)]))


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
