"""One policy update on a fixed batch, whatever the layout, with its whole gradient on rank 0.

The loss and the gradient of a step do not depend on how the model and the batch are sharded. The
`verify` command and the tests run this on several layouts and compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.batching.plan import MiniBatch, data_ranks, plan_step
from gspo_megatron.batching.redistribute import Sequences, StepIndex, gather_index, redistribute
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer
from gspo_megatron.models.shards import Shard, parameter_shards
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import set_up_model_parallel, tear_down_model_parallel
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify.synthetic import SyntheticBatch

_PAD_ID = 0
DESCENT = 0.05  # learning rate between the mini-batches of an update in float64


@dataclass(frozen=True)
class Cut:
    """How the batch is cut into micro-batches, apart from the layout.

    The routers' auxiliary losses are means over micro-batches and not linear in their tokens: only
    equal micro-batches have equal gradients. `replicas` is a multiple of each compared layout's
    data-parallel size; a data rank trains on the micro-batches of several of them.
    """

    replicas: int = 1
    token_budget: int = 4096
    multiple: int = 1  # of micro-batches per replica: pp for interleaved schedules


@dataclass
class StepResult:
    """What a policy update computed. The gradients are on rank 0 only."""

    metrics: dict[str, float]  # with loss and grad_norm
    gradients: dict[str, Tensor] = field(default_factory=dict)  # whole parameters, on the cpu
    replica_error: float = 0.0  # largest relative difference between copies of a gradient
    loss_scale: float = 0.0  # size of the terms that a loss near 0 is a sum of
    lost_in: int | None = None  # the mini-batch, from 1, whose gradient norm ended the step


def run_update(
    config: Config,
    vocab_size: int,
    batch: SyntheticBatch,
    cut: Cut | None = None,
    mini_batches: int = 1,
) -> StepResult:
    """Build the policy on the running processes and update it on `batch`, by the code of a training
    step from the exchange of sequences on. All ranks call it; the configuration has passed
    `check_config`. The groups it builds are gone when it returns.

    The metrics are the step's, the gradients those of the last mini-batch.
    """
    cut = cut or Cut(token_budget=config.training.micro_batch_tokens)
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, vocab_size)
    rate = config.optimizer.learning_rate
    trainer = build_trainer(policy, config.optimizer, Schedule(rate, rate, 0, 1, "constant"))
    recorder = Recorder(trainer.optimizer, trainer.scheduler, policy)
    padded = not config.training.packing
    builder = MicroBatchBuilder(policy, _PAD_ID, config.rollout.temperature, padded=padded)
    lengths = [len(tokens) for tokens in batch.tokens]
    size = parallel.data_parallel_size
    plans = plan_alike(lengths, batch.response_lengths, cut, mini_batches, size, padded=padded)
    sequences, index = _receive(batch, plans, policy)
    _set_old_logprobs(policy, builder, plans, sequences, index)
    section = config.objective
    if resolve_objective(section).correction == "none":  # else its ratios are those to the rollout
        section = section.model_copy(update={"old_logprobs": "rollout"})
    objective = build_objective(section, config.rollout.max_response_tokens)
    if section.kl_in == "reward":  # the batch's advantages stand in the place of its rewards
        objective = replace(objective, advantages=lambda values, _: values.float())
    updater = PolicyUpdater(policy, recorder, builder, objective, section, config.routing)
    advantages = index.rewards.float().to(updater.device)
    metrics = update_policy(updater, sequences, index, plans, advantages)
    tear_down_model_parallel()
    return StepResult(metrics, recorder.gradients, recorder.replica_error)


def compare(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], *, not_finite: bool = False
) -> list[tuple[str, float]]:
    """Relative error ||other - reference|| / ||reference|| of every gradient, largest first; with
    `not_finite` see relative_error."""
    assert reference.keys() == other.keys(), reference.keys() ^ other.keys()
    errors = [
        (name, relative_error(other[name], value, not_finite=not_finite))
        for name, value in reference.items()
    ]
    return sorted(errors, key=lambda pair: -pair[1])


def relative_error(value: Tensor, reference: Tensor, *, not_finite: bool = False) -> float:
    """||value - reference|| / ||reference||; infinite where a gradient ought to vanish, or is not
    a number.

    With `not_finite`, for what a run diverged into, elements that are NaN, or the same infinity, on
    both sides are equal, and the norms are those of the others.
    """
    value, reference = value.double(), reference.double()
    if not_finite:
        finite = value.isfinite() & reference.isfinite()
        if not bool((finite | _same(value, reference)).all()):
            return math.inf
        value, reference = value[finite], reference[finite]
    difference, size = float((value - reference).norm()), float(reference.norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf


def where_not_finite(value: Tensor, reference: Tensor) -> str | None:
    """Where one of two tensors has an element that is not finite and the other has not the same:
    how many there are, and the first. None where there are none."""
    value, reference = value.double(), reference.double()
    both_finite = value.isfinite() & reference.isfinite()
    places = (~(both_finite | _same(value, reference))).nonzero()
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    there = f"{float(value[place]):g} for {float(reference[place]):g}"
    if not place:
        return there
    return f"{len(places):,} of {value.numel():,} elements, the first at {list(place)}: {there}"


def _same(value: Tensor, reference: Tensor) -> Tensor:
    """[...] of bool: equal, or neither a number."""
    return (value == reference) | (value.isnan() & reference.isnan())


def gather_gradients(policy: Policy) -> tuple[dict[str, Tensor], float]:
    """All gradients, reduced already, as whole tensors on rank 0 (nothing elsewhere), vocabulary
    padding cut off; and the largest relative difference between two ranks' copies of one."""
    _complete_shards(policy)
    mine = [shard for model in policy.models for shard in parameter_shards(model)]
    listed = [(s.name, s.global_shape, s.offset, tuple(s.data.shape)) for s in mine]
    rank = dist.get_rank()
    catalogue: list = [None] * dist.get_world_size()
    dist.gather_object(listed, catalogue if rank == 0 else None, dst=0)
    if rank != 0:
        for shard in mine:
            dist.send(_gradient(shard), dst=0)
        return {}, 0.0
    assembly = _Assembly(policy.vocab_size)
    for source, pieces in enumerate(catalogue):
        for number, (name, shape, offset, size) in enumerate(pieces):
            if source == 0:
                piece = _gradient(mine[number])
            else:
                piece = _gradient(mine[0]).new_empty(size)
                dist.recv(piece, src=source)
            assembly.add(name, shape, offset, piece.cpu())
    assembly.check_complete()
    return assembly.tensors, assembly.replica_error


