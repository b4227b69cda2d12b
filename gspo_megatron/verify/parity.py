"""One policy update on any layout, with its whole gradient on rank 0.

Loss and gradient of a step do not depend on how model and batch are sharded: the `verify` command
and the tests compare them on several layouts, for a synthetic batch or a step of a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.batching.packing import Branches
from gspo_megatron.batching.plan import MiniBatch, data_ranks, plan_step
from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.checkpoint.optimizer import load_trainer_state
from gspo_megatron.checkpoint.run_state import RunState, read_model
from gspo_megatron.checkpoint.start import load_base, load_initial_weights
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer
from gspo_megatron.config import (
    Config,
    Layout,
    apply_layout,
    check_config,
    recomputes_old_logprobs,
    resolve_parallel,
)
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.families.weight_map import is_vocabulary
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer
from gspo_megatron.models.shards import Shard, parameter_shards
from gspo_megatron.objectives import build_objective
from gspo_megatron.objectives.advantages import AdvantageEstimator
from gspo_megatron.platform.collectives import gather_objects
from gspo_megatron.platform.groups import (
    data_parallel_group,
    set_up_model_parallel,
    start_processes,
    stop_processes,
    tear_down_model_parallel,
)
from gspo_megatron.rl.loop import compute_advantages, update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rl.step_inputs import StepInputs, read_experience, reference_of
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify.results import StepResult, relative_error
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch

_PAD_ID = 0  # padding has no influence
_TOKEN_BUDGET = 64  # of a synthetic micro-batch: small, so that every replica has several
DESCENT = 0.05  # learning rate between the mini-batches of an update in float64


@dataclass(frozen=True)
class Cut:
    """How the batch is cut into micro-batches, on every layout alike: the routers' auxiliary losses
    are not linear in tokens, so only equal micro-batches have equal gradients.

    `replicas` is a multiple of the data-parallel size of each compared layout; a data rank trains
    on the micro-batches of several replicas.
    """

    replicas: int = 1
    token_budget: int = 4096
    multiple: int = 1  # of micro-batches per replica: pp for interleaved schedules


def check_layouts(config: Config, layouts: Sequence[Layout]) -> None:
    """Raise ConfigError with every reason why a layout does not fit the configuration."""
    problems = []
    for layout in layouts:
        try:
            check_config(apply_layout(config, layout), layout.world_size)
        except ConfigError as error:
            problems += [f"layout {layout}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)


def usual_layouts(config: Config, most_ranks: int) -> list[Layout]:
    """The configuration's own layout, and two of each kind of parallelism that fits the model.
    Raises UserError where its own layout takes more ranks than `most_ranks` and than cores."""
    own = config.layout()
    if own.world_size > max(most_ranks, os.cpu_count() or 1):
        raise UserError(
            f"layout {own}: takes {own.world_size} ranks, which are many for one machine; "
            "name the layouts to compare, as in --layouts tp=2 pp=2,ep=2"
        )
    found = [] if own.world_size == 1 else [own]
    for text in ("dp=2", "tp=2", "pp=2", "ep=2", "cp=2"):
        layout = Layout.parse(text)
        with contextlib.suppress(ConfigError):
            check_layouts(config, [layout])
            found.append(layout)
    return list(dict.fromkeys(found))


def common_cut(config: Config, layouts: Sequence[Layout], *, is_step: bool) -> Cut:
    """Micro-batches that every layout can run alike."""
    replicas, multiple = 1, 1
    for layout in layouts:
        parallel = resolve_parallel(apply_layout(config, layout), layout.world_size)
        replicas = math.lcm(replicas, parallel.data_parallel_size)
        if layout.vpp:
            multiple = math.lcm(multiple, layout.pp)
    budget = config.training.micro_batch_tokens if is_step else _TOKEN_BUDGET
    return Cut(replicas, budget, multiple)


def run_update(
    config: Config,
    vocab_size: int,
    batch: SyntheticBatch,
    cut: Cut | None = None,
    mini_batches: int = 1,
) -> StepResult:
    """Build the policy on the running processes and update it on `batch`, by the code of a training
    step from the redistribution of sequences on. All ranks call it, after `check_config`. The
    metrics are the step's, the gradients those of the last mini-batch.
    """
    cut = cut or Cut(token_budget=config.training.micro_batch_tokens)
    rate = config.optimizer.learning_rate
    recorder, builder = _set_up(config, vocab_size, Schedule(rate, rate, 0, 1, "constant"))
    policy = recorder.policy
    lengths = [len(tokens) for tokens in batch.tokens]
    plans = plan_alike(config, lengths, batch.masked_lengths(), cut, mini_batches, batch.branches)
    sequences, index = distribute(batch, plans, policy)
    _set_old_logprobs(policy, builder, plans, sequences, index)
    section = config.objective
    if not resolve_objective(section).corrections:
        # Old log-probs are the rollout's. (A correction has a ratio to the rollout's of its own.)
        section = section.model_copy(update={"old_logprobs": "rollout"})
    objective = build_objective(section, config.rollout.max_response_tokens)
    if section.kl_in == "reward":  # the batch has advantages in place of rewards
        as_given = AdvantageEstimator(section, lambda values, _: values.float())
        objective = replace(objective, advantages=as_given)
    updater = PolicyUpdater(policy, recorder, builder, objective, section, config.routing)
    advantages = index.rewards.float().to(updater.device)
    metrics = update_policy(updater, sequences, index, plans, advantages)
    tear_down_model_parallel()
    return StepResult(metrics, recorder.gradients, recorder.replica_error)


@dataclass(frozen=True)
class Task:
    """One update to compute: written to a file for the ranks that compute it."""

    config: Config  # on the layout of these ranks
    vocab_size: int
    cut: Cut
    kept: StepInputs | None = None  # None: a synthetic batch
    checkpoint: Path | None = None  # see _run_kept_step, as the two below
    optimizer: bool = False
    updates: bool = False


def run_task(path: Path) -> None:
    """Compute the task in this file; every rank calls it. Rank 0 writes the StepResult beside it,
    with the suffix .result."""
    task: Task = pickle.loads(path.read_bytes())
    ranks = start_processes()
    if task.kept is None:
        batch = synthetic_batch(task.config.objective, task.vocab_size)
        result = run_update(task.config, task.vocab_size, batch, task.cut)
    else:
        result = _run_kept_step(task, task.kept)
    if ranks.is_main:
        path.with_suffix(".result").write_bytes(pickle.dumps(result))
    stop_processes()


def _run_kept_step(task: Task, kept: StepInputs) -> StepResult:
    """Compute a kept step by the code of a training step. All ranks call it; step and checkpoint
    (None: the weights that the run began with) have passed the checks of `find_weights`.

    The gradients are those of the first mini-batch, which depend only on the weights. With
    `updates` the mini-batches change the weights as in the run, with the state of the checkpoint's
    `optimizer` or a new one. Without it all of them use these weights. If a gradient norm is not
    finite, which ends a run, the loss is NaN and `lost_in` is the mini-batch.
    """
    config, checkpoint = task.config, task.checkpoint
    steps, updates = config.training.steps, config.objective.mini_batches
    schedule = Schedule.of(config.optimizer, steps, updates)
    recorder, builder = _set_up(config, task.vocab_size, schedule)
    recorder.keeps_first, recorder.moves = True, task.updates
    policy, group = recorder.policy, data_parallel_group()
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    hf = None  # config.json of the Hugging Face model that the weights come from
    if policy.lora is not None and checkpoint is not None:
        load_base(config, policy)
    if checkpoint is None or objective.needs_reference:
        # the weights that RL started from, as far as they are known
        reference = None if checkpoint is None else reference_of(checkpoint)
        if reference is None:
            hf = load_initial_weights(config, policy)
        else:
            load_model(reference, policy)
    # its reference policy has the weights of this moment
    updater = PolicyUpdater(
        policy,
        recorder,
        builder,
        objective,
        config.objective,
        config.routing,
        recomputes=recomputes_old_logprobs(config),
    )
    if checkpoint is not None:
        load_model(checkpoint, policy)
        hf = read_model(checkpoint)["hf"]
        if task.optimizer:
            load_optimizer(checkpoint, policy, recorder)
            load_trainer_state(recorder, RunState.read(checkpoint).trainer)
            # A run in bf16: these are the fp32 weights, each only on the rank that updates it.
            for chunk in policy.chunks:
                chunk.start_param_sync(force_sync=True)
    policy.set_padding_token(hf)
    experience = read_experience(kept.folder, kept.rollouts, policy)
    index = gather_index(experience.batch, experience.scores.shaped, group)
    mini_batches = min(config.objective.mini_batches, len(index.lengths))
    plans = plan_alike(
        config, index.lengths, index.masked_lengths, task.cut, mini_batches, index.branches
    )
    advantages, token_advantages = compute_advantages(objective.advantages, experience, index)
    sequences = redistribute(
        experience.batch,
        index,
        data_ranks(plans, len(index.lengths)),
        group,
        context_parallel_size=policy.config.context_parallel_size,
        token_advantages=token_advantages,
    )
    lost_in = None
    try:
        metrics = update_policy(updater, sequences, index, plans, advantages)
    except FloatingPointError:  # on all ranks: the norm is that of the whole gradient
        metrics, lost_in = {"loss": math.nan}, recorder.updates
    metrics["grad_norm"] = recorder.kept_norm
    tear_down_model_parallel()
    # Over a group advantages add up to 0, and so nearly does a step's loss.
    scale = float(advantages.abs().mean())
    return StepResult(metrics, recorder.gradients, recorder.replica_error, scale, lost_in)


def _set_up(
    config: Config, vocab_size: int, schedule: Schedule
) -> tuple[Recorder, MicroBatchBuilder]:
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, vocab_size)
    trainer = build_trainer(policy, config.optimizer, schedule)
    padded = not config.training.packing
    builder = MicroBatchBuilder(policy, _PAD_ID, config.rollout.temperature, padded=padded)
    return Recorder(trainer.optimizer, trainer.scheduler, policy), builder


def gather_gradients(policy: Policy) -> tuple[dict[str, Tensor], float]:
    """All reduced gradients as whole tensors on rank 0 (nothing on the others), without padding of
    the vocabulary; and the largest relative difference between two ranks' copies of one."""
    _complete_shards(policy)
    everything = [shard for model in policy.models for shard in parameter_shards(model)]
    mine = [shard for shard in everything if shard.parameter.requires_grad]
    listed = [(s.name, s.global_shape, s.offset, tuple(s.data.shape)) for s in mine]
    catalogue = gather_objects(listed)
    if catalogue is None:
        for shard in mine:
            dist.send(_gradient(shard), dst=0)
        return {}, 0.0
    tensors: dict[str, Tensor] = {}
    filled: dict[str, dict[tuple[int, ...], int]] = {}  # elements by offset
    replica_error = 0.0
    for source, pieces in enumerate(catalogue):
        for number, (name, shape, offset, size) in enumerate(pieces):
            if source == 0:
                piece = _gradient(mine[number])
            else:
                piece = _gradient(mine[0]).new_empty(size)
                dist.recv(piece, src=source)
            if name not in tensors:
                if is_vocabulary(name):
                    shape = (policy.vocab_size, *shape[1:])  # the padding depends on TP
                tensors[name], filled[name] = torch.zeros(shape, dtype=piece.dtype), {}
            slices = tuple(slice(start, start + n) for start, n in zip(offset, size))
            place = tensors[name][slices]
            piece = piece.cpu()[tuple(slice(n) for n in place.shape)]
            if offset in filled[name]:
                error = relative_error(piece, place, not_finite=True)
                replica_error = max(replica_error, error)
            else:
                place.copy_(piece)
                filled[name][offset] = piece.numel()
    gaps = [name for name in tensors if sum(filled[name].values()) < tensors[name].numel()]
    assert not gaps, f"no rank holds all of {gaps}"
    return tensors, replica_error


