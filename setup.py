"""Computes the version and the description of the package. The rest of its metadata is in
pyproject.toml, and the pinned environments for work on the project are in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The package's `__version__`, read as text: an import would need the dependencies."""
    text = (ROOT / "gspo_megatron" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "gspo_megatron/__init__.py has no __version__ line"
    return found.group(1)


def read_description() -> str:
    """README.md, which a copy for an image may lack."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    version=read_version(),
    long_description=read_description(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["gspo_megatron", "gspo_megatron.*"]),
)
