"""Writes environment.json: versions, processors, commit and Slurm job of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gspo_megatron
from gspo_megatron import hub
from gspo_megatron.files import write_atomically

_PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "flash-attn"),
    *("numpy", "transformers", "sentencepiece", "vllm"),
)
_SLURM_VARIABLES = {
    "job_id": "SLURM_JOB_ID",
    "job_name": "SLURM_JOB_NAME",
    "nodes": "SLURM_JOB_NUM_NODES",
    "node_list": "SLURM_JOB_NODELIST",
    "restarts": "SLURM_RESTART_COUNT",
}


def describe_environment(vllm_python: str | None = None) -> dict[str, Any]:
    """Return versions, processors, commit, world size and Slurm job of this process.

    `vllm_python` is the interpreter of the vLLM servers, if it differs from this one. A value is
    None if there is nothing to report: without a GPU, a git checkout or a Slurm job, or if a
    package is not installed.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "host": platform.node(),
        "system": platform.platform(),
        "versions": {
            "gspo-megatron": gspo_megatron.__version__,
            "python": platform.python_version(),
            **{package: installed_version(package) for package in _PACKAGES},
            **({} if vllm_python is None else {"vllm": version_in(vllm_python, "vllm")}),
        },
        "cpu": {"name": _cpu_name(), "count": os.cpu_count()},
        "gpu": _gpus(),
        "git": _git_state(Path(__file__).resolve()),
        "hub": hub.known_commits() or None,
        "world_size": _world_size(),
        "slurm": {k: os.environ[v] for k, v in _SLURM_VARIABLES.items() if v in os.environ} or None,
    }


def write_environment(run_dir: str | Path, vllm_python: str | None = None) -> Path:
    """Write environment.json into a run folder and return its path."""
    content = json.dumps(describe_environment(vllm_python), indent=2) + "\n"
    return write_atomically(Path(run_dir) / "environment.json", content.encode())


def installed_version(package: str) -> str | None:
    """Return the version of a package in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_in(python: str, package: str) -> str | None:
    """Return the version of a package in another interpreter; None if it is not installed."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return output_of(python, "-c", program) or None


def _cpu_name() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has this file
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or None


def _gpus() -> dict[str, Any] | None:
    if not _torch_can_use_gpus():
        return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "names": [gpu.name for gpu in gpus],
        "memory_bytes": [gpu.total_memory for gpu in gpus],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _torch_can_use_gpus() -> bool:
    """Whether the installed torch was built for GPUs.

    Reads torch's version.py, because importing torch takes 1.5 seconds."""
    if "torch" in sys.modules:
        return True
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    built: dict[str, Any] = runpy.run_path(str(version)) if version.is_file() else {"cuda": "?"}
    return any(built.get(name) is not None for name in ("cuda", "hip", "xpu"))


def _git_state(source: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that holds `source`; None for an installed copy."""
    # git must track the file `source` itself: an installed copy may be in a virtual environment
    # inside another repository, and the commit of that repository does not describe this code.
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(source, "status", "--porcelain", "--untracked-files=no")
    # None: git could not tell, for example because the file system is too slow
    return {"commit": commit, "modified": None if changes is None else bool(changes)}


def _git(source: Path, *arguments: str) -> str | None:
    return output_of("git", "-C", str(source.parent), *arguments)


def output_of(*command: str, seconds: float = 10.0, **changes: str) -> str | None:
    """Return a program's stripped stdout; None if it is missing, fails or times out. `changes`:
    environment variables to set."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
            env=os.environ | changes,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _world_size() -> int:
    sizes = (os.environ.get(variable, "") for variable in ("WORLD_SIZE", "SLURM_NTASKS"))
    return next((int(text) for text in sizes if text.isdigit()), 1)