@dataclass
class Recorder(Trainer):
    """Keeps the gradients of the last update, or of the first."""

    policy: Policy
    keeps_first: bool = False
    moves: bool = True  # whether updates change the weights
    gradients: dict[str, Tensor] = field(default_factory=dict)
    replica_error: float = 0.0
    kept_norm: float = math.nan
    updates: int = 0  # begun

    def update(self) -> tuple[float, float]:
        """See Trainer.update. float64 weights, which no optimizer takes, follow the gradient."""
        self.updates += 1
        if self.updates == 1 or not self.keeps_first:
            self.gradients, self.replica_error = gather_gradients(self.policy)
            # from what rank 0 has gathered
            squares = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
            for gradient in self.gradients.values():
                squares += gradient.double().square().sum()
            dist.broadcast(squares, src=0)
            self.kept_norm = math.sqrt(squares)
        if not self.moves:
            return self.kept_norm, 0.0
        if self.policy.config.params_dtype != torch.float64:
            return super().update()
        # Megatron-Core's norm and clipping refuse float64
        with torch.no_grad():
            for model in self.policy.models:
                for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                    parameter.sub_(parameter.main_grad, alpha=DESCENT)
        return self.kept_norm, 0.0


def _gradient(shard: Shard) -> Tensor:
    owner: Any = shard.parameter  # to which Megatron-Core adds main_grad
    gradient = shard.view(owner.main_grad)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()


