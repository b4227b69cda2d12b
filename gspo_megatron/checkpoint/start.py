"""The start of a run on all ranks: what it continues from, its folder, its first weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import CHECKPOINTS, REFERENCE, remove_leftovers
from gspo_megatron.checkpoint.manifest import find_damage
from gspo_megatron.checkpoint.resume import (
    Start,
    candidates,
    conclude,
    finished_text,
    given_checkpoint,
    is_of_model,
    run_folder,
    weights_fit,
)
from gspo_megatron.checkpoint.rng import load_rng
from gspo_megatron.checkpoint.run_lock import RunLock, run_lock
from gspo_megatron.checkpoint.run_state import read_model
from gspo_megatron.checkpoint.tensors import load_model
from gspo_megatron.config import Config
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.errors import DataError, UserError
from gspo_megatron.files import write_atomically
from gspo_megatron.models.build import Policy
from gspo_megatron.observe.metrics_files import METRICS_FILE
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import all_gather_objects, on_main
from gspo_megatron.platform.groups import (
    Ranks,
    patience_minutes,
    start_processes,
    stop_processes,
)
from gspo_megatron.platform.slurm import SlurmJob
from gspo_megatron.platform.stop import StopRun, StopSignals, watched

if TYPE_CHECKING:
    from gspo_megatron.checkpoint.manager import Checkpoints

RESTARTS_FILE = "restarts.json"


def find_start(config: Config, *, fresh: bool) -> Start:
    """The newest whole checkpoint of the run, or nothing; every rank calls it.

    Raises UserError, on all ranks alike, for what `fresh` forbids, for a run of which no checkpoint
    is whole, and for keys that have changed and must not.
    """
    damage: dict[str, list[str]] = {}
    chosen = None
    for checkpoint in on_main(lambda: candidates(config, fresh=fresh)):
        wrong = damage_of(checkpoint)
        if not wrong:
            chosen = checkpoint
            break
        damage[checkpoint.name] = wrong
    return on_main(lambda: conclude(config, chosen, damage))


def damage_of(checkpoint: Path, *, model_only: bool = False) -> list[str]:
    """What is wrong with a checkpoint's files; every rank calls it and gets the same."""
    share = (dist.get_rank(), dist.get_world_size())
    only = is_of_model if model_only else None
    return sorted(
        line
        for lines in all_gather_objects(find_damage(checkpoint, share=share, only=only))
        for line in lines
    )


def load_weights(config: Config, policy: Policy, path: str) -> Path:
    """Read the weights that model.checkpoint_path names; returns the checkpoint. Raises UserError,
    on all ranks alike, where there is none, or it is damaged or of another model."""
    checkpoint = on_main(lambda: given_checkpoint(path))
    _assert_whole(checkpoint, model_only=True)
    on_main(lambda: weights_fit(checkpoint, config, policy.vocab_size))
    load_model(checkpoint, policy)
    return checkpoint


def load_initial_weights(config: Config, policy: Policy) -> Any:
    """Give the policy the weights that a new run begins with: those of a checkpoint, of a Hugging
    Face folder, or random ones, which it has already.

    Returns the config.json of the Hugging Face model that they come from, None where they do not.
    """
    if config.model.checkpoint_path is not None:
        checkpoint = load_weights(config, policy, config.model.checkpoint_path)
        return set_padding_token(policy, read_model(checkpoint)["hf"])
    if config.model.hf_path is not None:
        from gspo_megatron.checkpoint.hf.load import load_hf

        load_hf(config.model.hf_path, policy)
        hf = json.loads((Path(config.model.hf_path) / "config.json").read_bytes())
        return set_padding_token(policy, hf)
    return None


def set_padding_token(policy: Policy, hf: Any) -> Any:
    """Tell the policy the pad_token_id of the config.json that its weights come from (None: it has
    none); see Policy.set_padding_token. Returns `hf`."""
    token = (hf or {}).get("pad_token_id")
    policy.set_padding_token(token if isinstance(token, int) else None)
    return hf


def load_reference(config: Config, policy: Policy) -> None:
    """Read the weights that RL started from. Raises UserError, on all ranks alike, where they are
    not whole."""
    reference = run_folder(config) / CHECKPOINTS / REFERENCE
    _assert_whole(reference)
    load_model(reference, policy)


def _assert_whole(checkpoint: Path, *, model_only: bool = False) -> None:
    wrong = damage_of(checkpoint, model_only=model_only)
    if wrong:
        raise DataError("\n".join(f"{checkpoint}: {line}" for line in wrong))


