"""`gspo-megatron doctor`: what this machine has of what a run can use."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.cli.arguments import Commands, new_parser

_REQUIRED = ("torch", "megatron-core")
_BYTES_PER_GIB = 2**30


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    new_parser(commands, "doctor", run, "tell what is installed here and what is missing")


def run(arguments: argparse.Namespace) -> int:
    """Print a table; the exit code is 1 where something is missing that every run needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gspo_megatron.observe.environment import describe_environment

    environment = describe_environment()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in findings(environment):
        table.add_row(name, text)
    Console(highlight=False).print(table, markup=False)
    missing = [name for name in _REQUIRED if environment["versions"][name] is None]
    return 1 if missing else 0


def findings(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of what was found, given `describe_environment()`."""
    versions: Mapping[str, str | None] = environment["versions"]
    cpu = environment["cpu"]
    rows = [
        (name, version or ("missing, and needed" if name in _REQUIRED else "not installed"))
        for name, version in versions.items()
        if name != "transformer-engine"
    ]
    return [
        *rows,
        ("transformer-engine", _transformer_engine(versions["transformer-engine"])),
        ("apex", apex()),
        ("cpu", f"{cpu['count']} x {cpu['name'] or 'unknown'}"),
        ("cuda", cuda(environment["gpu"])),
        ("gloo", collectives("gloo")),
        ("nccl", collectives("nccl")),
        ("free disk", f"{shutil.disk_usage(Path.cwd()).free / _BYTES_PER_GIB:,.1f} GiB here"),
    ]


def cuda(gpu: Mapping[str, Any] | None) -> str:
    """The GPUs that torch sees."""
    if gpu is None:
        return "no GPU that torch can use: runs use the CPU"
    memory = min(gpu["memory_bytes"], default=0) / _BYTES_PER_GIB
    names = ", ".join(sorted(set(gpu["names"])))
    return f"{gpu['cuda']}: {len(gpu['names'])} x {names}, {memory:,.0f} GiB each"


def apex() -> str:
    """NVIDIA's apex, or the package of the same name on PyPI, which has nothing to do with it."""
    if importlib.util.find_spec("apex") is None:
        return "not installed: Megatron-Core uses torch's own kernels"
    if importlib.util.find_spec("amp_C") is None:
        return (
            "not NVIDIA's, or built without its CUDA extensions (no amp_C): Megatron-Core may "
            "take it for the real one; pip uninstall apex"
        )
    return "NVIDIA's"


def collectives(backend: str) -> str:
    """Whether torch was built with a backend of torch.distributed."""
    if importlib.util.find_spec("torch") is None:
        return "missing with torch"
    from torch import distributed

    available = distributed.is_available() and distributed.is_backend_available(backend)
    return "available" if available else "not in this build of torch"


def _transformer_engine(version: str | None) -> str:
    if version is None:
        return "not installed: layers are plain torch (model.backend = torch_native), no FP8"
    if importlib.util.find_spec("transformer_engine") is None:
        return f"{version}, but it has no module transformer_engine: the installation is damaged"
    return version