@dataclass
class Recorder(Trainer):
    """Keeps the gradients that the optimizer is about to apply."""

    policy: Policy
    gradients: dict[str, Tensor] = field(default_factory=dict)
    replica_error: float = 0.0

    def update(self) -> tuple[float, float]:
        """See Trainer.update; float64 weights, which no optimizer takes, go down the gradient."""
        self.gradients, self.replica_error = gather_gradients(self.policy)
        if self.policy.config.params_dtype != torch.float64:
            return super().update()
        # Megatron-Core's norm and clipping refuse float64
        norm = self.norm()
        self._descend()
        return norm, 0.0

    def norm(self) -> float:
        """Of the gradients, from what rank 0 has gathered."""
        norm = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for gradient in self.gradients.values():
            norm += gradient.double().square().sum()
        dist.broadcast(norm, src=0)
        return math.sqrt(norm)

    @torch.no_grad()
    def _descend(self) -> None:
        """One step along the gradient, for the mini-batches that follow."""
        for model in self.policy.models:
            for parameter in model.parameters():
                parameter.sub_(parameter.main_grad, alpha=DESCENT)


class _Assembly:
    """Whole tensors from shards; what arrives twice is compared."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tensors: dict[str, Tensor] = {}
        self.replica_error = 0.0
        self._seen: dict[str, set[tuple[int, ...]]] = {}
        self._missing: dict[str, int] = {}  # elements

    def add(
        self, name: str, global_shape: Sequence[int], offset: Sequence[int], piece: Tensor
    ) -> None:
        shape = list(global_shape)
        if "word_embeddings" in name or "output_layer" in name:
            shape[0] = self.vocab_size  # the padding depends on TP
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(shape, dtype=piece.dtype)
            self._seen[name], self._missing[name] = set(), self.tensors[name].numel()
        slices = tuple(slice(start, start + n) for start, n in zip(offset, piece.shape))
        place = self.tensors[name][slices]
        piece = piece[tuple(slice(n) for n in place.shape)]
        if tuple(offset) in self._seen[name]:
            error = relative_error(piece, place, not_finite=True)  # of what is diverged the same
            self.replica_error = max(self.replica_error, error)
            return
        place.copy_(piece)
        self._seen[name].add(tuple(offset))
        self._missing[name] -= piece.numel()

    def check_complete(self) -> None:
        gaps = [name for name, missing in self._missing.items() if missing]
        assert not gaps, f"no rank holds all of {gaps}"


def _gradient(shard: Shard) -> Tensor:
    gradient = shard.view(shard.parameter.main_grad)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()


def _complete_shards(policy: Policy) -> None:
    """Under the distributed optimizer a data rank holds the sum of its own share of a gradient
    buffer only: fetch the others' shares."""
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
    lengths: Sequence[int],
    response_lengths: Sequence[int],
    cut: Cut,
    mini_batches: int,
    data_parallel_size: int,
    *,
    padded: bool,
) -> list[MiniBatch]:
    """The same micro-batches for each layout whose data-parallel size divides `cut.replicas`."""
    assert cut.replicas % data_parallel_size == 0
    plans = plan_step(
        lengths,
        response_lengths,
        mini_batches=mini_batches,
        data_parallel_size=cut.replicas,
        token_budget=cut.token_budget,
        micro_batch_multiple=cut.multiple,
        padded=padded,
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


def _receive(
    batch: SyntheticBatch, plans: Sequence[MiniBatch], policy: Policy
) -> tuple[Sequences, StepIndex]:
    """Pairs of sequences start on the data ranks in turn, as if sampled there."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device = torch.device(torch.cuda.current_device())
    mine = [n for n in range(len(batch.tokens)) if n // 2 % group.size() == group.rank()]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0][:0], *(tensors[n] for n in mine)]).to(device)

    numbers = torch.tensor(mine, dtype=torch.long, device=device)
    lengths = torch.tensor([len(t) for t in batch.tokens], device=device)[numbers]
    responses = torch.tensor(batch.response_lengths, device=device)[numbers]
    rollout = RolloutBatch(
        tokens=join(batch.tokens),
        prompt_lengths=lengths - responses,
        response_lengths=responses,
        # in float64 the anchor of the ratios must not be rounded to float32 on its way
        logprobs=join(batch.log_ratios).to(
            torch.promote_types(policy.config.params_dtype, torch.float32)
        ),
        truncated=torch.zeros_like(numbers, dtype=torch.bool),
        sample_index=numbers,
        group_index=numbers // 2,
        routes=_local_routes(batch, mine, policy),
    )
    advantages = torch.tensor(batch.advantages, dtype=torch.float64, device=device)[numbers]
    index = gather_index(rollout, advantages, group)
    cp_size = policy.config.context_parallel_size
    owners = data_ranks(plans, len(index.lengths))
    return redistribute(rollout, index, owners, group, context_parallel_size=cp_size), index


def _local_routes(batch: SyntheticBatch, mine: Sequence[int], policy: Policy) -> Tensor | None:
    """[tokens of `mine`, layers of this rank, k], as a rollout on this rank would give them."""
    if batch.routes is None:
        return None
    layers = [number - 1 for number in attach_hooks(policy.models)]
    pieces = [batch.routes[0][:0], *(batch.routes[n] for n in mine)]
    return torch.cat(pieces)[:, layers].to(torch.cuda.current_device())


def _set_old_logprobs(
    policy: Policy,
    builder: MicroBatchBuilder,
    plans: Sequence[MiniBatch],
    sequences: Sequences,
    index: StepIndex,
) -> None:
    """Turn the wanted log-ratios, which came as the rollout's log-probs, into those log-probs: the
    policy's own minus the log-ratio. Only the last pipeline stage reads them."""
    batches = [m for batch in builder.build_step(plans, sequences, index) for m in batch]
    for micro_batch, (logprobs, _) in zip(batches, response_logprobs(policy, batches)):
        rows = micro_batch.packed.response_index
        wanted = sequences.rollout_logprobs[rows]  # log-ratios
        sequences.rollout_logprobs[rows] = (logprobs - wanted).to(wanted)
