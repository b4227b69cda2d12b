"""A dumped step computed again, on any layout: the way to look into a step that went wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.batching.plan import data_ranks
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.checkpoint.run_state import RunState
from gspo_megatron.checkpoint.start import load_initial_weights
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer, load_trainer_state
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Trainer, build_trainer
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import set_up_model_parallel, tear_down_model_parallel
from gspo_megatron.rl.dumps import Dump, reference_of
from gspo_megatron.rl.loop import compute_advantages, update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater, learning_rates
from gspo_megatron.rl.rollout_store import read_experience
from gspo_megatron.verify.parity import (
    Cut,
    Recorder,
    StepResult,
    gather_gradients,
    plan_alike,
)

_PAD_ID = 0  # padding takes no part in anything


def run_dumped_step(
    config: Config,
    vocab_size: int,
    dump: Dump,
    checkpoint: Path | None,
    cut: Cut,
    *,
    optimizer: bool,
    updates: bool,
) -> StepResult:
    """Compute a dumped step by the code of a training step, from the exchange of sequences on. All
    ranks call it; `dump` and `checkpoint` (None: the weights that a run begins with) have passed
    their checks, those of `find_weights`. The groups it builds are gone when it returns.

    The gradients are those of the first mini-batch, which depend on nothing but the weights. With
    `updates` the mini-batches move the weights as they did in the run, with the state of the
    checkpoint's `optimizer` or a new one, and the loss is the step's; else they do not, and it is
    the loss at these weights. Where a gradient norm is not finite, which ends a run, the loss is
    NaN and `lost_in` tells the mini-batch.
    """
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, vocab_size)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    if checkpoint is None or objective.needs_reference:
        load_reference_weights(config, policy, checkpoint)
    trainer = build_trainer(policy, config.optimizer, learning_rates(config))
    recorder = FirstGradients(trainer.optimizer, trainer.scheduler, policy, moves=updates)
    padded = not config.training.packing
    builder = MicroBatchBuilder(policy, _PAD_ID, config.rollout.temperature, padded=padded)
    updater = PolicyUpdater(  # whose reference policy has the weights of this moment
        policy, recorder, builder, objective, config.objective, config.routing
    )
    if checkpoint is not None:
        load_model(checkpoint, policy)
        if optimizer:
            load_optimizer(checkpoint, policy, trainer)
            load_trainer_state(trainer, RunState.read(checkpoint).trainer)
            # Of a run in bf16 the weights are now the fp32 ones, each on the rank that updates it.
            for chunk in policy.chunks:
                chunk.start_param_sync(force_sync=True)
    experience = read_experience(dump.folder, dump.rollouts, policy)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    index = gather_index(experience.batch, experience.scores.shaped, group)
    plans = plan_alike(
        index.lengths,
        index.response_lengths,
        cut,
        min(config.objective.mini_batches, len(index.lengths)),
        parallel.data_parallel_size,
        padded=padded,
    )
    advantages, token_advantages = compute_advantages(
        config.objective, objective, experience, index
    )
    sequences = redistribute(
        experience.batch,
        index,
        data_ranks(plans, len(index.lengths)),
        group,
        context_parallel_size=parallel.context_parallel_size,
        token_advantages=token_advantages,
    )
    lost_in = None
    try:
        metrics = update_policy(updater, sequences, index, plans, advantages)
    except FloatingPointError:  # on all ranks: the norm is that of the whole gradient
        metrics, lost_in = {"loss": math.nan}, recorder.updates
    assert recorder.first_norm is not None
    metrics["grad_norm"] = recorder.first_norm
    tear_down_model_parallel()
    # Over a group advantages add up to 0, and the step's loss nearly does: their mean size tells
    # how small a difference is.
    scale = float(advantages.abs().mean())
    return StepResult(metrics, recorder.gradients, recorder.replica_error, scale, lost_in)


def load_reference_weights(config: Config, policy: Policy, checkpoint: Path | None) -> None:
    """Give the policy the weights that RL started from, as far as they are known."""
    reference = None if checkpoint is None else reference_of(checkpoint)
    if reference is None:
        load_initial_weights(config, policy)
    else:
        load_model(reference, policy)


@dataclass
class FirstGradients(Recorder):
    """Keeps those of a step's first mini-batch."""

    moves: bool = True  # whether the weights do
    first_norm: float | None = None
    updates: int = 0  # begun

    def update(self) -> tuple[float, float]:
        """See Trainer.update."""
        self.updates += 1
        if self.first_norm is None:
            self.gradients, self.replica_error = gather_gradients(self.policy)
            self.first_norm = self.norm()
        return Trainer.update(self) if self.moves else (self.first_norm, 0.0)
