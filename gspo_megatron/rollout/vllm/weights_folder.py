"""The folder for new weights, which the servers load in Hugging Face format."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from gspo_megatron.addresses import rollout_nodes
from gspo_megatron.config import Config
from gspo_megatron.files import make_folder
from gspo_megatron.rollout.store import FOLDER

MEMORY = Path("/dev/shm")  # a file system in memory, in which every user may write


def make_weights_folder(config: Config) -> Path:
    """Make a new folder for this start of the run, and remove the folders of killed starts.

    The lock of the run makes the removal safe. The name is random, so that no other user can make
    the folder first. If the run starts the servers, only this user may read the folder. Raises
    OSError.
    """
    for folder in weights_folders(config):
        shutil.rmtree(folder, ignore_errors=True)
    parent, prefix = _place(config)
    make_folder(parent)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    if not is_private(config):  # the servers at these urls may belong to another user
        made.chmod(0o777 & ~_umask())
    return made


def weights_folders(config: Config) -> list[Path]:
    """Return the existing folders of this run."""
    parent, prefix = _place(config)
    return sorted(each for each in parent.glob(f"{prefix}*") if _is_own(each))


def is_private(config: Config) -> bool:
    """Return whether only this user's processes read the weights."""
    return config.rollout.vllm.servers > 0


def _place(config: Config) -> tuple[Path, str]:
    """Return the parent folder, and the part of the name that is the same for each start."""
    section, run = config.rollout.vllm, os.path.realpath(str(config.logging.dir))
    # in full, because servers may run in another folder
    parent = Path(section.weights_dir or run).absolute() / ("" if section.weights_dir else FOLDER)
    is_local = section.servers and not rollout_nodes()
    if section.weights_dir is None and is_local and os.access(MEMORY, os.W_OK):
        parent = MEMORY
    return parent, f"gspo-megatron-weights-{hashlib.sha256(run.encode()).hexdigest()[:12]}-"


def _is_own(path: Path) -> bool:
    """Return whether `path` is a real folder (no link) of this user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value
