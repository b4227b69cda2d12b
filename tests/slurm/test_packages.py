"""Fetching Slurm's packages: what is not whole is never taken for whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm.packages import PACKAGES, Unavailable, cache_folder, slurm_prefix


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for stand-ins of apt's programs, before the real ones; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        write(folder / name, "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def assert_nothing_is_kept() -> None:
    kept = [path.name for path in cache_folder().iterdir()]
    assert sorted(kept) in (["lock"], ["apt", "lock"])


def test_no_network_is_a_reason_to_skip(programs: Path) -> None:
    write(programs / "apt-get", "echo 'Could not resolve deb.example' >&2; exit 100")
    with pytest.raises(Unavailable, match=r"apt-get.*Could not resolve"):
        slurm_prefix()
    assert_nothing_is_kept()


def test_a_package_that_is_missing(programs: Path) -> None:
    present = " ".join(f"{name}_1_all.deb" for name in PACKAGES[1:])
    write(programs / "apt-get", f"touch {present}")
    with pytest.raises(Unavailable, match=f"left out {PACKAGES[0]}"):
        slurm_prefix()
    assert_nothing_is_kept()


def test_a_package_that_is_damaged(programs: Path) -> None:
    write(programs / "apt-get", "touch " + " ".join(f"{name}_1_all.deb" for name in PACKAGES))
    write(programs / "dpkg-deb", "echo 'unexpected end of file' >&2; exit 2")
    with pytest.raises(Unavailable, match="unexpected end of file"):
        slurm_prefix()
    assert_nothing_is_kept()


def test_programs_that_do_not_run_here(programs: Path) -> None:
    write(programs / "apt-get", "touch " + " ".join(f"{name}_1_all.deb" for name in PACKAGES))
    broken = "echo 'libfoo.so: cannot open shared object file' >&2; exit 127"
    make = f'mkdir -p "$3/usr/sbin"; printf "#!/bin/sh\\n{broken}\\n" '
    make += '>"$3/usr/sbin/slurmctld-wlm"; chmod +x "$3/usr/sbin/slurmctld-wlm"'
    write(programs / "dpkg-deb", make)
    with pytest.raises(Unavailable, match="libfoo"):
        slurm_prefix()
    assert_nothing_is_kept()


def test_other_systems_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("apt-get") is None
    with pytest.raises(Unavailable, match="no apt-get"):
        slurm_prefix()
