"""The work of a training step with the longest possible sequences, and the pipeline schedule as
counts: micro-batches in flight, and the bubble."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gspo_megatron.batching.plan import largest_equal_share
from gspo_megatron.config import Config, ResolvedParallel, recomputes_old_logprobs
from gspo_megatron.config.stages import AnyConfig, FineTuningConfig, PretrainingConfig


@dataclass(frozen=True)
class Workload:
    """The work of one data-parallel rank in a step."""

    # (prompt, response) tokens of each sequence in a full micro-batch
    lengths: tuple[tuple[int, int], ...]
    micro_batches: int  # of a mini-batch
    mini_batches: int
    forward_only: int  # extra forward passes of a step, in micro-batches
    sequences: int  # of the step, on all ranks
    rollout_rows: int = 0  # sequences that a rank decodes together
    rollout_prompts: int = 0  # prompts of these sequences: one per group

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return sum(self.lengths[0])

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch, on all its context-parallel ranks together."""
        return sum(map(sum, self.lengths))

    @property
    def micro_batches_per_step(self) -> int:
        return self.micro_batches * self.mini_batches


def workload(config: AnyConfig, parallel: ResolvedParallel, longest: int | None = None) -> Workload:
    """longest: tokens of the longest prompt or example in the data; None: the most allowed.
    Pre-training has samples of one length."""
    training, replicas = config.training, parallel.data_parallel_size
    budget = training.micro_batch_tokens * parallel.context_parallel_size
    # an interleaved schedule needs a multiple of this number of micro-batches
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    multiple = parallel.pipeline_model_parallel_size if interleaved else 1
    if isinstance(config, PretrainingConfig):
        sequences = config.training.batch_size
        length, of_rank = config.sequence_length(), sequences // replicas
        size = largest_equal_share(of_rank, budget // length, multiple)
        return Workload(((0, length),) * size, of_rank // size, 1, 0, sequences)
    if isinstance(config, FineTuningConfig):
        # all tokens of an example are learned, except the first
        sequence = (1, (longest or config.max_tokens()) - 1)
        sequences, mini_batches = config.training.batch_size, 1
    else:
        rollout, mini_batches = config.rollout, config.objective.mini_batches
        sequence = (longest or config.max_prompt_tokens(), rollout.max_response_tokens)
        sequences = rollout.prompts_per_step * rollout.group_size
    whole = max(1, budget // sum(sequence))
    lengths, rest = (sequence,) * whole, budget - whole * sum(sequence)
    if rest >= 2 and config.training.packing:
        # a shorter sequence fills the budget
        learned = min(sequence[1], rest - 1)
        lengths += ((rest - learned, learned),)
    of_rank = -(-sequences // (mini_batches * replicas))
    needed = -(-of_rank // lengths.count(sequence))
    micro_batches = -(-needed // multiple) * multiple
    work = Workload(lengths, micro_batches, mini_batches, 0, sequences)
    if not isinstance(config, Config):
        return work
    objective = config.objective
    forward = 0
    if recomputes_old_logprobs(config):
        # the first mini-batch's come with its own pass
        forward += work.micro_batches_per_step - work.micro_batches
    if objective.kl != "none":
        forward += work.micro_batches_per_step
    if rollout.engine == "vllm":  # the ranks draw nothing but a short probe
        return replace(work, forward_only=forward)
    ranks = replicas * parallel.context_parallel_size
    rows = -(-rollout.prompts_per_step // ranks) * rollout.group_size
    rows = min(rows, rollout.batch_size or rows)
    prompts = -(-rows // rollout.group_size)
    return replace(work, forward_only=forward, rollout_rows=rows, rollout_prompts=prompts)


def in_flight(stages: int, stage: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches whose activations a stage holds at once, for each of its chunks, in
    Megatron-Core's schedules.

    Without interleaving (1F1B) a stage starts `stages - stage - 1` forward passes before the first
    backward pass, and then holds one more. With interleaving it starts two per stage after it, and
    `stages` per chunk except the last; `stages` micro-batches go through one chunk, then through
    the next.
    """
    total = micro_batches * chunks
    ahead = stages - stage - 1
    warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages
    held = [0] * chunks
    for number in range(min(warm_up + 1, total)):
        held[number // stages % chunks if chunks > 1 else 0] += 1
    return tuple(held)


def bubble_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Idle share of a mini-batch's time: (stages - 1) passes of a chunk at its ends."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)