def _complete_shards(policy: Policy) -> None:
    """Gather the shares of the gradients. A data rank of the distributed optimizer has the reduced
    gradients of its own share of a buffer only."""
    for chunk in policy.chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                shares = bucket.grad_data.chunk(group.size())
                gathered = torch.empty_like(bucket.grad_data)
                dist.all_gather_into_tensor(gathered, shares[group.rank()].clone(), group=group)
                bucket.grad_data.copy_(gathered)


def plan_alike(
    config: Config,
    lengths: Sequence[int],
    masked_lengths: Sequence[int],
    cut: Cut,
    mini_batches: int,
    branches: Branches | None = None,
) -> list[MiniBatch]:
    """The same micro-batches for each layout whose data-parallel size divides `cut.replicas`."""
    data_parallel_size = resolve_parallel(config, dist.get_world_size()).data_parallel_size
    assert cut.replicas % data_parallel_size == 0
    plans = plan_step(
        lengths,
        masked_lengths,
        mini_batches=mini_batches,
        data_parallel_size=cut.replicas,
        token_budget=cut.token_budget,
        micro_batch_multiple=cut.multiple,
        padded=not config.training.packing,
        branches=None if branches is None else [[*map(sum, each)] for each in branches],
    )
    share = cut.replicas // data_parallel_size
    joined = []
    for plan in plans:
        ranks = tuple(
            tuple(m for replica in plan.micro_batches[start : start + share] for m in replica)
            for start in range(0, cut.replicas, share)
        )
        joined.append(MiniBatch(ranks, plan.num_sequences, plan.num_response_tokens))
    return joined


