"""Slurm's programs for a test cluster: Debian packages that are unpacked into a cache, but not
installed.

This needs apt-get and dpkg-deb, but not root. The cache is outside of the repository, and all
checkouts share it. A folder in the cache gets its final name only when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = (
    "slurm-client",
    "slurmctld",
    "slurmd",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
)
_TIMEOUT_SECONDS = 240
# Debian has Apptainer, and the libraries that it was built with, only in its unstable distribution.
_APPTAINER_PACKAGES = ("apptainer", "libc6", "libseccomp2", "libsqlite3-0", "patchelf")
_APPTAINER_LIBRARIES = ("libgcc-s1", "libstdc++6", "zlib1g", "libzstd1")
_RELEASE = Path("/etc/os-release")
_VERSION = 1  # increase this number when this file changes how it prepares packages


class Unavailable(Exception):  # noqa: N818 (a reason to skip)
    """Raised with the reason why this machine cannot have the packages."""


def slurm_prefix() -> Path:
    """The folder with the usr/bin, usr/sbin and usr/lib of Slurm and munge. Raises Unavailable."""
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program}: Slurm's packages are fetched on Debian and its kin")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / f"prefix-{_VERSION}-{_system()}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test runs downloads
        if not final.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as scratch:
                _fill(Path(scratch), cache)
                (Path(scratch) / "prefix").rename(final)
    return final


def apptainer_folder() -> Path:
    """A folder with the program apptainer. Raises Unavailable.

    The folder is the system's, or it holds Debian's package, unpacked into the cache like Slurm.
    The programs of the package get the loader and the C library of Debian's unstable distribution.
    """
    installed = shutil.which("apptainer")
    if installed is not None:
        return Path(installed).parent
    # Without its setuid program, apptainer needs namespaces, which not all systems allow.
    if os.geteuid() != 0:
        raise Unavailable("no program apptainer, and only root can use an unpacked one everywhere")
    release = _RELEASE.read_text(encoding="utf-8") if _RELEASE.exists() else ""
    if "ID=debian" not in release.splitlines():
        raise Unavailable("no program apptainer, and its package is fetched on Debian only")
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"no program apptainer, and no {program} to fetch it")
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / f"apptainer-{_VERSION}-{_system()}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as scratch:
                _fill_apptainer(Path(scratch), final)
                (Path(scratch) / "prefix").rename(final)
    _run([str(final / "usr/bin/apptainer"), "--version"], cache)
    return final / "usr" / "bin"


def _fill_apptainer(scratch: Path, final: Path) -> None:
    debs, prefix, lists = scratch / "debs", scratch / "prefix", scratch / "lists"
    for folder in (debs, lists / "partial", scratch / "archives" / "partial"):
        folder.mkdir(parents=True)
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(SIGNED_BY)"]
    known = _run([*command, "Identifier: Packages"], debs).splitlines()
    if not known:
        raise Unavailable("apt knows no archive of Debian")
    uri, _, key = known[0].partition("|")
    signed = f"[signed-by={key}] " if key.startswith("/") else ""
    (scratch / "sources").write_text(f"deb {signed}{uri} sid main\n", encoding="utf-8")
    (scratch / "status").touch()
    own = [f"Dir::Etc::sourcelist={scratch / 'sources'}", "Dir::Etc::sourceparts=-"]
    own += [f"Dir::State::lists={lists}", f"Dir::State::status={scratch / 'status'}"]
    own += [f"Dir::Cache={scratch}"]
    options = [word for option in own for word in ("-o", option)]
    _run(["apt-get", *options, "-qq", "update"], debs)
    wanted = [*_APPTAINER_PACKAGES, *_APPTAINER_LIBRARIES]
    _run(["apt-get", *options, "download", *wanted], debs)
    for deb in sorted(debs.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(deb), str(prefix)], debs)
    [engine] = prefix.glob("usr/lib/*/apptainer")
    libraries = engine.parent
    [loader] = libraries.glob("ld-linux*.so.*")
    at = final / libraries.relative_to(prefix)
    # DT_RPATH also applies to libraries that a library needs.
    words = ["--set-interpreter", str(at / loader.name), "--force-rpath", "--set-rpath", str(at)]
    patch = [str(loader), "--library-path", str(libraries), str(prefix / "usr/bin/patchelf")]
    for program in (prefix / "usr/bin/apptainer", engine / "bin" / "starter"):
        _run([*patch, *words, str(program)], debs)
    # A moved apptainer looks for its settings in these folders, and mounts images there.
    shutil.copytree(prefix / "etc" / "apptainer", prefix / "usr" / "etc" / "apptainer")
    (prefix / "usr/lib/var/lib/apptainer/mnt/session").mkdir(parents=True)
    settings = prefix / "usr/etc/apptainer/apptainer.conf"
    text = settings.read_text(encoding="utf-8")
    # In a container, root does not have all the capabilities that the default would give.
    usual, ours = (f"root default capabilities = {word}" for word in ("full", "no"))
    settings.write_text(text.replace(usual, ours), encoding="utf-8")


def _system() -> str:
    """A name for this kind of system. Machines may share a home folder, but they cannot use each
    other's packages."""
    release = _RELEASE.read_text(encoding="utf-8") if _RELEASE.exists() else ""
    values = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    words = [values.get("ID", "linux"), values.get("VERSION_ID", ""), os.uname().machine]
    return "-".join(word.strip('"') for word in words if word)


