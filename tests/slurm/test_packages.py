"""The download of Slurm's packages. An incomplete folder must never pass for a complete one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm.packages import PACKAGES, Unavailable, cache_folder, slurm_prefix


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins for apt's programs. The folder is first in PATH, and the cache is
    empty."""
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


ALL = "touch " + " ".join(f"{name}_1_all.deb" for name in PACKAGES)
BROKEN = "echo 'libfoo.so: cannot open shared object file' >&2; exit 127"
UNPACK_BROKEN = f'''mkdir -p "$3/usr/sbin"; printf "#!/bin/sh\\n{BROKEN}\\n" \
    >"$3/usr/sbin/slurmctld-wlm"; chmod +x "$3/usr/sbin/slurmctld-wlm"'''


@pytest.mark.parametrize(
    ("scripts", "reason"),
    [
        (
            {"apt-get": "echo 'Could not resolve deb.example' >&2; exit 100"},
            r"apt-get.*Could not resolve",
        ),
        ({"apt-get": ALL.replace(f"{PACKAGES[0]}_1_all.deb", "")}, f"left out {PACKAGES[0]}"),
        (
            {"apt-get": ALL, "dpkg-deb": "echo 'unexpected end of file' >&2; exit 2"},
            "unexpected end of file",
        ),
        ({"apt-get": ALL, "dpkg-deb": UNPACK_BROKEN}, "libfoo"),
    ],
    ids=["no network", "missing package", "damaged package", "programs that do not run here"],
)
def test_nothing_is_kept_of_what_is_not_whole(
    programs: Path, scripts: dict[str, str], reason: str
) -> None:
    for name, script in scripts.items():
        write(programs / name, script)
    with pytest.raises(Unavailable, match=reason):
        slurm_prefix()
    kept = [path.name for path in cache_folder().iterdir()]
    assert sorted(kept) in (["lock"], ["apt", "lock"])


def test_other_systems_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("apt-get") is None
    with pytest.raises(Unavailable, match="no apt-get"):
        slurm_prefix()