def distribute(
    batch: SyntheticBatch, plans: Sequence[MiniBatch], policy: Policy
) -> tuple[Sequences, StepIndex]:
    """Send each sequence to its ranks; pairs of sequences come from the data ranks in turn."""
    group = data_parallel_group()
    device = torch.device(torch.cuda.current_device())
    mine = [n for n in range(len(batch.tokens)) if n // 2 % group.size() == group.rank()]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0][:0], *(tensors[n] for n in mine)]).to(device)

    numbers = torch.tensor(mine, dtype=torch.long, device=device)
    lengths = torch.tensor([len(t) for t in batch.tokens], device=device)[numbers]
    responses = torch.tensor(batch.response_lengths, device=device)[numbers]
    routes, in_response = None, batch.in_response()
    if batch.routes is not None:
        layers = [number - 1 for number in attach_hooks(policy.models)]
        routes = join(batch.routes)[:, layers]  # [tokens, layers of this rank, k]
    rollout = RolloutBatch(
        tokens=join(batch.tokens),
        prompt_lengths=lengths - responses,
        response_lengths=responses,
        # in float64 the anchor of the ratios must not be rounded to float32 on its way
        rollout_logprobs=join(batch.log_ratios).to(
            torch.promote_types(policy.config.params_dtype, torch.float32)
        ),
        truncated=torch.zeros_like(numbers, dtype=torch.bool),
        sample_index=numbers,
        group_index=numbers // 2,
        mask=None if batch.masks is None else join(batch.masks),
        routes=routes,
        in_response=None if in_response is None else join(in_response),
    )
    advantages = torch.tensor(batch.advantages, dtype=torch.float64, device=device)[numbers]
    index = gather_index(rollout, advantages, group)
    cp_size = policy.config.context_parallel_size
    owners = data_ranks(plans, len(index.lengths))
    of_tokens = None if batch.token_advantages is None else join(batch.token_advantages)
    sequences = redistribute(
        rollout, index, owners, group, context_parallel_size=cp_size, token_advantages=of_tokens
    )
    return sequences, index


def _set_old_logprobs(
    policy: Policy,
    builder: MicroBatchBuilder,
    plans: Sequence[MiniBatch],
    sequences: Sequences,
    index: StepIndex,
) -> None:
    """Replace the wanted log-ratios, which were sent as the rollout's log-probs, by log-probs: the
    policy's minus the log-ratio. Only the last pipeline stage reads them."""
    batches = [m for batch in builder.build_step(plans, sequences, index) for m in batch]
    for micro_batch, (logprobs, _) in zip(batches, response_logprobs(policy, batches)):
        rows = micro_batch.packed.response_index
        wanted = sequences.rollout_logprobs[rows]  # log-ratios
        sequences.rollout_logprobs[rows] = (logprobs - wanted).to(wanted)
