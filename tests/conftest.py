"""Settings for all tests. With them, the environment variables of a test are the same on a laptop,
in CI and inside a Slurm job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

# These are set before any test module imports torch, matplotlib or a tokenizer library.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may download anything
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a tokenizer would not survive a fork
# Variables that torchrun, srun and sbatch set. They are removed; a test that needs such a variable
# sets it itself. SLURM_CONF is kept: it names the file of the cluster's settings, and also exists
# outside of jobs.
_LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(LOCAL|GROUP|TORCHELASTIC|PMIX?|PET|SKYPILOT)_.*|SLURM_(?!CONF$).*)"
)
for _name in filter(_LAUNCHER.fullmatch, list(os.environ)):
    del os.environ[_name]

import pytest  # noqa: E402

_ALONE = "pytest to be called for tests/gpu alone"
_TESTS = Path(__file__).resolve().parent
_GPU_TESTS = _TESTS / "gpu"
# The order in which the processes of pytest-xdist get the folders. Tests that take minutes come
# first. At the end only short tests are left, so no process of pytest-xdist waits long for another
# one.
_ORDER = ("vllm", "slurm", "e2e", "docs", "parallel", "cuda_rehearsal", "gpu", "unit")
# In these folders one process runs all tests of a file, because they share a slow setup.
_BY_FILE = ("parallel", "cuda_rehearsal", "gpu", "unit")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, unless pytest was called only for tests in tests/gpu.

    The tests outside of tests/gpu start up to four ranks, and each rank would need its own GPU.
    """
    if not of_gpus_alone(config.args, config.invocation_params.dir):
        # torch reads this variable when it is first asked for a device
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def of_gpus_alone(arguments: Sequence[str], folder: Path) -> bool:
    """Whether all arguments of pytest, relative to a folder, are tests in tests/gpu."""
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(_GPU_TESTS) for path in paths)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own function of this name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several processes. Without a GPU, skip tests with the mark `gpu`."""
    if getattr(config.option, "loadgroup", False):  # true in the processes of pytest-xdist
        _share_out(items)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # takes a second, so it is imported only for such tests

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU, and {_ALONE}"))


def _share_out(items: list[pytest.Item]) -> None:
    """Mark the tests that must run in the same process, and put the longest tests first.

    The tests of a file run in the same process if they share a fixture with the scope `module`,
    which would otherwise be made in each process. In each folder, the tests that share a server or
    a run come first, then the tests with the mark `slow`.
    """

    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        folder = item.path.relative_to(_TESTS).parts[0]
        is_marked = item.get_closest_marker("xdist_group") is not None
        if folder in _BY_FILE or (not is_marked and shares_with_its_file(item)):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(_TESTS))))
        is_alone = item.get_closest_marker("xdist_group") is None
        at = _ORDER.index(folder) if folder in _ORDER else len(_ORDER)
        return at, is_alone, item.get_closest_marker("slow") is None

    items.sort(key=place)


def shares_with_its_file(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(definition.scope == "module" for *_, definition in fixtures)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment with vLLM for CPUs. It is made if it is missing."""
    from tests.vllm.environment import find_vllm_python

    return find_vllm_python()
