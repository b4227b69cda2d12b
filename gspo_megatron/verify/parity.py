"""Computes one policy update on any layout, with its whole gradient on rank 0.

Loss and gradient of a step must not depend on the sharding of model and batch. The `verify` command
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
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.batching.packing import Branches
from gspo_megatron.batching.plan import MiniBatch, plan_step
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
from gspo_megatron.config.model_rules import shares_prompts
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
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rl.step_inputs import StepInputs, read_experience, reference_of
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify.results import StepResult, relative_error
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch

_PAD_ID = 0  # any id, because padding has no influence
_TOKEN_BUDGET = 64  # for synthetic micro-batches: small, so that every replica has several
DESCENT = 0.05  # learning rate of the updates in float64


@dataclass(frozen=True)
class Cut:
    """How to cut the batch into the same micro-batches on every layout.

    The routers' auxiliary losses are not linear in tokens, so only equal micro-batches give equal
    gradients. `replicas` is a multiple of the data-parallel size of each compared layout. A data
    rank trains on the micro-batches of several replicas.
    """

    replicas: int = 1
    token_budget: int = 4096
    # The number of micro-batches per replica is a multiple of this number. With interleaved
    # pipelines the number is pp.
    multiple: int = 1


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
    """Return the configured layout, and a layout of two ranks for each parallelism that fits.

    Raises UserError if the configured layout needs more ranks than both `most_ranks` and the number
    of CPU cores."""
    own = config.layout()
    if own.world_size > max(most_ranks, os.cpu_count() or 1):
        raise UserError(
            f"layout {own}: takes {own.world_size} ranks, which are many for one machine; "
            "name the layouts to compare, as in --layouts tp=2 pp=2,ep=2"
        )
    layouts = [] if own.world_size == 1 else [own]
    for text in ("dp=2", "tp=2", "pp=2", "ep=2", "cp=2"):
        layout = Layout.parse(text)
        with contextlib.suppress(ConfigError):
            check_layouts(config, [layout])
            layouts.append(layout)
    return list(dict.fromkeys(layouts))


def decide_share_prompts(config: Config, layouts: Sequence[Layout]) -> Config:
    """Return the configuration with `training.share_prompts` decided for all layouts, because
    routers' losses count a shared prompt once."""
    shares = all(shares_prompts(apply_layout(config, layout)) for layout in layouts)
    training = config.training.model_copy(update={"share_prompts": shares})
    return config.model_copy(update={"training": training})


def common_cut(config: Config, layouts: Sequence[Layout], *, is_step: bool) -> Cut:
    """Return a cut into micro-batches that every layout can run."""
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
    """Build the policy on the running processes and update it on `batch`.

    The update runs the code of a training step, beginning with the redistribution of sequences. All
    ranks call it, after `check_config`. The result has the metrics of the step and the gradients of
    the last mini-batch.
    """
    cut = cut or Cut(token_budget=config.training.micro_batch_tokens)
    rate = config.optimizer.learning_rate
    recorder, builder = _set_up(config, vocab_size, Schedule(rate, rate, 0, 1, "constant"))
    policy = recorder.policy
    lengths = [len(tokens) for tokens in batch.tokens]
    prompts = batch.prompts() if builder.shares_prompts else None
    plans = plan_alike(
        config, lengths, batch.masked_lengths(), cut, mini_batches, batch.branches, prompts
    )
    sequences, index = distribute(batch, plans, policy)
    _set_old_logprobs(policy, builder, plans, sequences, index)
    section = config.objective
    if not resolve_objective(section).corrections:
        # The rollout's log-probs serve as old log-probs, unless a correction compares old and
        # rollout log-probs.
        section = section.model_copy(update={"old_logprobs": "rollout"})
    objective = build_objective(section, config.rollout.max_response_tokens)
    if section.kl_in == "reward":  # the batch has advantages instead of rewards
        unchanged = AdvantageEstimator(section, lambda values, _: values.float())
        objective = replace(objective, advantages=unchanged)
    updater = PolicyUpdater(policy, recorder, builder, objective, section, config.routing)
    metrics = update_policy(updater, sequences, index, plans, index.rewards.float())
    tear_down_model_parallel()
    return StepResult(metrics, recorder.gradients, recorder.replica_error)


@dataclass(frozen=True)
class Task:
    """An update to compute. It is written to a file for the ranks that compute it."""

    config: Config  # with the layout of these ranks
    vocab_size: int
    cut: Cut
    kept: StepInputs | None = None  # inputs of a recorded step; None: a synthetic batch
    checkpoint: Path | None = None  # for this and the next two fields see _run_kept_step
    optimizer: bool = False
    updates: bool = False


def run_task(path: Path) -> None:
    """Compute the task in a file; every rank calls this. Rank 0 writes the StepResult beside the
    file, with the suffix .result."""
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


