"""Computes the work of a training step with the longest possible sequences, and two figures of the
pipeline schedule: micro-batches in flight, and the bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gspo_megatron.batching.plan import largest_equal_share
from gspo_megatron.config import Config, ResolvedParallel, recomputes_old_logprobs
from gspo_megatron.config.model_rules import shares_prompts
from gspo_megatron.config.stages import (
    AnyConfig,
    ExamplesConfig,
    PreferenceConfig,
    PretrainingConfig,
)
from gspo_megatron.objectives.losses import needs_reference


@dataclass(frozen=True)
class DataSizes:
    """What the input files say about the work of a step. The defaults are for files that were not
    read."""

    # tokens of the longest prompt or example; None: as many as are allowed
    longest: int | None = None
    evaluated: int = 0  # responses in the largest evaluation
    # the length of the longest response in an evaluation divided by that of training, at least 1
    stretch: float = 1.0


NOT_READ = DataSizes()


@dataclass(frozen=True)
class Workload:
    """The work of one data-parallel rank in a step."""

    # The numbers of (prompt, response) tokens of each sequence in a full micro-batch.
    lengths: tuple[tuple[int, int], ...]
    micro_batches: int  # number of micro-batches in a mini-batch
    mini_batches: int
    forward_only: int  # number of micro-batches in a step's additional forward passes
    sequences: int  # number of sequences in a step, on all ranks
    of_rank: int = 0  # number of this rank's sequences in a mini-batch
    rollout_rows: int = 0  # sequences of a step that a rank decodes together
    rollout_rounds: int = 0  # how often in a step a rank decodes `rollout_rows` sequences
    evaluation_rows: int = 0  # sequences of an evaluation that a rank decodes together
    rollout_responses: int = 0  # responses of a rank in a step, or in an evaluation
    # Tokens of the prompts in a forward pass of a rollout, at most.
    prefill_tokens: int = 0
    # The tokens that the layers compute, as a share of the tokens of a micro-batch. It is below 1
    # if a prompt is computed once for several responses.
    computed: float = 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return sum(self.lengths[0])

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch over all its context-parallel ranks."""
        return sum(map(sum, self.lengths))

    @property
    def micro_batches_per_step(self) -> int:
        return self.micro_batches * self.mini_batches

    @property
    def filled(self) -> float:
        """The tokens of a rank's sequences, as a share of the tokens of its micro-batches. The
        estimate of memory assumes full micro-batches, in which shorter sequences fill the room
        beside the longest ones. A step may have fewer tokens."""
        return min(1.0, self.of_rank * self.longest / (self.tokens * self.micro_batches))


