"""Compile device.cpp, once for each combination of versions of device.cpp, torch and the
compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = tuple(FOLDER / name for name in ("device.cpp", "clocks.h", "generators.h"))


def missing() -> str | None:
    """The reason why the device cannot be built here; None if it can be."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch is built for GPUs, whose kernels would take over; tests/gpu is for it"
    if _compiler() is None:
        return "no C++ compiler: neither CXX nor g++ nor clang++"
    return None


def library() -> Path:
    """The shared object. It is compiled if it does not exist. If the compiler fails, raises
    CalledProcessError."""
    import torch

    compiler = _compiler()
    assert compiler is not None, "asked `missing` before"
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    home = Path(torch.__file__).parent  # the library looks for torch's libraries here
    parts = [path.read_bytes() for path in SOURCES]
    parts += [version, torch.__version__.encode(), os.fsencode(home)]
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gspo_megatron_tests"
    made = cache / f"cuda_rehearsal_{key}.so"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        part = Path(folder, made.name)
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20", "-w"]
        include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
        subprocess.run([compiler, *flags, *include, SOURCES[0], *libraries, "-o", part], check=True)
        # Another process may make the same file at the same time. Because a rename is atomic,
        # each process then finds a whole file.
        part.replace(made)
    return made


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)
