"""deploy/Dockerfile, checked without Docker: the files that it copies and installs exist."""

from __future__ import annotations

import re
import subprocess

from tests.programs import ROOT

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")


def test_what_is_copied_is_there_and_sent_to_docker() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    copied = {
        name.rstrip("/")
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
    for file in re.findall(r"requirements/[\w.-]+\.txt", DOCKERFILE):
        assert (ROOT / file).is_file(), file


def test_the_image_of_nvidia_keeps_its_own_torch() -> None:
    """The test applies the filter in the Dockerfile to the pinned requirements."""
    [command] = re.findall(r"(grep -vE '[^']+' requirements/[\w.-]+)", DOCKERFILE)
    said = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    kept = {line.partition("==")[0].lower() for line in said.stdout.splitlines() if "==" in line}
    # the image has NumPy 1.26, and the pinned versions of the last two need NumPy 2
    assert not {"torch", "triton", "numpy", "pandas", "contourpy"} & kept
    assert {"megatron-core", "transformers", "pydantic", "setuptools"} <= kept


def test_the_constraints_of_nvidias_image_are_off_before_pip_runs() -> None:
    """The image sets PIP_CONSTRAINT to a file with its own version of every package."""
    cuda = DOCKERFILE.partition(" AS cuda\n")[2]
    assert "pip install" not in cuda.partition("\nENV PIP_CONSTRAINT=\n")[0]


def test_both_targets_are_named_in_the_documentation() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    assert targets == {"cpu", "cuda"}
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert all(f"`{target}`" in page for target in targets)
