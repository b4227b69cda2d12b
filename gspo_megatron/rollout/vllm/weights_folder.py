"""Where new weights wait for the servers, in folders of Hugging Face's form."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from gspo_megatron.config import Config
from gspo_megatron.config.rollout_nodes import rollout_nodes
from gspo_megatron.files import make_folder
from gspo_megatron.rollout.store import FOLDER

MEMORY = Path("/dev/shm")  # a file system in memory, in which every user may write


def make_weights_folder(config: Config) -> Path:
    """A new folder for a start of the run, in place of what killed starts of it have left: the lock
    of the run keeps others out.

    Nobody can foresee its name, and so make it first. Servers that we start have the user's own
    rights: nobody else may look into it. Raises OSError.
    """
    for folder in weights_folders(config):
        shutil.rmtree(folder, ignore_errors=True)
    parent, prefix = _place(config)
    make_folder(parent)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    if not is_private(config):  # servers by their urls may be another user's
        made.chmod(0o777 & ~_umask())
    return made


def weights_folders(config: Config) -> list[Path]:
    """The folders of this run that exist."""
    parent, prefix = _place(config)
    return sorted(each for each in parent.glob(f"{prefix}*") if _is_own(each))


def is_private(config: Config) -> bool:
    """Tells whether only this user's processes read the weights."""
    return config.rollout.vllm.servers > 0


def _place(config: Config) -> tuple[Path, str]:
    """The folder that it is in, and the part of its name that is the same in each start."""
    section, run = config.rollout.vllm, os.path.realpath(str(config.logging.dir))
    parent = Path(section.weights_dir or run) / ("" if section.weights_dir else FOLDER)
    is_local = section.servers and not rollout_nodes()
    if section.weights_dir is None and is_local and os.access(MEMORY, os.W_OK):
        parent = MEMORY
    return parent, f"gspo-megatron-weights-{hashlib.sha256(run.encode()).hexdigest()[:12]}-"


def _is_own(path: Path) -> bool:
    """Not a link, and not another user's: those stay as they are."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value