def _run_kept_step(task: Task, inputs: StepInputs) -> StepResult:
    """Compute a recorded step with the code of a training step. All ranks call this.

    `find_weights` has checked the step and the checkpoint. Without a checkpoint, the step uses the
    weights that the run began with. The gradients are those of the first mini-batch, because they
    depend only on these weights.

    With `task.updates`, the mini-batches change the weights as in the run. Without it, all
    mini-batches use the same weights. With `task.optimizer`, the optimizer's state comes from the
    checkpoint, otherwise it is new. In a run, a gradient norm that is not finite raises an error.
    Here the loss is then NaN, and `lost_in` is the number of the mini-batch.
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
        # The step's reference weights: the checkpoint's reference or the run's first weights.
        reference = None if checkpoint is None else reference_of(checkpoint, config, inputs.step)
        if reference is None:
            hf = load_initial_weights(config, policy)
        else:
            load_model(reference, policy)
    # The updater takes the current weights as its reference policy.
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
            # In bf16 this restores fp32 weights, each only on the rank that updates the weight. So
            # send the weights to the other ranks.
            for chunk in policy.chunks:
                chunk.start_param_sync(force_sync=True)
    policy.set_padding_token(hf)
    experience = read_experience(inputs.folder, inputs.rollouts, policy)
    index = gather_index(experience.batch, experience.shaped, group)
    mini_batches = min(config.objective.mini_batches, len(index.lengths))
    prompts = index.prompts() if builder.shares_prompts else None
    lengths = index.lengths, index.masked_lengths
    plans = plan_alike(config, *lengths, task.cut, mini_batches, index.branches, prompts)
    advantages, token_advantages = objective.advantages.of_step(
        index.rewards, index.groups, experience.turns
    )
    sequences = redistribute(
        experience.batch,
        index,
        plans,
        group,
        context_parallel_size=policy.config.context_parallel_size,
        token_advantages=token_advantages,
    )
    lost_in = None
    try:
        metrics = update_policy(updater, sequences, index, plans, advantages)
    except FloatingPointError:  # raised on all ranks, because the norm is over the whole gradient
        metrics, lost_in = {"loss": math.nan}, recorder.updates
    metrics["grad_norm"] = recorder.megatron_norm
    tear_down_model_parallel()
    # The advantages of a group add up to 0, so the loss is near 0. Losses are therefore compared
    # relative to the size of the advantages.
    if advantages is None:  # objective.kl_in: reward
        advantages = objective.advantages.of_sequences(index.rewards, torch.tensor(index.groups))
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
    shares = shares_prompts(config)
    temperature = config.rollout.temperature
    builder = MicroBatchBuilder(policy, _PAD_ID, temperature, padded=padded, share_prompts=shares)
    return Recorder(trainer.optimizer, trainer.scheduler, policy), builder


def gather_gradients(policy: Policy) -> tuple[dict[str, Tensor], float]:
    """Gather all reduced gradients as whole tensors on rank 0, without padding of the vocabulary.

    Also returns the largest relative difference between two ranks' copies of a gradient. Other
    ranks get an empty result."""
    _complete_shards(policy)
    shards = (shard for model in policy.models for shard in parameter_shards(model))
    mine = [shard for shard in shards if shard.parameter.requires_grad]
    entries = [(s.name, s.global_shape, s.offset, tuple(s.data.shape)) for s in mine]
    catalogue = gather_objects(entries)  # the entries of each rank; None on ranks other than 0
    if catalogue is None:
        for shard in mine:
            dist.send(_gradient(shard), dst=0)
        return {}, 0.0
    tensors: dict[str, Tensor] = {}
    counts: dict[str, dict[tuple[int, ...], int]] = {}  # name -> offset -> number of elements
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
                tensors[name], counts[name] = torch.zeros(shape, dtype=piece.dtype), {}
            slices = tuple(slice(start, start + n) for start, n in zip(offset, size))
            place = tensors[name][slices]
            piece = piece.cpu()[tuple(slice(n) for n in place.shape)]
            if offset in counts[name]:
                error = relative_error(piece, place, not_finite=True)
                replica_error = max(replica_error, error)
            else:
                place.copy_(piece)
                counts[name][offset] = piece.numel()
    gaps = [name for name in tensors if sum(counts[name].values()) < tensors[name].numel()]
    assert not gaps, f"no rank holds all of {gaps}"
    return tensors, replica_error


@dataclass
class Recorder(Trainer):
    """A trainer that records the gradients of the last update, or of the first one."""

    policy: Policy
    keeps_first: bool = False
    moves: bool = True  # whether updates change the weights
    gradients: dict[str, Tensor] = field(default_factory=dict)
    replica_error: float = 0.0
    norm: float = math.nan  # of the recorded gradients
    megatron_norm: float = math.nan  # see `_norm_of_megatron`
    updates: int = 0  # number of updates that have begun

    def update(self) -> tuple[float, float]:
        """Update like `Trainer.update` and record the gradients. float64 weights, which no
        optimizer supports, use gradient descent."""
        self.updates += 1
        if self.updates == 1 or not self.keeps_first:
            self.gradients, self.replica_error = gather_gradients(self.policy)
            # Only rank 0 has the gradients, so it computes the norm and broadcasts it.
            squares = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
            for gradient in self.gradients.values():
                squares += gradient.double().square().sum()
            dist.broadcast(squares, src=0)
            self.norm = math.sqrt(squares)
            self.megatron_norm = _norm_of_megatron(self.policy)
        if not self.moves:
            return self.norm, 0.0
        if self.policy.config.params_dtype != torch.float64:
            return super().update()
        # Megatron-Core's norm and clipping refuse float64.
        with torch.no_grad():
            for model in self.policy.models:
                for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                    parameter.sub_(parameter.main_grad, alpha=DESCENT)
        return self.norm, 0.0


def _norm_of_megatron(policy: Policy) -> float:
    """The norm of the complete gradients, by the rules of Megatron-Core's optimizers.

    Each rank adds up the squares of its gradients, without those of parameters that are copies of
    another rank's parameters. Then the ranks add up their sums. Attributes of a parameter say
    whether it is a copy (get_main_grads_for_grad_norm in optimizer/optimizer.py), and whether it
    belongs to experts, which have another group of ranks than dense layers. With a wrong attribute,
    this norm and the clipping of gradients would depend on the layout, although the gradients do
    not."""
    parameters = [p for model in policy.models for p in model.parameters() if p.requires_grad]
    unique = [
        p
        for p in parameters
        if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
    ]
    dense = parallel_state.get_model_parallel_group()
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for group, is_dense in ((dense, True), (experts, False)):
        squares = torch.zeros_like(total)
        for parameter in unique:
            if getattr(parameter, "allreduce", True) == is_dense:
                squares += parameter.main_grad.double().square().sum()
        dist.all_reduce(squares, group=group)
        total += squares
    return math.sqrt(total)


def _gradient(shard: Shard) -> Tensor:
    owner: Any = shard.parameter  # Megatron-Core adds the attribute main_grad
    gradient = shard.view(owner.main_grad)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()


def _complete_shards(policy: Policy) -> None:
    """Gather the shards of the gradients on all ranks.

    With the distributed optimizer, a data rank has reduced gradients only in its shard of a
    buffer."""
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
    prompts: Sequence[tuple[int, int]] | None = None,
) -> list[MiniBatch]:
    """Plan the same micro-batches on every layout whose data-parallel size divides
    `cut.replicas`."""
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
        prompts=prompts,
    )
    share = cut.replicas // data_parallel_size  # replicas of one data rank
    mini_batch_plans = []
    for plan in plans:
        ranks = tuple(
            tuple(m for replica in plan.micro_batches[start : start + share] for m in replica)
            for start in range(0, cut.replicas, share)
        )
        mini_batch_plans.append(MiniBatch(ranks, plan.num_sequences, plan.num_response_tokens))
    return mini_batch_plans


def distribute(
    batch: SyntheticBatch, plans: Sequence[MiniBatch], policy: Policy
) -> tuple[Sequences, StepIndex]:
    """Send each sequence to the ranks that train on it. Before this, neighbouring sequences form
    pairs, and the pairs are spread over the data-parallel ranks, as after a rollout."""
    group = data_parallel_group()
    device = torch.device(torch.cuda.current_device())
    mine = [n for n in range(len(batch.tokens)) if n // 2 % group.size() == group.rank()]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0][:0], *(tensors[n] for n in mine)]).to(device)

    numbers = torch.tensor(mine, dtype=torch.long, device=device)
    groups = torch.tensor([group for group, _ in batch.prompts()], device=device)
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
        # In float64, the log-ratios must not be rounded to float32 on the way.
        rollout_logprobs=join(batch.log_ratios).to(
            torch.promote_types(policy.config.params_dtype, torch.float32)
        ),
        truncated=torch.zeros_like(numbers, dtype=torch.bool),
        sample_index=numbers,
        group_index=groups[numbers],
        mask=None if batch.masks is None else join(batch.masks),
        routes=routes,
        in_response=None if in_response is None else join(in_response),
    )
    advantages = torch.tensor(batch.advantages, dtype=torch.float64, device=device)[numbers]
    index = gather_index(rollout, advantages, group)
    cp_size = policy.config.context_parallel_size
    token_advantages = None if batch.token_advantages is None else join(batch.token_advantages)
    sequences = redistribute(
        rollout,
        index,
        plans,
        group,
        context_parallel_size=cp_size,
        token_advantages=token_advantages,
    )
    return sequences, index


def _set_old_logprobs(
    policy: Policy,
    builder: MicroBatchBuilder,
    plans: Sequence[MiniBatch],
    sequences: Sequences,
    index: StepIndex,
) -> None:
    """Replace the log-ratios in `sequences.rollout_logprobs` by log-probs.

    The new values are the policy's log-probs minus the log-ratios. Only the last pipeline stage
    reads them."""
    batches = [m for batch in builder.build_step(plans, sequences, index) for m in batch]
    for micro_batch, (logprobs, _) in zip(batches, response_logprobs(policy, batches)):
        rows = micro_batch.packed.response_index
        log_ratios = sequences.rollout_logprobs[rows]
        sequences.rollout_logprobs[rows] = (logprobs - log_ratios).to(log_ratios)
