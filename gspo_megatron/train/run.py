"""One rank of a training run, from an already checked configuration."""

from __future__ import annotations

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.data.inputs import Inputs, model_vocab_size, read_inputs
from gspo_megatron.models.build import build_policy
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.noise import RouterNoise
from gspo_megatron.routing.replay import recorded
from gspo_megatron.train.experience import ExperienceCollector
from gspo_megatron.train.loop import Job, ReinforcementLoop, warm_start
from gspo_megatron.train.record import RunRecord
from gspo_megatron.train.schedule import MicroBatchBuilder


def run_training(config: Config) -> None:
    """Train as this process's rank of the run; every rank calls it with the same configuration,
    which has passed `check_config`.

    Raises UserError for what the user can mend: prompt files, tokenizer, reward. All input is read
    before any process group exists.
    """
    inputs = read_inputs(config)
    reward = get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    try:
        job = assemble(config, inputs, reward, objective)
        try:
            warm_start(job)
            ReinforcementLoop(job).run()
            job.record.finish()
        finally:
            job.record.close()
    finally:
        stop_processes()


def assemble(config: Config, inputs: Inputs, reward: Reward, objective: Objective) -> Job:
    """Join the other ranks and build this rank's part of everything."""
    ranks = start_processes()
    tokenizer = inputs.tokenizer
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, model_vocab_size(config, tokenizer))
    routing = config.routing
    engine = MegatronEngine(
        policy,
        pad_id=tokenizer.pad_id,
        eos_id=tokenizer.eos_id,
        batch_size=config.rollout.batch_size,
        decode=tokenizer.decode,
        record_routes=recorded if routing.replay == "r3" else None,
        router_noise=RouterNoise(routing.rollout_noise) if routing.rollout_noise else None,
    )
    if routing.replay == "r3" or routing.rollout_noise:
        attach_hooks(policy.models)
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
        record=RunRecord(config, ranks.is_main),
    )
