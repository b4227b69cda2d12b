"""Tests outside of tests/gpu use no GPU, because one GPU cannot serve four ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import of_gpus_alone
from tests.programs import ROOT


def test_gpus_are_hidden_here_and_from_every_process_that_a_test_starts() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("arguments", "folder", "alone"),
    [
        (["tests/gpu"], ".", True),
        (["gpu/test_device.py::test_one", "gpu"], "tests", True),
        ([str(ROOT / "tests" / "gpu")], "docs", True),
        (["tests/gpu", "tests/unit"], ".", False),
        (["tests"], ".", False),
        (["gpu"], ".", False),  # a folder of the same name elsewhere
        ([], "tests/gpu", False),
    ],
)
def test_but_not_from_tests_of_gpus_alone(arguments: list[str], folder: str, alone: bool) -> None:
    assert of_gpus_alone(arguments, ROOT / folder) is alone


@pytest.mark.parametrize(("chosen", "seen"), [(None, ""), ("", ""), ("0,1", "0,1")])
def test_the_demo_uses_gpus_on_request_alone(tmp_path: Path, chosen: str | None, seen: str) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "devices=${CUDA_VISIBLE_DEVICES-unset}"\nexit 1\n')
    python.chmod(0o755)
    environ = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    if chosen is not None:
        environ["CUDA_VISIBLE_DEVICES"] = chosen
    done = subprocess.run(
        ["bash", ROOT / "examples" / "tiny_cpu" / "run.sh"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"devices={seen}\n" in done.stdout