def cache_folder() -> Path:
    """The folder in which the packages are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gspo-megatron" / "slurm"


def program_environment(prefix: Path) -> dict[str, str]:
    """The environment in which the unpacked programs find each other and their libraries."""
    libraries = [str(path) for path in sorted(prefix.glob("usr/lib/*")) if path.is_dir()]
    plugins = [str(path) for path in prefix.glob("usr/lib/*/slurm-wlm")]
    inherited = [text for text in [os.environ.get("LD_LIBRARY_PATH")] if text]
    path = [str(prefix / "usr/bin"), str(prefix / "usr/sbin"), os.environ.get("PATH", "")]
    return {
        "PATH": os.pathsep.join(path),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *plugins, *inherited]),
    }


def _fill(scratch: Path, cache: Path) -> None:
    debs, prefix = scratch / "debs", scratch / "prefix"
    debs.mkdir()
    _download(debs, cache)
    for deb in sorted(debs.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(deb), str(prefix)], debs)
    programs = prefix / "usr" / "sbin"
    # If the packages were installed, their scripts would make these links.
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        if not (programs / name).exists():
            (programs / name).symlink_to(f"{name}-wlm")
    for name in ("slurmctld", "slurmd", "munged"):
        _run([str(programs / name), "-V"], debs, program_environment(prefix))


def _download(debs: Path, cache: Path) -> None:
    """Download with the machine's package lists. If that fails, download with fresh lists."""
    try:
        _run(["apt-get", "download", *PACKAGES], debs)
    except Unavailable:
        lists = cache / "apt"
        for name in ("lists/partial", "archives/partial"):
            (lists / name).mkdir(parents=True, exist_ok=True)
        own = [f"Dir::State::lists={lists / 'lists'}", f"Dir::Cache={lists}"]
        options = [word for option in own for word in ("-o", option)]
        _run(["apt-get", *options, "-qq", "update"], debs)
        _run(["apt-get", *options, "download", *PACKAGES], debs)
    missing = [name for name in PACKAGES if not list(debs.glob(f"{name}_*.deb"))]
    if missing:
        raise Unavailable(f"apt-get download left out {', '.join(missing)}")


def _run(command: list[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    """Run a command. Returns its output. Raises Unavailable if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environ or {}), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:2])}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{' '.join(command[:2])} failed: {' '.join(said[:2])}")
    return done.stdout
