"""Builds the source archive and the wheel of the version in gspo_megatron/__init__.py.

    python tools/build_release.py [FOLDER]      # dist by default

The source archive is made from the files that git tracks, and the wheel from the source archive. So
if the archive or the wheel lacks a file, the build fails here and not on a user's machine. The tool
needs setuptools and no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKEND = "import sys, setuptools.build_meta as backend; print(backend.{}(sys.argv[1]))"
PACKAGE = "gspo_megatron"


def build(step: str, source: Path, out: Path) -> Path:
    """Run `build_sdist` or `build_wheel` in a folder. Returns the file that it has made."""
    command = [sys.executable, "-c", BACKEND.format(step), str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{step} failed:\n{done.stderr[-3000:]}")
    return out / done.stdout.splitlines()[-1]


def tracked_files() -> list[Path]:
    """Return the tracked files, relative to the repository's root."""
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def missing_from(wheel: Path) -> list[str]:
    """Return the package's tracked files that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    wanted = [str(path) for path in tracked_files() if path.parts[0] == PACKAGE]
    return [name for name in wanted if name not in inside]


def main(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy, unpacked = Path(folder, "copy"), Path(folder, "unpacked")
        for path in tracked_files():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
        archive = build("build_sdist", copy, out.resolve())
        with tarfile.open(archive) as content:
            if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
                content.extraction_filter = tarfile.data_filter
            content.extractall(unpacked)
        [source] = unpacked.iterdir()
        wheel = build("build_wheel", source, out.resolve())
    if missing := missing_from(wheel):
        print(f"{wheel.name} lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    for path in (archive, wheel):
        print(f"{path.name}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
