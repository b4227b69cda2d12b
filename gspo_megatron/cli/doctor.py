"""`gspo-megatron doctor`: shows what is installed on this machine, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

from gspo_megatron.cli.arguments import Commands, new_parser
from gspo_megatron.observe import environment

# The first version that works, and the first later version that was not tried. The same numbers are
# in pyproject.toml.
SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "python": ((3, 10), (3, 14)),
    "torch": ((2, 8), (3,)),
    "megatron-core": ((0, 16, 1), (0, 20)),
}
_WIDTH = 100  # columns of a line, also if the output is no terminal
_NAME, _TEXT = 22, 66  # columns of a row's name, and of what was found
_IMPORT_SECONDS = 60.0  # to import Transformer Engine from a shared file system
_IMPORT_FAILED = 3
_NO_VLLM = "not in this Python; servers may have their own (rollout.vllm.python)"
# torch comes first, as in a run: it loads CUDA's libraries from its own packages, where Transformer
# Engine does not find all of them.
_IMPORT_ENGINE = f"""
try:
    import torch
    import transformer_engine.pytorch
except BaseException as error:
    print()
    print((type(error).__name__ + ": " + str(error)).splitlines()[0])
    raise SystemExit({_IMPORT_FAILED})
"""
Finding = tuple[str, str, str]  # name, what was found, and what to do ("" if there is nothing)


def add_parser(commands: Commands) -> None:
    new_parser(
        commands, "doctor", run, "show what is installed on this machine and what is missing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print all rows. Returns 1 if something that every run needs is missing or not supported."""
    from gspo_megatron.process.sandbox_facts import protections

    rows = [*findings(environment.describe_environment(), engine_trouble()), *protections()]
    print(f" {'':<{_NAME}}{'found on this machine':<{_TEXT}}what to do")
    for row in rows:
        print("\n".join(_lines(*row)))
    return int(any(name in SUPPORTED and remedy for name, _, remedy in rows))


def _lines(name: str, text: str, remedy: str) -> list[str]:
    """Format a row in lines of at most _WIDTH columns. Long texts break between words. The remedy
    is below the text."""
    wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    parts = wrap(text, _WIDTH - _NAME - 1)
    if remedy:
        steps = wrap(remedy, _WIDTH - _NAME - 5)
        parts += [f"do: {steps[0]}", *(f"    {step}" for step in steps[1:])]
    elif len(parts[0]) < _TEXT:
        parts[0] = f"{parts[0]:<{_TEXT}}nothing"
    return [f" {name if i == 0 else '':<{_NAME}}{part}" for i, part in enumerate(parts)]


def findings(described: Mapping[str, Any], trouble: str | None) -> list[Finding]:
    """Make all rows from the results of `describe_environment()` and `engine_trouble()`."""
    versions, gpu, cpu = described["versions"], described["gpu"], described["cpu"]
    engine = _transformer_engine(versions["transformer-engine"], trouble, gpu is not None)
    return [
        *((name, *_required(name, versions[name])) for name in SUPPORTED),
        ("transformer-engine", *engine),
        ("apex", *_apex()),
        ("vllm", versions.get("vllm") or _NO_VLLM, ""),
        ("trackers", _trackers(), ""),
        ("cpu", f"{cpu['count']} x {cpu['name'] or 'unknown'}", ""),
        ("gpu", *_gpus(gpu)),
        ("precisions", _precisions(gpu is not None and trouble is None), ""),
    ]


def _required(name: str, version: str | None) -> tuple[str, str]:
    lowest, beyond = SUPPORTED[name]
    versions = f">={'.'.join(map(str, lowest))},<{'.'.join(map(str, beyond))}"
    if version is None:
        return "missing, and needed", f"pip install '{name}{versions}'"
    if lowest <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < beyond:
        return version, ""
    return f"{version}, which is not supported", f"install {name} {versions}"


