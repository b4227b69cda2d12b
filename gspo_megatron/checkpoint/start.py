"""Starts a run on all ranks: finds the checkpoint, prepares the folder, loads the weights."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import CHECKPOINTS, remove_leftovers
from gspo_megatron.checkpoint.manifest import find_damage, first_whole
from gspo_megatron.checkpoint.resume import (
    Start,
    candidates,
    conclude,
    finished_text,
    fitting_checkpoint,
    given_adapters,
    is_of_model,
    refuse_damage,
    refuse_other_base,
    run_folder,
)
from gspo_megatron.checkpoint.rng import load_rng
from gspo_megatron.checkpoint.run_lock import RunLock
from gspo_megatron.checkpoint.run_state import base_of, read_model
from gspo_megatron.checkpoint.tensors import load_model
from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.hub import HUB_FILE
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import DataError, ServersEndError, UserError, problem
from gspo_megatron.families.adapter_map import PEFT_CONFIG, PEFT_TENSORS
from gspo_megatron.families.model_shape import checkpoint_preset
from gspo_megatron.files import WRONG_VALUES, parse_json, unused_name, write_atomically
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.observe.metrics_files import METRICS_FILE
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import all_gather_objects, on_main
from gspo_megatron.platform.groups import (
    Ranks,
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
)
from gspo_megatron.platform.stop import SlurmJob, StopRun, StopSignals, watched

RESTARTS_FILE = "restarts.json"


def damage_of(checkpoint: Path, only: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return what is wrong with a checkpoint. All ranks share the work and get the same lines."""
    share = (dist.get_rank(), dist.get_world_size())
    mine = find_damage(checkpoint, share=share, only=only)
    return sorted(line for lines in all_gather_objects(mine) for line in lines)


def load_initial_weights(config: AnyConfig, policy: Policy) -> Any:
    """Load a new run's first weights: the base (see `load_base`), and the adapters of
    model.lora.checkpoint if this key is set. Otherwise the adapters are new and do not change the
    model's outputs yet."""
    hf = load_base(config, policy)
    if config.model.lora.checkpoint is not None:
        _load_given_adapters(config, policy, config.model.lora.checkpoint)
    return hf


def load_base(config: AnyConfig, policy: Policy) -> Any:
    """Load the weights of a checkpoint or a Hugging Face folder, if one is configured. Otherwise
    the policy keeps its random weights.

    Returns the config.json of the Hugging Face model that the weights come from, or None. Raises
    UserError on all ranks if the folder is damaged or holds another model.
    """
    source, hf = None, None
    if config.model.checkpoint_path is not None:
        source = on_main(lambda: fitting_checkpoint(config, policy.vocab_size))
        refuse_damage(source, damage_of(source, is_of_model))
        is_fresh = policy.shape.scores and not checkpoint_preset(read_model(source)).scores
        load_model(source, policy, adapters=False, new_head=is_fresh)
        hf = read_model(source)["hf"]
    elif config.model.hf_path is not None:
        from gspo_megatron.hf.load import load_hf

        source = Path(config.model.hf_path)
        load_hf(source, policy, ignore_custom_code=config.model.ignore_custom_code)
        hf = parse_json((source / "config.json").read_bytes())
    if policy.lora is not None and source is not None:
        policy.lora.base = on_main(lambda: base_of(source))
    return hf


def _load_given_adapters(config: AnyConfig, policy: Policy, path: str) -> None:
    """Load the adapters of a PEFT folder, or of a checkpoint of ours."""
    section = config.model.lora
    if Path(path, PEFT_CONFIG).exists() or Path(path, PEFT_TENSORS).exists():
        from gspo_megatron.hf.load import load_adapters

        load_adapters(path, policy, section, config.model.family(policy.shape))
        return
    assert policy.lora is not None
    base = policy.lora.base
    checkpoint = on_main(lambda: given_adapters(path, section, base))
    refuse_damage(checkpoint, damage_of(checkpoint, is_of_model))
    load_model(checkpoint, policy)


def load_reference(config: AnyConfig, policy: Policy, name: str) -> None:
    """Read the weights of the reference policy. Raises UserError on all ranks if these weights are
    damaged, or if the run has not kept them."""
    reference = run_folder(config) / CHECKPOINTS / name
    if not on_main(reference.is_dir):
        raise DataError(
            f"objective: {reference} is missing, because no step before needed the reference; "
            "allowed: none, or a phase in training.phases with reference: renew"
        )
    refuse_damage(reference, damage_of(reference))
    load_model(reference, policy)


def count_restart(
    config: AnyConfig, start: Start, environ: Mapping[str, str] | None = None
) -> None:
    """Raise UserError if a Slurm job was restarted too often at the same point of the run. Batch
    scripts do not repeat a command after a UserError. Only the main rank calls this function, once
    in each start of the run."""
    job = SlurmJob.of(os.environ if environ is None else environ)
    if job is None or job.restarts == 0:
        return
    path = run_folder(config) / RESTARTS_FILE
    position = None if start.state is None else start.state.position.name
    # The file does not count the first start of the job. If there is no checkpoint, the first start
    # made no progress either, so it is counted here.
    count = 1 if position is None else 0
    with contextlib.suppress(OSError, *WRONG_VALUES):
        before = parse_json(path.read_bytes())
        if before["job"] == job.number and before["position"] == position:
            count = int(before["restarts_without_progress"]) + 1
    now = {"job": job.number, "position": position, "restarts_without_progress": count}
    write_atomically(path, (json.dumps(now) + "\n").encode())
    allowed = config.training.max_restarts_without_progress
    if count > allowed:
        where = "before its first checkpoint" if position is None else f"at {position}"
        raise UserError(
            f"{run_folder(config)}: restarted {count} times {where} without progress, more "
            f"than training.max_restarts_without_progress = {allowed}; the log of the job says why "
            "the run ended each time. Submit the job again to continue"
        )