def workload(
    config: AnyConfig, parallel: ResolvedParallel, sizes: DataSizes = NOT_READ
) -> Workload:
    """Return the work of a step. Pre-training ignores the sizes, because all samples have the same
    length."""
    training, replicas = config.training, parallel.data_parallel_size
    budget = training.micro_batch_tokens * parallel.context_parallel_size
    # In an interleaved schedule, `multiple` must divide the number of micro-batches.
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    multiple = parallel.pipeline_model_parallel_size if interleaved else 1
    if isinstance(config, PretrainingConfig):
        sequences = config.training.batch_size
        length, of_rank = config.sequence_length(), sequences // replicas
        size = largest_equal_share(of_rank, budget // length, multiple)
        return Workload(((0, length),) * size, of_rank // size, 1, 0, sequences, of_rank)
    if isinstance(config, ExamplesConfig):
        # The loss includes all tokens of an example except the first.
        sequence = (1, (sizes.longest or config.max_tokens()) - 1)
        sequences, mini_batches = config.training.batch_size, 1
        if _has_pairs(config):
            sequences *= 2  # a chosen and a rejected response
    else:
        rollout, mini_batches = config.rollout, config.objective.mini_batches
        sequence = (sizes.longest or config.max_prompt_tokens(), rollout.max_response_tokens)
        sequences = rollout.prompts_per_step * rollout.group_size
    # a preference is not cut: the budget holds at least one
    whole = max(2 if _has_pairs(config) else 1, budget // sum(sequence))
    lengths, rest = (sequence,) * whole, budget - whole * sum(sequence)
    if rest >= 2 and config.training.packing:
        # A shorter sequence fills the rest of the budget.
        learned = min(sequence[1], rest - 1)
        lengths += ((rest - learned, learned),)
    of_rank = -(-sequences // (mini_batches * replicas))
    needed = -(-of_rank // lengths.count(sequence))
    micro_batches = -(-needed // multiple) * multiple
    work = Workload(lengths, micro_batches, mini_batches, 0, sequences, of_rank)
    if not isinstance(config, Config):
        return work
    if shares_prompts(config):
        responses = min(lengths.count(sequence), of_rank)  # in a micro-batch
        repeats = responses - -(-responses // rollout.group_size)  # prompts that are not computed
        work = replace(work, computed=1 - repeats * sequence[0] / (responses * sum(sequence)))
    work = replace(work, forward_only=_forward_only(config, work))
    if rollout.engine == "vllm":  # the ranks generate only the short responses of the weight check
        return work
    return _with_rollout(config, work, replicas * parallel.context_parallel_size, sizes)


def _forward_only(config: Config, work: Workload) -> int:
    """Return the number of micro-batches in the passes of a step that have no backward pass: those
    of the old policy, of the reference policy and of the teachers."""
    objective, routing = config.objective, config.routing
    whole, count = work.micro_batches_per_step, 0
    if recomputes_old_logprobs(config) or "r2" in routing.modes or routing.volatility:
        # The first mini-batch gets its old log-probs from its training pass, unless another pass
        # needs them or the routes earlier (PolicyUpdater.compute_old_logprobs).
        is_early = objective.kl != "none" and objective.kl_in == "reward"
        is_early |= routing.reference_replay == "r2"
        count = whole if is_early else whole - work.micro_batches
    return count + whole * (needs_reference(objective) + len(objective.distillation.folders))


def _with_rollout(config: Config, work: Workload, ranks: int, sizes: DataSizes) -> Workload:
    """Return `work` with the rollout of a step and the largest evaluation, both by the trained
    model itself. ranks: the number of ranks with prompts of their own."""
    rollout, has_episodes = config.rollout, config.environment.has_episodes
    responses = -(-rollout.prompts_per_step // ranks) * rollout.group_size
    rows = min(responses, rollout.batch_size or responses)
    # A pass takes as many prompts as fit into the budget (MegatronEngine.prefill_tokens), and each
    # turn of an episode takes the conversation so far.
    longest_prompt = work.longest if has_episodes else work.lengths[0][0]
    prompts = rows if has_episodes else -(-rows // rollout.group_size)
    count, longer = -(-sizes.evaluated // ranks), sizes.stretch
    return replace(
        work,
        rollout_rows=rows,
        # longer responses count as more rows
        evaluation_rows=math.ceil(min(count, rollout.batch_size or count) * longer),
        rollout_rounds=-(-responses // rows),
        rollout_responses=max(responses, math.ceil(count * longer)),
        prefill_tokens=min(
            max(prompts, count) * longest_prompt,
            max(config.training.micro_batch_tokens, longest_prompt),
        ),
    )


def _has_pairs(config: AnyConfig) -> bool:
    return isinstance(config, PreferenceConfig) and config.preference.loss == "bradley_terry"


def in_flight(stages: int, stage: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """Return, for each chunk, the largest number of micro-batches whose activations a stage holds.

    This follows Megatron-Core's schedules. Without interleaving (1F1B), a stage starts with
    `stages - stage - 1` forward passes, then alternates forward and backward passes, so it holds
    `stages - stage` micro-batches. With interleaving, it starts with two forward passes for each
    later stage, and `stages` forward passes for each chunk except the last. A group of `stages`
    micro-batches goes through one chunk, then through the next chunk.
    """
    total = micro_batches * chunks
    ahead = stages - stage - 1
    warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
    counts = [0] * chunks
    for number in range(min(warm_up + 1, total)):
        counts[number // stages % chunks if chunks > 1 else 0] += 1
    return tuple(counts)


def bubble_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the idle share of a mini-batch's time: `stages - 1` passes of a chunk are idle."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)