def engine_trouble() -> str | None:
    """Return why an installed Transformer Engine cannot be imported. None means that the import
    works, or that Transformer Engine is not installed.

    Another process tries the import, because a library that is missing or built for another torch
    may end that process.
    """
    if not _found("transformer_engine"):
        return None
    command = [sys.executable, "-c", _IMPORT_ENGINE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_IMPORT_SECONDS:g} s"
    if done.returncode == _IMPORT_FAILED and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1]
    # -11: a segmentation fault
    return f"the process ends with {done.returncode}" if done.returncode else None


def _transformer_engine(version: str | None, trouble: str | None, has_gpu: bool) -> tuple[str, str]:
    if trouble is not None:
        remedy = (
            "pip install --force-reinstall --no-deps --no-build-isolation transformer-engine-torch "
            "compiles it for this torch; or remove it"
        )
        return f"{version or 'unknown version'}, but its import fails: {trouble}", remedy
    if version is not None and not _found("transformer_engine"):
        return f"{version}, but its module is missing: damaged", "install it again"
    if version is not None:
        return version, ""
    text = "not installed: layers are plain torch (model.backend = torch_native), no FP8"
    return text, "pip install 'gspo-megatron[gpu]' (compiling takes a while)" if has_gpu else ""


def _apex() -> tuple[str, str]:
    """Describe the installed apex. Megatron-Core uses NVIDIA's apex, which has amp_C and
    apex.multi_tensor_apply. The package apex on PyPI is a different one."""
    if not _found("apex"):
        return "not installed: Megatron-Core uses torch's kernels", ""
    if _found("amp_C") and _found("apex.multi_tensor_apply"):
        return "NVIDIA's", ""
    text = "not NVIDIA's, or built without its CUDA extensions (no amp_C)"
    return text, "pip uninstall apex; NVIDIA's is built from its repository"


def _trackers() -> str:
    """Describe which trackers of logging.trackers have their packages here."""
    versions = {
        "tensorboard": environment.installed_version("tensorboard"),
        "wandb": environment.installed_version("wandb"),
        # mlflow also comes as a smaller package
        "mlflow": environment.installed_version("mlflow")
        or environment.installed_version("mlflow-skinny"),
    }
    here = [f"{name} {version}" for name, version in versions.items() if version]
    missing = [name for name, version in versions.items() if not version]
    parts = [", ".join(here)] if here else []
    return "; ".join([*parts, f"not installed: {', '.join(missing)}"] if missing else parts)


def _gpus(gpu: Mapping[str, Any] | None) -> tuple[str, str]:
    if gpu is not None:
        memory = min(gpu["memory_bytes"], default=0) / 1e9
        names = ", ".join(sorted(set(gpu["names"])))
        sizes = f"{memory:,.0f} GB (10^9 bytes) each"
        return f"{len(gpu['names'])} x {names}, {sizes}, CUDA {gpu['cuda']}", ""
    text, remedy = "none that torch can use: runs use the CPU", ""
    if environment.output_of("nvidia-smi", "--list-gpus"):
        remedy = "nvidia-smi lists GPUs: install a torch with CUDA that this driver supports"
    return text, remedy


def _precisions(can_use_engine: bool) -> str:
    """Describe which values of training.precision can train on this machine, and what the other
    values need."""
    from gspo_megatron.config.precision import FP8, device_lacks, engine_lacks

    possible = ["fp32", "bf16"]
    others: dict[str, list[str]] = {}  # what the precisions in the list lack -> the precisions
    for name in FP8:
        lacks = engine_lacks() if can_use_engine else "needs a GPU and Transformer Engine"
        if lacks is None:
            import torch

            from gspo_megatron.platform.devices import built_for_cuda

            lacks = device_lacks(name, torch.cuda.get_device_capability(), built_for_cuda())
        if lacks is None:
            possible.append(name)
        else:
            others.setdefault(lacks, []).append(name)
    parts = (f"{', '.join(names)}: {lacks}" for lacks, names in others.items())
    return "; ".join([", ".join(possible), *parts])


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent module that cannot be imported, or is incomplete
        return False
