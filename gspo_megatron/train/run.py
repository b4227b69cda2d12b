"""One rank of a training run, from an already checked configuration."""

from __future__ import annotations

from typing import Any

from gspo_megatron.checkpoint.resume import Start, finished_text, run_folder
from gspo_megatron.checkpoint.rng import load_rng
from gspo_megatron.checkpoint.run_lock import run_lock
from gspo_megatron.checkpoint.run_state import read_model
from gspo_megatron.checkpoint.tensors import load_model
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.data.inputs import Inputs, model_vocab_size, read_inputs
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.platform.groups import (
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
)
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.noise import RouterNoise
from gspo_megatron.routing.replay import recorded
from gspo_megatron.train.agreement import on_main
from gspo_megatron.train.checkpointing import Checkpoints
from gspo_megatron.train.experience import ExperienceCollector
from gspo_megatron.train.job import Job
from gspo_megatron.train.loop import ReinforcementLoop
from gspo_megatron.train.record import RunRecord, move_earlier_run
from gspo_megatron.train.schedule import MicroBatchBuilder
from gspo_megatron.train.start import find_start, load_initial_weights
from gspo_megatron.train.stop import StopRun, StopSignals
from gspo_megatron.train.warm_start import warm_start
from gspo_megatron.train.watch import count_restart, watched


def run_training(config: Config, *, fresh: bool = False) -> bool:
    """Train as this process's rank of the run; every rank calls it with the same configuration,
    which has passed `check_config`. An earlier run in the run folder is gone on with, unless
    `fresh`, which wants that folder empty.

    Returns whether the run is done; False where it was told to stop, and is saved. Raises UserError
    for what the user can mend: prompt files, tokenizer, reward, keys that must not change in the
    middle of a run. All input is read before any process group exists.
    """
    inputs = read_inputs(config)
    reward = get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    folder = run_folder(config)
    with run_lock() as lock, StopSignals(enabled=config.checkpoint.interval > 0) as stop:
        try:
            ranks = start_processes(patience_minutes(config.training.hang_timeout_seconds))
            on_main(lambda: lock.hold(folder))
            start = find_start(config, fresh=fresh)
            if start.is_finished:
                assert start.state is not None
                if ranks.is_main:
                    print(finished_text(config, start.state), flush=True)
                return True
            on_main(lambda: count_restart(config, start))
            if start.state is None:
                on_main(lambda: move_earlier_run(folder, lock))
            job = assemble(config, inputs, reward, objective, start, stop)
            try:
                with watched(config, job.policy, ranks, stop):
                    return _run(job)
            finally:
                job.record.close()
        finally:
            stop_processes()


def _run(job: Job) -> bool:
    try:
        warm_start(job)
        ReinforcementLoop(job).run()
        job.checkpoints.close()
    except StopRun as stopped:
        job.checkpoints.close()
        job.record.note(str(stopped))
        return False
    job.record.finish()
    return True


def assemble(
    config: Config,
    inputs: Inputs,
    reward: Reward,
    objective: Objective,
    start: Start | None = None,
    stop: StopSignals | None = None,
) -> Job:
    """Join the other ranks and build this rank's part of everything; the policy has the weights of
    `start`, where there is one."""
    start = start or Start()
    patience = patience_minutes(config.training.hang_timeout_seconds)
    ranks = start_processes(patience)
    tokenizer = inputs.tokenizer
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed, patience)
    policy = build_policy(config, parallel, model_vocab_size(config, tokenizer))
    routing = config.routing
    engine = MegatronEngine(
        policy,
        pad_id=tokenizer.pad_id,
        eos_id=tokenizer.eos_id,
        batch_size=config.rollout.batch_size,
        decode=tokenizer.decode,
        record_routes=recorded if "r3" in routing.modes else None,
        router_noise=RouterNoise(routing.rollout_noise) if routing.rollout_noise else None,
    )
    if "r3" in routing.modes or routing.rollout_noise:
        attach_hooks(policy.models)
    record = open_record(config, ranks.is_main, start)
    for line in inputs.warnings:
        record.note(f"warning: {line}")
    hf = load_starting_weights(config, policy, start, record)
    stop = stop or StopSignals(enabled=False)
    return Job(
        config=config,
        policy=policy,
        inputs=inputs,
        engine=engine,
        collector=ExperienceCollector(config, engine, tokenizer, reward, ranks.device),
        builder=MicroBatchBuilder(
            policy,
            tokenizer.pad_id,
            config.rollout.temperature,
            padded=not config.training.packing,
        ),
        objective=objective,
        record=record,
        checkpoints=Checkpoints(config, policy, record, start, stop, hf),
    )


def open_record(config: Config | StageConfig, is_main: bool, start: Start) -> RunRecord:
    """The run folder's record, from where the run goes on; says what is to be said of that."""
    resumed_at = None if start.state is None else (start.state.phase, start.state.step)
    record = RunRecord(config, is_main, resumed_at)
    for line in start.notes:
        record.note(line)
    return record


def load_starting_weights(config: Config, policy: Policy, start: Start, record: RunRecord) -> Any:
    """Give the policy the weights that the run goes on from, or else begins with.

    Returns the config.json of the Hugging Face model that they come from, None where they do not.
    """
    if start.checkpoint is not None:
        load_model(start.checkpoint, policy)
        if not load_rng(start.checkpoint):
            record.note("on another layout than before: random number generators begin anew")
        return read_model(start.checkpoint)["hf"]
    return load_initial_weights(config, policy)
