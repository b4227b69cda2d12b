"""The folder of new weights: only servers that the run has started can read it, and another user
cannot prevent a run from starting."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import Config, parse_config
from gspo_megatron.hf.writer import HfWriter
from gspo_megatron.rollout.vllm import weights_folder
from gspo_megatron.rollout.vllm.weights_folder import make_weights_folder, weights_folders
from tests.unit.other_user import UID, needs_root, said_by

_LOOK = """
import os, sys
folder = sys.argv[1]
for look in (os.listdir, lambda path: open(os.path.join(path, "version", "config.json")).read()):
    try:
        print("saw", look(folder))
    except PermissionError:
        print("refused")
"""


def config(run: Path, **section: object) -> Config:
    return parse_config(
        {
            "data": {"tokenizer": "t", "prompts": "p"},
            "rollout": {"engine": "vllm", "vllm": section},
            "logging": {"dir": str(run)},
        }
    )


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which every user may write. It takes the place of /dev/shm."""
    made = tmp_path / "memory"
    made.mkdir()
    made.chmod(0o1777)
    monkeypatch.setattr(weights_folder, "MEMORY", made)
    return made


def write(folder: Path, private: bool) -> Path:
    options = {"durable": False, "private": private}
    with HfWriter(folder / "version", {"w": torch.empty(4)}, **options) as writer:
        writer.write("w", torch.zeros(4))
        writer.finish()
        writer.publish({"config.json": {}})
    return folder / "version"


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}


def test_only_the_user_may_look_into_it(memory: Path, tmp_path: Path) -> None:
    run = config(tmp_path / "run", servers=1)
    folder = make_weights_folder(run)
    assert folder.parent == memory and stat.S_IMODE(folder.stat().st_mode) == 0o700
    version = write(folder, weights_folder.is_private(run))
    assert stat.S_IMODE(version.stat().st_mode) == 0o700 and modes(version) == {0o600}
    assert len(list(version.iterdir())) == 2


def test_servers_of_another_user_may(tmp_path: Path) -> None:
    run = config(tmp_path / "run", urls=["http://far:8000"])
    folder = make_weights_folder(run)
    assert folder.parent == tmp_path / "run" / "rollouts"
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~mask
    assert modes(write(folder, weights_folder.is_private(run))) == {0o666 & ~mask}


def test_servers_in_another_folder_find_a_relative_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = config(tmp_path / "run", urls=["http://far:8000"], weights_dir="shared")
    folder = make_weights_folder(run)
    assert str(folder.parent) == str(tmp_path / "shared")
    monkeypatch.chdir("/")
    assert folder.is_dir()


def test_each_start_has_a_new_name_and_removes_what_earlier_ones_left(
    memory: Path, tmp_path: Path
) -> None:
    run, other = config(tmp_path / "run", servers=1), config(tmp_path / "other", servers=1)
    kept = make_weights_folder(other)
    names = set()
    for _ in range(3):
        folder = make_weights_folder(run)
        (folder / "version").mkdir()
        assert weights_folders(run) == [folder]
        names.add(folder.name)
    assert len(names) == 3 and kept.exists()


@needs_root
def test_another_user_cannot_read_it_nor_take_its_place(memory: Path, tmp_path: Path) -> None:
    run = config(tmp_path / "run", servers=1)
    folder = make_weights_folder(run)
    write(folder, True)
    for parent in (memory, *memory.parents):
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & stat.S_IXOTH:
            # only folders that pytest made become accessible
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
        if parent.name.startswith("pytest-of"):
            break
    assert said_by(_LOOK, folder).split("\n")[:2] == ["refused", "refused"]
    # The other user makes folders with names that it has seen, and a link to a folder that it wants
    # the run to remove.
    precious = tmp_path / "precious"
    precious.mkdir()
    prefix = folder.name.rpartition("-")[0]
    foreign = memory / f"{prefix}-foreign"
    foreign.mkdir()
    os.chown(foreign, UID, UID)
    (memory / f"{prefix}-link").symlink_to(precious)
    again = make_weights_folder(run)
    assert again.exists() and not folder.exists() and precious.exists() and foreign.exists()