def move_earlier_run(folder: Path, lock: RunLock) -> None:
    """Rename the folder of an earlier run, so that a second run of the same name does not mix with
    it. Only the main rank calls this function. Afterwards the lock holds the new run's folder."""
    if folder.is_symlink():  # the new run is to be where the link leads, too
        folder = folder.resolve()
    lock.hold(folder)
    if not (folder / METRICS_FILE).exists():
        return
    remove_leftovers(folder / CHECKPOINTS)  # each leftover may be as large as a checkpoint
    current, kept = Path.cwd(), unused_name(folder, ".", 1)
    try:
        # Relative paths would lead into the renamed folder.
        if folder.resolve() in (current, *current.parents):
            raise OSError(errno.EBUSY, "the command runs inside of it")
        folder.rename(kept)
    except OSError as error:
        wrong = f"holds an earlier run, and cannot be renamed: {error.strerror}"
        what = problem("logging.dir", str(folder), wrong)
        raise UserError(f"{what}; move its files away, or give another folder") from error
    print(f"{folder} held an earlier run, which is now in {kept}", flush=True)
    lock.hold(folder)  # the old lock file moved with the folder
    # Without RESTARTS_FILE, a job that never reaches a checkpoint would restart endlessly. HUB_FILE
    # holds the commits of the Hub that this run has begun with.
    for name in (RESTARTS_FILE, HUB_FILE):
        if (kept / name).exists():
            (kept / name).rename(folder / name)


def start_model(
    config: AnyConfig, vocab_size: int, start: Start
) -> tuple[Ranks, Policy, RunLogger, Any]:
    """Join the other ranks, build the policy, open the run folder's files and load the weights. The
    last returned value is the result of load_starting_weights."""
    patience = patience_minutes(config.training.hang_timeout_seconds)
    ranks = start_processes(patience)
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed, patience)
    policy = build_policy(config, parallel, vocab_size)
    resumed_at = None if start.state is None else (start.state.phase, start.state.step)
    with contextlib.ExitStack() as if_this_fails:
        logger = RunLogger(
            config,
            ranks.is_main,
            resumed_at,
            has_changed=bool(start.changed),
            is_unlogged=start.state is not None and start.state.unevaluated is not None,
        )
        if_this_fails.enter_context(logger)
        for line in start.notes:
            logger.note(line)
        hf = load_starting_weights(config, policy, start, logger)
        if_this_fails.pop_all()
    return ranks, policy, logger, hf


def load_starting_weights(
    config: AnyConfig, policy: Policy, start: Start, logger: RunLogger
) -> Any:
    """Load the weights of the resumed checkpoint, or a new run's first weights. Returns the
    config.json of the Hugging Face model that the weights come from, or None."""
    if start.checkpoint is not None:
        if policy.lora is not None:
            load_base(config, policy)
            refuse_other_base(start.checkpoint, policy.lora.base)
        load_model(start.checkpoint, policy)
        if not load_rng(start.checkpoint):
            logger.note("the layout has changed: random number generators start again")
        hf = read_model(start.checkpoint)["hf"]
    else:
        hf = load_initial_weights(config, policy)
    policy.set_padding_token(hf)
    return hf


@dataclass
class Session:
    """One start of a run on this rank."""

    config: AnyConfig
    ranks: Ranks
    start: Start
    stop: StopSignals
    lock: RunLock

    def tell_finished(self) -> None:
        """Print that the run is finished, and what can be done with it."""
        if self.ranks.is_main:
            assert self.start.state is not None
            print(finished_text(self.config, self.start.state), flush=True)

    def begin(self) -> None:
        """Prepare the run folder. Raises UserError, on all ranks, after too many restarts."""
        on_main(lambda: count_restart(self.config, self.start))
        if self.start.state is None:
            on_main(lambda: move_earlier_run(run_folder(self.config), self.lock))

    def train(
        self,
        loop: Callable[[], None],
        policy: Policy,
        close_checkpoints: Callable[[], None],
        logger: RunLogger,
    ) -> bool:
        """Run `loop`, and watch for hangs and for the end of the job. Returns True when the run is
        done, False when it was stopped and saved."""
        with watched(self.config, policy.models, self.ranks, self.stop):
            try:
                loop()
                close_checkpoints()
            except StopRun as stopped:
                close_checkpoints()
                logger.note(str(stopped))
                return False
            except ServersEndError:  # before the first step of this start
                close_checkpoints()
                logger.note("stopped as asked, with nothing new to save; the same command goes on")
                return False
            except FloatingPointError:  # on all ranks; an earlier step may still be being saved
                close_checkpoints()
                raise
        return True


@contextlib.contextmanager
def open_session(config: AnyConfig, *, fresh: bool, change: bool = False) -> Generator[Session]:
    """Join the other ranks and find the checkpoint to resume. Every rank must enter this context.
    `change`: see `conclude`.

    Raises UserError on all ranks: if `fresh` is set and the folder is not empty, if all checkpoints
    are damaged, or if a key has changed that must not change.
    """
    with RunLock() as lock, StopSignals(enabled=config.checkpoint.interval > 0) as stop:
        try:
            ranks = start_processes(patience_minutes(config.training.hang_timeout_seconds))
            found = on_main(lambda: candidates(config, fresh=fresh, lock=lock))
            chosen, damage = first_whole(found, damage_of)
            start = on_main(lambda: conclude(config, chosen, damage, change=change))
            yield Session(config, ranks, start, stop, lock)
        finally:
            stop_processes()
