"""Every test sees the same environment, on a laptop, in CI and inside a Slurm job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

# Set at import, before any test module imports torch, matplotlib or a tokenizer library.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that downloads is a bug
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
# Variables that torchrun, srun and sbatch set. A test that needs them sets them itself.
# SLURM_CONF stays: it names the file of the cluster's settings and exists outside of jobs too.
_LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|TORCHELASTIC|PMIX?|PET|SKYPILOT)_.*|SLURM_(?!CONF$).*)"
)
for _name in filter(_LAUNCHER.fullmatch, list(os.environ)):
    del os.environ[_name]

import pytest  # noqa: E402

_ALONE = "pytest to be called for tests/gpu alone"
_TESTS = Path(__file__).resolve().parent
_GPU_TESTS = _TESTS / "gpu"
# The order of the folders for the processes of pytest-xdist. Tests that take minutes come first.
# Only short tests are left at the end, so no process waits long for another.
_ORDER = ("vllm", "slurm", "e2e", "docs", "parallel", "cuda_rehearsal", "gpu", "unit")
# In these folders one process runs all tests of a file, because they share a slow setup.
_BY_FILE = ("parallel", "cuda_rehearsal", "gpu", "unit")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, unless pytest was called for tests/gpu alone.

    Other tests start up to four ranks, and each would ask for a GPU of its own."""
    if not of_gpus_alone(config.args, config.invocation_params.dir):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first asks for a device


def of_gpus_alone(arguments: Sequence[str], folder: Path) -> bool:
    """Whether all of pytest's arguments, relative to a folder, are tests of tests/gpu."""
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(_GPU_TESTS) for path in paths)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several processes; skip those marked `gpu` where there is no GPU."""
    if getattr(config.option, "loadgroup", False):  # true in the processes of pytest-xdist
        _share_out(items)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # takes a second, so only if there are such tests

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU, and {_ALONE}"))


def _share_out(items: list[pytest.Item]) -> None:
    """Mark the tests that one process must run together, and put the longest first.

    In each folder these are the tests that share a server or a run, then those marked `slow`."""

    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _BY_FILE:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(_TESTS))))
        is_alone = item.get_closest_marker("xdist_group") is None
        at = _ORDER.index(folder) if folder in _ORDER else len(_ORDER)
        return at, is_alone, item.get_closest_marker("slow") is None

    items.sort(key=place)
