"""Runs one rank of an RL run, with a configuration that has passed all checks."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import torch

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start, conclude
from gspo_megatron.checkpoint.start import Session, open_session, start_model
from gspo_megatron.config import Config
from gspo_megatron.config.model_rules import shares_prompts
from gspo_megatron.config.objectives import narrow_clip_warnings
from gspo_megatron.config.phases import at_step, is_border, phase_end
from gspo_megatron.config.resume import differences
from gspo_megatron.data.inputs import Inputs, model_vocab_size, read_inputs
from gspo_megatron.environments.episode import gives_rewards
from gspo_megatron.environments.registry import environment_of, episodes_of, tools_of
from gspo_megatron.models.build import Policy
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.observe.metrics_files import RL
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import tear_down_model_parallel
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.rewards.registry import Reward, reward_of
from gspo_megatron.rl.loop import ReinforcementLoop, RunComponents
from gspo_megatron.rl.reward_model import FolderScores
from gspo_megatron.rl.rollouts import Collector
from gspo_megatron.rollout.engine import RolloutSource
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.megatron.rollouts import MegatronRollouts
from gspo_megatron.routing.hooks import attach_hooks

# If a key with one of these prefixes changes, the running moments of a reward model begin anew.
_OTHER_SCORES = tuple(
    f"reward.model.{key}"
    for key in ("folder:", "tokenizer:", "chat_template", "max_tokens:", "normalize:")
)
# If a key with one of these prefixes changes, rewards are not compared with earlier rewards.
_OTHER_REWARDS = ("data.", "rollout.", "environment.", "reward.")


def run_training(config: Config, *, fresh: bool = False, change: bool = False) -> bool:
    """Train as this process's rank of the run.

    Every rank calls it with the same configuration, which has passed `check_config`. If the run
    folder holds a run, it is continued. With `fresh` the folder must be empty. With `change` the
    run may continue with other values of the keys that a phase may change.

    Returns True if the run is done, False if it was stopped and saved. Raises UserError for
    problems that the user can solve. Without phases, all input is read before any process group
    exists. With phases, the checkpoint must be read first: it tells the current phase.
    """
    parts = None if config.training.phases else read_parts(config)
    with open_session(config, fresh=fresh, change=change) as session:
        if session.start.is_finished:
            session.tell_finished()
            return True
        session.begin()
        kept = None
        try:
            while True:
                done, following, kept = _train_phase(config, parts, session, kept)
                if following is None:
                    return done
                # A phase begins like a resumed run. So the result is the same whether the run
                # continued by itself, or was stopped and changed. Only the servers keep running.
                tear_down_model_parallel()
                session.start = following
        finally:
            if kept is not None:  # no phase has taken the resources over
                kept.close()


def read_parts(config: Config) -> tuple[Inputs, Reward, Objective]:
    """Return the input files, the reward function and the objective of a configuration."""
    inputs, reward = read_inputs(config, tools_of(config)), reward_of(config.reward)
    return inputs, reward, build_objective(config.objective, config.rollout.max_response_tokens)


def _train_phase(
    config: Config,
    parts: tuple[Inputs, Reward, Objective] | None,
    session: Session,
    kept: Any,
) -> tuple[bool, Start | None, Any]:
    """Train to the end of the phase (or of the run, if it has no phases), or to a rollback.

    parts: inputs, reward and objective; with None, those of the phase are read. kept: see
    `RolloutSource.hand_over`. Returns three values: False if the run was stopped, else True; the
    start of the next phase or of the steps after a rollback, or None if nothing follows; and the
    resources that the next phase's source takes over, or None.
    """
    start = session.start
    step = start.state.step if start.state is not None and start.state.phase == RL else 0
    end, of_phase = phase_end(config, start.next_step), at_step(config, start.next_step)
    run = assemble(of_phase, *(parts or read_parts(of_phase)), start, session.stop, kept)
    with run.logger, closing(run.collector):
        changed = start.changed
        if start.begins_phase and not changed:
            changed = differences(at_step(config, step), of_phase)
        # the checkpoint may be of the middle of a step, and may have the changed values
        state = start.state
        has_rollouts = state is not None and (state.rollouts or state.unevaluated) is not None
        run.logger.begin_phase(step, changed, config, of_phase, has_rollouts=has_rollouts)
        if any(line.startswith(_OTHER_REWARDS) for line in changed):
            run.checkpoints.watch.forget_rewards()
        if any(line.startswith(_OTHER_SCORES) for line in changed):
            run.checkpoints.reward_moments.clear()
        loop = lambda: ReinforcementLoop(run).run()  # noqa: E731 (built inside `train`)
        done = session.train(loop, run.policy, run.checkpoints.close, run.logger)
        if not done:
            return False, None, None
        if (back := run.checkpoints.back) is not None:
            # The old servers are not kept: they have weights of steps that the rollback discards.
            return True, on_main(lambda: conclude(config, back, {}, change=True)), None
        if is_border(config, end):
            return True, run.checkpoints.next_start(), run.collector.source.hand_over()
        run.logger.finish()
    return True, None, None


def assemble(
    config: Config,
    inputs: Inputs,
    reward: Reward,
    objective: Objective,
    start: Start | None = None,
    stop: StopSignals | None = None,
    kept: Any = None,
) -> RunComponents:
    """Connect to the other ranks and build this rank's components.

    The policy gets the weights of `start`, if there is one. `kept`: see `RolloutSource.hand_over`.
    """
    start, stop = start or Start(), stop or StopSignals(enabled=False)
    tokenizer = inputs.tokenizer
    with ExitStack() as if_this_fails:
        ranks, policy, logger, hf = start_model(config, model_vocab_size(config, tokenizer), start)
        if_this_fails.enter_context(logger)
        if gives_rewards(environment_of(config)):
            logger.write_config(config, {"reward.name": "the environment gives the rewards"})
        for line in (*inputs.warnings, *narrow_clip_warnings(config.objective)):
            logger.note(f"warning: {line}")
        if config.rollout.engine == "vllm":
            # imported here, because it loads an HTTP library
            from gspo_megatron.rl.served_rollouts import ServedRollouts

            served = ServedRollouts(config, inputs, policy, ranks.device, hf, kept, stop)
            collector = collector_of(config, inputs, served, reward, ranks.device)
        else:
            collector = in_process_collector(config, inputs, policy, reward, ranks.device)
        run = RunComponents(
            config=config,
            policy=policy,
            inputs=inputs,
            collector=collector,
            builder=MicroBatchBuilder(
                policy,
                tokenizer.pad_id,
                config.rollout.temperature,
                padded=not config.training.packing,
                share_prompts=shares_prompts(config),
            ),
            objective=objective,
            logger=logger,
            checkpoints=Checkpoints(config, policy, logger, start, stop, hf),
        )
        if_this_fails.pop_all()
    return run


def in_process_collector(
    config: Config, inputs: Inputs, policy: Policy, reward: Reward, device: torch.device
) -> Collector:
    """Make a collector with the in-process engine: the policy itself generates."""
    tokenizer, routing = inputs.tokenizer, config.routing
    engine = MegatronEngine(
        policy,
        pad_id=tokenizer.pad_id,
        eos_id=tokenizer.eos_ids,
        batch_size=config.rollout.batch_size,
        prefill_tokens=config.training.micro_batch_tokens,
        decode=tokenizer.decode,
        special_tokens=tokenizer.special_tokens,
        record_routes="r3" in routing.modes,
        router_noise=routing.rollout_noise,
    )
    layers = []
    if "r3" in routing.modes or routing.rollout_noise:
        layers = attach_hooks(policy.models)
    rollouts = MegatronRollouts(engine, episodes_of(config, tokenizer), device, layers)
    return collector_of(config, inputs, rollouts, reward, device)


def collector_of(
    config: Config, inputs: Inputs, source: RolloutSource, reward: Reward, device: torch.device
) -> Collector:
    """Make a collector for a source, with the run's reward. Loads a reward model of a folder."""
    scorer = GroupScorer.of(config, inputs.tokenizer, reward, config.reward, is_learnt=True)
    score = None if config.reward.model.folder is None else FolderScores(config)
    return Collector(config, inputs.files, source, scorer, device, score)
