"""The environment that has the package verifiers, for all tests that use its tasksets."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT

_PINS = ROOT / "requirements" / "verifiers.txt"
_FITS = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))"


@functools.cache
def find_verifiers_python() -> Path:
    """Return the interpreter of an environment with the pinned packages. If the environment is
    missing, it is made, which takes minutes. If this machine cannot make it, the test is
    skipped."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gspo-megatron"
    folder = cache / f"verifiers-{hashlib.sha256(_PINS.read_bytes()).hexdigest()[:12]}"
    python, ready = folder / "bin" / "python", folder / "ready"
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test runs makes the environment
        if not ready.exists():
            _make(folder, python)
            ready.touch()
    return python


def _make(folder: Path, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    own = {key: v for key, v in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    found = [
        path for name in ("python3.11", "python3.12", "python3") if (path := shutil.which(name))
    ]
    fitting = [p for p in found if not subprocess.run([p, "-c", _FITS], env=own).returncode]
    if not fitting:
        pytest.skip("no Python 3.11 or 3.12 with its venv module, for the package verifiers")
    subprocess.run([fitting[0], "-m", "venv", folder], check=True, env=own)
    install = [python, "-m", "pip", "install", "-qq", "--no-deps", "--no-input", "-r", _PINS]
    done = subprocess.run(install, capture_output=True, text=True, env=own, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        pytest.skip(f"pip cannot install requirements/verifiers.txt: {lines[-1:]}")
