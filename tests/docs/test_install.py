"""The versions in docs/install.md are those in requirements/, and pip can install them together."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
REQUIREMENTS = ROOT / "requirements"
EXTRAS = ("gpu", "vllm", "math", "code", "trackers", "verifiers", "dev")
PYTHONS = {"3.10": "310", "3.11": "311", "3.12": "312", "3.13": "312"}


def pins(file: str) -> dict[str, str]:
    """The pinned version of each package in a requirements file."""
    lines = (REQUIREMENTS / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose first column has this header."""
    lines = PAGE.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {header} |"))
    table = "\n".join(lines[start + 2 :]).partition("\n\n")[0]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.split("\n")]


def test_every_file_that_the_page_names_is_there_and_every_pin_file_is_named() -> None:
    named = set(re.findall(r"requirements/([\w.-]+\.txt)", PAGE))
    assert named == {path.name for path in REQUIREMENTS.glob("*.txt")}


def test_the_versions_by_python() -> None:
    table = rows("Python")
    assert [python for row in table for python in row[0].split(", ")] == list(PYTHONS)
    for python, file, *versions in table:
        assert file == f"requirements/cpu-py{PYTHONS[python.split(',')[0]]}.txt"
        found = pins(Path(file).name)
        engine = pins(f"gpu-megatron-{found['megatron-core']}.txt")
        assert len(set(engine.values())) == 1
        expected = [found[name] for name in ("torch", "megatron-core", "transformers")]
        assert versions == [*expected, engine["transformer-engine"]]


def test_the_versions_by_torch() -> None:
    table = rows("torch")
    assert {row[0] for row in table} == {pins(f"cpu-py{n}.txt")["torch"] for n in PYTHONS.values()}
    for torch, file, *versions in table:
        found = pins(f"cuda-torch-{torch}.txt")
        assert file == f"requirements/cuda-torch-{torch}.txt"
        names = ("cuda-toolkit", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
        assert versions == [found[name] for name in names]


def test_the_extras_are_on_the_page() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    names = re.findall(r"^(\w+) = \[", extras, re.MULTILINE)
    assert sorted(names) == sorted(EXTRAS)
    assert all(name in PAGE for name in EXTRAS)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    """A user may have set VENV for other programs."""
    (tmp_path / "file").touch()
    ended = run_program(REQUIREMENTS / "install.sh", tmp_path, sys.executable, expect=1)
    assert "is not empty and is no virtual environment" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.full  # needs uv, and a package index or a warm cache
@pytest.mark.timeout(900)
def test_uv_makes_the_environment_of_the_pins(tmp_path: Path) -> None:
    """Run the command that `make setup` runs if uv is installed, with the interpreter of these
    tests."""
    if shutil.which("uv") is None:
        pytest.skip("no uv")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix) / "bin" / f"python{python}"
    said = run_program(REQUIREMENTS / "install.sh", tmp_path / "venv", base, timeout=800)
    assert "by uv" in said.stdout
    script = "import importlib.metadata as m; "
    script += "print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    found = run_program(tmp_path / "venv/bin/python", "-c", script).stdout.split()
    installed = dict(each.lower().replace("-", "_").split("==") for each in found)
    for name, version in pins(f"cpu-py{PYTHONS[python]}.txt").items():
        assert installed[name.lower().replace("-", "_")].partition("+")[0] == version
    again = run_program(REQUIREMENTS / "install.sh", tmp_path / "venv", base)
    assert again.stdout == ""


@pytest.mark.full  # needs a package index
@pytest.mark.timeout(900)
def test_pip_resolves_the_pins(tmp_path: Path) -> None:
    """pip resolves the pins for the first release of this Python (such as 3.11.0), from wheels
    only, with the CUDA packages as constraints. Transformer Engine's package for torch has no
    wheel, so the test only checks that its pinned version exists."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    file = f"cpu-py{PYTHONS[python]}.txt"
    cpu = pins(file)
    cuda = REQUIREMENTS / f"cuda-torch-{cpu['torch']}.txt"
    engine = pins(f"gpu-megatron-{cpu['megatron-core']}.txt")
    of_torch = engine.pop("transformer-engine-torch")
    pip = (sys.executable, "-m", "pip")
    words = ("install", "--dry-run", "--ignore-installed", "--python-version", python)
    wheels = ("--only-binary=:all:", "--target", tmp_path, "--constraint", cuda)
    engines = [f"{name}=={version}" for name, version in engine.items()]
    run_program(*pip, *words, *wheels, "-r", REQUIREMENTS / file, *engines, timeout=800)
    listed = run_program(*pip, "index", "versions", "transformer-engine-torch").stdout
    assert of_torch in re.split(r"[\s,()]+", listed)
