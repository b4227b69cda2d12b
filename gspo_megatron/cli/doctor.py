"""`gspo-megatron doctor`: what this machine has of what a run can use, and how to get the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.cli.arguments import Commands, new_parser

_REQUIRED = ("torch", "megatron-core")
_BYTES_PER_GIB = 2**30
_TIMEOUT_SECONDS = 10.0  # of programs that ask a driver or a Slurm controller
_IMPORT_SECONDS = 60.0  # of Transformer Engine, from a shared file system

# Optional packages that the record of a run does not name, and what each is for.
_OPTIONAL = {
    "safetensors": "Hugging Face weights",
    "pyarrow": "prompts in Parquet",
    "math-verify": "the reward for mathematics",
    "tensorboard": "logging.trackers = [tensorboard]",
    "wandb": "logging.trackers = [wandb]",
    "mlflow": "logging.trackers = [mlflow]",
}
_EXTRAS = {
    "transformer-engine": "gpu",
    "vllm": "vllm",
    "math-verify": "math",
    "tensorboard": "trackers",
    "wandb": "trackers",
    "mlflow": "trackers",
}
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 2 * _BYTES_PER_GIB  # containers start with 64 MiB unless told otherwise


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    new_parser(commands, "doctor", run, "tell what is installed here and what is missing")


def run(arguments: argparse.Namespace) -> int:
    """Print tables; the exit code is 1 where something is missing that every run needs."""
    from gspo_megatron.observe.environment import describe_environment

    environment = describe_environment()
    trouble = engine_trouble()
    _print("installed", findings(environment, trouble))
    _print("fused paths", fused_paths(environment, trouble))
    _print("Slurm", slurm(os.environ))
    _print("missing, and how to get it", remedies(environment, trouble))
    missing = [name for name in _REQUIRED if environment["versions"][name] is None]
    return 1 if missing else 0


def _print(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, title=title, title_justify="left"
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    Console(highlight=False).print(table, markup=False)


def findings(environment: Mapping[str, Any], trouble: str | None = None) -> list[tuple[str, str]]:
    """Names and texts of what was found, given `describe_environment()` and `engine_trouble()`."""
    versions: Mapping[str, str | None] = environment["versions"]
    cpu = environment["cpu"]
    rows = [
        (name, version or ("missing, and needed" if name in _REQUIRED else "not installed"))
        for name, version in versions.items()
        if name != "transformer-engine"
    ]
    rows += [(name, _version(name) or "not installed") for name in _OPTIONAL]
    return [
        *rows,
        ("transformer-engine", _transformer_engine(versions["transformer-engine"], trouble)),
        ("apex", apex()),
        ("cpu", f"{cpu['count']} x {cpu['name'] or 'unknown'}"),
        ("cuda", cuda(environment["gpu"])),
        ("driver", driver()),
        ("gloo", collectives("gloo")),
        ("nccl", nccl()),
        (
            "free disk",
            f"{_free(Path.cwd())} here, {_free(Path(tempfile.gettempdir()))} scratch",
        ),
        ("shared memory", _free(_SHARED_MEMORY)),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free(folder: Path) -> str:
    if not folder.is_dir():
        return "none"
    return f"{shutil.disk_usage(folder).free / _BYTES_PER_GIB:,.1f} GiB"


def cuda(gpu: Mapping[str, Any] | None) -> str:
    """The GPUs that torch sees."""
    if gpu is None:
        return "no GPU that torch can use: runs use the CPU"
    memory = min(gpu["memory_bytes"], default=0) / _BYTES_PER_GIB
    names = ", ".join(sorted(set(gpu["names"])))
    return f"{gpu['cuda']}: {len(gpu['names'])} x {names}, {memory:,.0f} GiB each"


def driver() -> str:
    """The NVIDIA driver's version, by its own tool."""
    text = _answer_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return "none" if text is None else ", ".join(sorted(set(text.split()))) or "no GPU"


def _answer_of(*command: str) -> str | None:
    """What a program prints; None where it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def apex() -> str:
    """NVIDIA's apex, or the package of the same name on PyPI, which has nothing to do with it."""
    if not _found("apex"):
        return "not installed: Megatron-Core uses torch's own kernels"
    if not has_nvidia_apex():
        return (
            "not NVIDIA's, or built without its CUDA extensions (no amp_C): Megatron-Core may "
            "take it for the real one; pip uninstall apex"
        )
    return "NVIDIA's"


def has_nvidia_apex() -> bool:
    """With the extensions that Megatron-Core looks for: amp_C and apex.multi_tensor_apply."""
    return _found("apex") and _found("amp_C") and _found("apex.multi_tensor_apply")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that does not import, or is half a module
        return False


def collectives(backend: str) -> str:
    """Whether torch was built with a backend of torch.distributed."""
    if not _found("torch"):
        return "missing with torch"
    from torch import distributed

    available = distributed.is_available() and distributed.is_backend_available(backend)
    return "available" if available else "not in this build of torch"


def nccl() -> str:
    """The version that torch was built with, where it was."""
    text = collectives("nccl")
    if text != "available":
        return text
    from torch.cuda import nccl as library

    return ".".join(str(part) for part in library.version() if part != "")


