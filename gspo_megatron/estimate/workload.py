"""A training step at its largest: all sequences as long as they may be."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.batching.plan import largest_equal_share
from gspo_megatron.config import Config, ResolvedParallel
from gspo_megatron.config.stages import AnyConfig, FineTuningConfig, PretrainingConfig


@dataclass(frozen=True)
class Workload:
    """What one data-parallel rank has to do in a step."""

    # (prompt, response) tokens of a full micro-batch: those that are given, those that are learned
    lengths: tuple[tuple[int, int], ...]
    micro_batches: int  # of a mini-batch
    mini_batches: int
    forward_only: int  # micro-batches of the step that are passed forward once more
    sequences: int  # of the step, on all ranks
    rollout_rows: int = 0  # sequences that a rank decodes together
    rollout_prompts: int = 0  # prompts among them, each of which a whole group answers

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return sum(self.lengths[0])

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on all its context-parallel ranks together."""
        return sum(map(sum, self.lengths))

    @property
    def micro_batches_per_step(self) -> int:
        return self.micro_batches * self.mini_batches


def workload(config: AnyConfig, parallel: ResolvedParallel, longest: int | None = None) -> Workload:
    """longest: tokens of the longest prompt, or example, that there is; None: as long as allowed.
    Pre-training has samples of one length."""
    if isinstance(config, PretrainingConfig):
        return _pretraining(config, parallel)
    if isinstance(config, FineTuningConfig):
        return _fine_tuning(config, parallel, longest)
    return _reinforcement(config, parallel, longest)


def _reinforcement(config: Config, parallel: ResolvedParallel, longest: int | None) -> Workload:
    rollout, objective = config.rollout, config.objective
    sequence = (longest or config.max_prompt_tokens(), rollout.max_response_tokens)
    lengths = _filled(sequence, _budget(config, parallel), packing=config.training.packing)
    sequences = rollout.prompts_per_step * rollout.group_size
    of_rank = -(-sequences // (objective.mini_batches * parallel.data_parallel_size))
    micro_batches = _micro_batches(of_rank, lengths.count(sequence), parallel)
    training = micro_batches * objective.mini_batches
    forward = 0
    if objective.old_logprobs == "recompute":
        forward += training - micro_batches  # the first mini-batch's come with its own pass
    if objective.kl != "none":
        forward += training
    ranks = parallel.data_parallel_size * parallel.context_parallel_size
    prompts = -(-rollout.prompts_per_step // ranks)
    if rollout.batch_size:
        prompts = min(prompts, max(1, rollout.batch_size // rollout.group_size))
    return Workload(
        lengths=lengths,
        micro_batches=micro_batches,
        mini_batches=objective.mini_batches,
        forward_only=forward,
        sequences=sequences,
        rollout_rows=prompts * rollout.group_size,
        rollout_prompts=prompts,
    )


def _fine_tuning(
    config: FineTuningConfig, parallel: ResolvedParallel, longest: int | None
) -> Workload:
    """Of every example all that can be learned is: all tokens but the first."""
    training = config.training
    example = (1, (longest or config.max_tokens()) - 1)
    lengths = _filled(example, _budget(config, parallel), packing=training.packing)
    of_rank = -(-training.batch_size // parallel.data_parallel_size)
    return Workload(
        lengths=lengths,
        micro_batches=_micro_batches(of_rank, lengths.count(example), parallel),
        mini_batches=1,
        forward_only=0,
        sequences=training.batch_size,
    )


def _pretraining(config: PretrainingConfig, parallel: ResolvedParallel) -> Workload:
    """Samples of one length, in which every token is followed by one to learn."""
    own = config.training.batch_size // parallel.data_parallel_size
    length = config.sequence_length()
    size = largest_equal_share(own, _budget(config, parallel) // length, _multiple(parallel))
    return Workload(
        lengths=((0, length),) * size,
        micro_batches=own // size,
        mini_batches=1,
        forward_only=0,
        sequences=config.training.batch_size,
    )


def _budget(config: AnyConfig, parallel: ResolvedParallel) -> int:
    """Tokens of a micro-batch."""
    return config.training.micro_batch_tokens * parallel.context_parallel_size


def _filled(
    sequence: tuple[int, int], budget: int, *, packing: bool
) -> tuple[tuple[int, int], ...]:
    """A micro-batch of such sequences, one at least."""
    whole = max(1, budget // sum(sequence))
    lengths = [sequence] * whole
    rest = budget - whole * sum(sequence)
    if rest >= 2 and packing:
        # nothing says that sequences are long: shorter ones fill the budget up
        learned = min(sequence[1], rest - 1)
        lengths.append((rest - learned, learned))
    return tuple(lengths)


def _multiple(parallel: ResolvedParallel) -> int:
    """What an interleaved schedule wants the number of micro-batches to be a multiple of."""
    if parallel.virtual_pipeline_model_parallel_size is None:
        return 1
    return parallel.pipeline_model_parallel_size


def _micro_batches(sequences: int, whole: int, parallel: ResolvedParallel) -> int:
    """Of so many sequences, `whole` in each."""
    multiple = _multiple(parallel)
    needed = -(-sequences // whole)
    return -(-needed // multiple) * multiple