def count_restart(config: Config, start: Start, environ: Mapping[str, str] | None = None) -> None:
    """Refuse to go on in a job that has been restarted too often at the same point of the run.

    On the main rank, once a start. Raises UserError, whose exit code no batch script takes for a
    reason to try again.
    """
    job = SlurmJob.of(os.environ if environ is None else environ)
    if job is None or job.restarts == 0:
        return
    path = run_folder(config) / RESTARTS_FILE
    position = None if start.state is None else start.state.position.name
    before = _read(path)
    if before.get("job") == job.number and before.get("position") == position:
        count = int(before["restarts_without_progress"]) + 1
    else:
        # Nothing was written down at the first start, which left a checkpoint or made no progress.
        count = 1 if position is None else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    now = {"job": job.number, "position": position, "restarts_without_progress": count}
    write_atomically(path, (json.dumps(now) + "\n").encode())
    allowed = config.training.idle_restarts
    if count > allowed:
        where = "before its first checkpoint" if position is None else f"at {position}"
        raise UserError(
            f"{run_folder(config)}: restarted {count} times {where} without getting further, of "
            f"training.idle_restarts = {allowed} that are allowed; the log of the job says why it "
            "ended each time. Submit it again to go on"
        )


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def move_earlier_run(folder: Path, lock: RunLock) -> None:
    """Give the folder of an earlier run another name, so that a second run of the same name
    neither mixes with it nor erases it. On the main rank, whose lock holds the folder afterwards.

    Raises UserError where another run is at work in the folder, or was first to take its name.
    """
    lock.hold(folder)
    if not (folder / METRICS_FILE).exists():
        return
    remove_leftovers(folder / CHECKPOINTS)  # each may be as large as a checkpoint
    number = 1
    while (kept := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(kept)
    print(f"{folder} holds an earlier run; it is now {kept}", flush=True)
    lock.hold(folder)  # the lock moved with the folder: take the new one's
    counted = kept / RESTARTS_FILE
    if counted.exists():  # else a job that never reaches a checkpoint would restart for ever
        counted.rename(folder / RESTARTS_FILE)


def open_logger(config: Config | StageConfig, is_main: bool, start: Start) -> RunLogger:
    """The logger of the run folder, from where the run continues; it shows the notes of `start`."""
    resumed_at = None if start.state is None else (start.state.phase, start.state.step)
    logger = RunLogger(config, is_main, resumed_at)
    for line in start.notes:
        logger.note(line)
    return logger


def load_starting_weights(config: Config, policy: Policy, start: Start, logger: RunLogger) -> Any:
    """Give the policy the weights that the run continues from, or begins with.

    Returns the config.json of the Hugging Face model that they come from, None if they do not.
    """
    if start.checkpoint is not None:
        load_model(start.checkpoint, policy)
        if not load_rng(start.checkpoint):
            logger.note("on another layout than before: random number generators begin anew")
        return set_padding_token(policy, read_model(start.checkpoint)["hf"])
    return load_initial_weights(config, policy)


@dataclass
class Session:
    """One start of a run on this rank: from the lock on its folder to its last checkpoint."""

    config: Config | StageConfig
    ranks: Ranks
    start: Start
    stop: StopSignals
    lock: RunLock

    def tell_finished(self) -> None:
        """Print that the run has all its steps, and what can be done with it."""
        if self.ranks.is_main:
            assert self.start.state is not None
            print(finished_text(self.config, self.start.state), flush=True)

    def begin(self) -> None:
        """Take the run folder. Raises UserError, on all ranks, after too many restarts."""
        on_main(lambda: count_restart(self.config, self.start))
        if self.start.state is None:
            on_main(lambda: move_earlier_run(run_folder(self.config), self.lock))

    def train(
        self,
        loop: Callable[[], None],
        policy: Policy,
        checkpoints: Checkpoints,
        logger: RunLogger,
    ) -> bool:
        """Run `loop` under the watches for hangs and for the end of the job. Returns whether the
        run is done; False if it was told to stop, and is saved."""
        with watched(self.config, policy.models, self.ranks, self.stop):
            try:
                loop()
                checkpoints.close()
            except StopRun as stopped:
                checkpoints.close()
                logger.note(str(stopped))
                return False
        return True


@contextlib.contextmanager
def open_session(config: Config | StageConfig, *, fresh: bool) -> Iterator[Session]:
    """Join the other ranks and find out what the run continues from; every rank enters it."""
    with run_lock() as lock, StopSignals(enabled=config.checkpoint.interval > 0) as stop:
        try:
            ranks = start_processes(patience_minutes(config.training.hang_timeout_seconds))
            on_main(lambda: lock.hold(run_folder(config)))
            yield Session(config, ranks, find_start(config, fresh=fresh), stop, lock)
        finally:
            stop_processes()
