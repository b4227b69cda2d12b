"""Programs that run as another, ordinary user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

UID = 65534  # the user `nobody`

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0,
    reason="only root can start a program as another user",
)


def program(code: str, *words: object) -> subprocess.Popen[str]:
    """Start a Python program as the other user, with pipes. It uses an interpreter of the system,
    because only root may be able to read the environment of the tests."""
    return subprocess.Popen(
        ["/usr/bin/env", "-i", _interpreter(), "-I", "-S", "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        user=UID,
        group=UID,
        extra_groups=(),
    )


def said_by(code: str, *words: object) -> str:
    """The output of a program that ends successfully."""
    with program(code, *words) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return out


def _interpreter() -> str:
    for path in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        if os.path.exists(path):
            checked: Any = subprocess.run(
                [path, "-I", "-S", "-c", ""], user=UID, group=UID, capture_output=True, check=False
            )
            if checked.returncode == 0:
                return path
    pytest.skip("no Python that another user can start")
