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
# What torchrun, srun and sbatch set: the tests that need such variables set them themselves.
# SLURM_CONF stays: it says where a cluster's settings are, not that this is a job.
_LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|TORCHELASTIC|PMIX?|PET|SKYPILOT)_.*|SLURM_(?!CONF$).*)"
)
for _name in filter(_LAUNCHER.fullmatch, list(os.environ)):
    del os.environ[_name]

import pytest  # noqa: E402

_ALONE = "pytest to be called for tests/gpu alone"
_TESTS = Path(__file__).resolve().parent
_GPU_TESTS = _TESTS / "gpu"
# In the order in which processes of pytest-xdist take their tests. What takes minutes comes first:
# at the end there are only short tests left, and no process waits for another.
_ORDER = ("vllm", "slurm", "e2e", "docs", "parallel", "cuda_rehearsal", "gpu", "unit")
# One process has all tests of a file, which share what takes long to set up.
_BY_FILE = ("parallel", "cuda_rehearsal", "gpu", "unit")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, unless pytest was called for tests/gpu alone: what is tested with four ranks
    is, on a workstation with fewer GPUs, refused by ranks that have none of their own."""
    if not of_gpus_alone(config.args, config.invocation_params.dir):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first asks for a device


def of_gpus_alone(arguments: Sequence[str], folder: Path) -> bool:
    """Whether all of pytest's arguments, relative to a folder, are tests of tests/gpu."""
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(_GPU_TESTS) for path in paths)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order them for several processes; skip the tests marked `gpu` where there is no GPU."""
    if getattr(config.option, "loadgroup", False):  # of pytest-xdist, in its processes
        _share_out(items)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # a second that a run without such tests does not pay

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU, and {_ALONE}"))


def _share_out(items: list[pytest.Item]) -> None:
    """Mark what one process shall have, and put what takes longest first: in each folder that is
    what shares a server or a run, then what is marked `slow`."""

    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _BY_FILE:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(_TESTS))))
        is_alone = item.get_closest_marker("xdist_group") is None
        at = _ORDER.index(folder) if folder in _ORDER else len(_ORDER)
        return at, is_alone, item.get_closest_marker("slow") is None

    items.sort(key=place)
