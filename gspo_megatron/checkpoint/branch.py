"""Makes a branch: a new run folder that begins with a checkpoint of another run.

The checkpoint's files become hard links, or copies if the branch is on another disk. The checkpoint
gets its name only when everything else is complete. If the command is killed before that, the same
command makes the branch again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    PHASES,
    REFERENCE,
    Position,
    Publication,
    checkpoints_at,
    checkpoints_in,
    positions,
    put_back,
    remove_leftovers,
    set_latest,
)
from gspo_megatron.checkpoint.lineage import RunBranch, read_branch
from gspo_megatron.checkpoint.manifest import find_damage, read_manifest
from gspo_megatron.checkpoint.resume import conclude, refuse_damage
from gspo_megatron.checkpoint.run_lock import LOCK_FILE, RunLock
from gspo_megatron.checkpoint.run_state import read_config
from gspo_megatron.config import to_yaml
from gspo_megatron.config.hub import folder_in
from gspo_megatron.config.load import apply_overrides, parse_config
from gspo_megatron.config.phases import hidden_overrides
from gspo_megatron.errors import ConfigError, UserError, problem
from gspo_megatron.files import PARTIAL, make_folder, named, sync, write_atomically
from gspo_megatron.observe.history import BRANCH_FILE
from gspo_megatron.observe.metrics_files import (
    CHANGES_FILE,
    DRAWS_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    JsonLinesWriter,
    changed_configs,
)

BRANCH_CONFIG = "branch.yaml"  # in the folder of a branch: the configuration that it runs with


def begin_branch(run: Path, step: int, overrides: Sequence[str]) -> Path:
    """Make a branch of a run at a step, or use the branch if it exists already. Returns the
    branch's configuration file. It has the values of the checkpoint, changed by `overrides`.

    Without an override of logging.dir the folder is RUN-from-STEP. Raises UserError if the run has
    no checkpoint of this step, if the folder holds anything but this branch, or if the overrides
    change more than a phase may change.
    """
    default = str(named(run).with_name(f"{run.resolve().name}-from-{step}"))
    values_now, _ = apply_overrides({"logging": {"dir": default}}, overrides)
    folder = folder_in(values_now, default)
    branch = read_branch(folder)
    if branch is None:
        _refuse_other_files(folder)
        branch = _branch_of(run, step)
    elif (Path(branch.run), branch.step) != (run.resolve(), step):
        occupied = f"holds a branch of {branch.run} after step {branch.step}"
        raise UserError(problem("logging.dir", str(folder), f"{occupied}; give another"))
    values: dict[str, Any] = {**branch.config}
    values["logging"] = {**values.get("logging", {}), "dir": default}
    config = parse_config(values, overrides, folder.name)
    if not positions(folder / CHECKPOINTS):
        place = Path(branch.run) / CHECKPOINTS / branch.checkpoint
        source = next(iter(checkpoints_at(place)), place)
        refuse_damage(source, find_damage(source, contents=False))
        start = conclude(config, source, {}, change=True)
        if hidden := hidden_overrides(config, overrides, start.next_step):
            raise ConfigError(hidden)
        with RunLock() as lock:
            lock.hold(folder)
            try:
                put_back(folder / CHECKPOINTS)
                if not positions(folder / CHECKPOINTS):
                    _make(branch, source, folder)
            except OSError as error:
                wrong = f"the branch cannot be made: {error.strerror or error}"
                raise UserError(f"{folder}: {wrong}; mend this, and repeat the command") from error
    path = folder / BRANCH_CONFIG
    write_atomically(path, to_yaml(config).encode())
    return path


def _refuse_other_files(folder: Path) -> None:
    """Raise UserError if the folder of a new branch is not empty."""
    entries = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    if any(path.name not in (LOCK_FILE, f"{PARTIAL}{BRANCH_FILE}") for path in entries):
        wrong = "is not empty; allowed: a new folder for the branch"
        raise UserError(problem("logging.dir", str(folder), wrong))


def _branch_of(run: Path, step: int) -> RunBranch:
    """Return the record of a new branch. Raises UserError if the run has no checkpoint of this
    step."""
    checkpoints = checkpoints_in(run / CHECKPOINTS)
    steps = [p.step for p in checkpoints if p.phase == PHASES[-1] and not p.rolled_out]
    if not steps:
        raise UserError(f"{run}: holds no checkpoint of an RL run; allowed: the folder of a run")
    if step not in steps:
        existing = ", ".join(map(str, reversed(steps)))
        raise UserError(f"--from-step {step}: {run} has no checkpoint of it; allowed: {existing}")
    position = Position(PHASES[-1], step)
    config = read_config(checkpoints[position])
    above = read_branch(run)
    lineage = [] if above is None else [{"run": above.run, "step": above.step}, *above.lineage]
    return RunBranch(str(run.resolve()), step, position.name, config, lineage)


def _make(branch: RunBranch, source: Path, folder: Path) -> None:
    """Fill the folder of a branch. Raises OSError and DataError."""
    run, checkpoints = Path(branch.run), folder / CHECKPOINTS
    make_folder(folder)  # the lock ignores a folder that cannot be made
    branch.write(folder)  # first, because from now on the same command continues
    make_folder(checkpoints)
    remove_leftovers(checkpoints)
    for first, path in changed_configs(run).items():
        if first <= branch.step:
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)
    for name in (METRICS_FILE, DRAWS_FILE, SAMPLES_FILE, EVALUATION_FILE, CHANGES_FILE):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
            with JsonLinesWriter(folder / name) as file:
                file.truncate_after(branch.step)
                file.sync()  # the checkpoint must not be newer
    for reference in sorted((run / CHECKPOINTS).glob(f"{REFERENCE}*")):
        _link(reference, checkpoints, reference.name)
    _link(source, checkpoints, branch.checkpoint)
    set_latest(checkpoints, branch.checkpoint)


def _link(source: Path, checkpoints: Path, name: str) -> None:
    """Put the checkpoint `source` of another run into a branch."""
    refuse_damage(source, find_damage(source, contents=False))
    files = read_manifest(source)
    publication = Publication(checkpoints, name)
    publication.begin()
    for file in files:
        path = publication.folder / file
        make_folder(path.parent)
        try:
            os.link(source / file, path)
        except OSError:  # the branch is on another disk, or the disk has no hard links
            shutil.copyfile(source / file, path)
            sync(path)
    publication.publish(files)