def engine_trouble() -> str | None:
    """Why Transformer Engine, which is there, does not import; None: it does, or is not there.

    In a process of its own: a library that is missing or built for another torch may end it.
    """
    if not _found("transformer_engine"):
        return None
    command = [sys.executable, "-c", _IMPORT_ENGINE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing after {_IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return None
    if done.returncode == _IMPORT_FAILED and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1]
    return f"it ends the process with {done.returncode}"  # -11: a segmentation fault


_IMPORT_FAILED = 3
_IMPORT_ENGINE = f"""
try:
    import transformer_engine.pytorch
except BaseException as error:
    print()
    print((type(error).__name__ + ": " + str(error)).splitlines()[0])
    raise SystemExit({_IMPORT_FAILED})
"""


def _transformer_engine(version: str | None, trouble: str | None) -> str:
    if trouble is not None:
        return f"{version or 'unknown version'}, but it does not import: {trouble}"
    if version is None:
        return "not installed: layers are plain torch (model.backend = torch_native), no FP8"
    if not _found("transformer_engine"):
        return f"{version}, but it has no module transformer_engine: the installation is damaged"
    return version


def fused_paths(
    environment: Mapping[str, Any], trouble: str | None = None
) -> list[tuple[str, str]]:
    """Which implementation a run takes for what has several, given `engine_trouble()`."""
    if not _found("torch"):
        return []
    from torch.nn import functional

    has_gpu = environment["gpu"] is not None
    if has_gpu and trouble is not None:
        return [("layers", "Transformer Engine, which does not import: repair or remove it")]
    engine = has_gpu and _found("transformer_engine")
    nvidia = has_gpu and has_nvidia_apex()
    torch_grouped = "torch's grouped_mm" if hasattr(functional, "grouped_mm") else "one by one"
    by_engine = "Transformer Engine"
    rest = "NVIDIA's apex" if nvidia else "torch"
    return [
        ("layers", by_engine if engine else "torch (model.backend = torch_native)"),
        ("experts", f"{by_engine}'s grouped linear" if engine else torch_grouped),
        ("attention", by_engine if engine else "torch's scaled_dot_product_attention"),
        ("adam", by_engine if engine else rest),
        ("gradient norm", by_engine if engine else rest),
        ("precisions", precisions(engine)),
    ]


def precisions(engine: bool) -> str:
    """Which values of training.precision this machine can train in, and what the others need."""
    from gspo_megatron.config.precision import FP8, device_lacks, engine_lacks

    possible = ["fp32", "bf16"]
    if not engine:
        lacks = engine_lacks() or "needs a GPU"
        return f"{', '.join(possible)}; {', '.join(FP8)}: {lacks}"
    import torch

    from gspo_megatron.platform.devices import built_for_cuda

    capability, others = torch.cuda.get_device_capability(), []
    for name in FP8:
        lacks = engine_lacks() or device_lacks(name, capability, built_for_cuda())
        if lacks is None:
            possible.append(name)
        else:
            others.append(f"{name}: {lacks}")
    return "; ".join([", ".join(possible), *others])


def slurm(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """The Slurm of this machine, and the job that this process is in."""
    version = _answer_of("sinfo", "--version")
    if version is None:
        rows = [("sinfo", "not found: no Slurm here, or its programs are not in PATH")]
    else:
        rows = [("sinfo", version.strip())]
        listing = _answer_of("sinfo", "--noheader", "--format=%P|%D|%G|%l")
        for line in (listing or "").splitlines():
            name, nodes, resources, limit = (part.strip() for part in line.split("|"))
            rows.append((name, f"{nodes} nodes, {resources}, at most {limit}"))
        if listing is None:
            rows.append(("controller", "does not answer"))
    job = {name: value for name, value in variables.items() if name.startswith("SLURM_")}
    wanted = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_RESTART_COUNT")
    said = " ".join(f"{name}={job[name]}" for name in wanted if name in job)
    return [*rows, ("job", said or "this process is in none")]


def remedies(environment: Mapping[str, Any], trouble: str | None = None) -> list[tuple[str, str]]:
    """What is not there, or does not work, and may be wanted, and how to get it."""
    versions: Mapping[str, str | None] = environment["versions"]
    gpu = environment["gpu"]
    rows = [
        (name, f"pip install {name} (gspo-megatron does not run without it)")
        for name in _REQUIRED
        if versions[name] is None
    ]
    uses = {"vllm": "rollouts by vLLM", **{n: u for n, u in _OPTIONAL.items() if n in _EXTRAS}}
    if gpu is not None and trouble is None:
        uses = {"transformer-engine": "fused layers and FP8; compiles for a while", **uses}
    for name, use in uses.items():
        if versions.get(name, None) is None and _version(name) is None:
            rows.append((name, f"pip install 'gspo-megatron[{_EXTRAS[name]}]' ({use})"))
    if trouble is not None:
        rows.append(
            (
                "transformer-engine",
                "pip install --force-reinstall --no-deps --no-build-isolation "
                "transformer-engine-torch compiles it for this torch; or do without it",
            )
        )
    if _found("apex") and not has_nvidia_apex():
        rows.append(("apex", "pip uninstall apex; NVIDIA's is built from its repository"))
    if gpu is None and driver() not in ("none", "no GPU"):
        rows.append(
            (
                "cuda",
                "there is a driver; torch is built without CUDA, or too new for it",
            )
        )
    if _SHARED_MEMORY.is_dir():
        shared = shutil.disk_usage(_SHARED_MEMORY)
        if shared.total < _LITTLE_SHARED_MEMORY:
            rows.append(("shared memory", "NCCL wants more: start the container with --shm-size"))
    return rows
