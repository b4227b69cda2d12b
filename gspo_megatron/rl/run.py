"""One rank of a training run, from an already checked configuration."""

from __future__ import annotations

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start, finished_text, run_folder
from gspo_megatron.checkpoint.run_lock import run_lock
from gspo_megatron.checkpoint.start import (
    count_restart,
    find_start,
    load_starting_weights,
    move_earlier_run,
    open_record,
)
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.data.inputs import Inputs, model_vocab_size, read_inputs
from gspo_megatron.models.build import build_policy
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import (
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
)
from gspo_megatron.platform.stop import StopRun, StopSignals, watched
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rl.components import Job
from gspo_megatron.rl.loop import ReinforcementLoop
from gspo_megatron.rl.rollouts import ExperienceCollector
from gspo_megatron.rl.warm_start import warm_start
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.noise import RouterNoise
from gspo_megatron.routing.replay import recorded


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
                with watched(config, job.policy.models, ranks, stop):
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
