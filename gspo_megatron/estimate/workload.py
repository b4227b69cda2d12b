"""A training step at its largest: all prompts and all responses as long as they may be."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.config import Config, ResolvedParallel


@dataclass(frozen=True)
class Workload:
    """What one data-parallel rank has to do in a step."""

    lengths: tuple[tuple[int, int], ...]  # (prompt, response) tokens of a full micro-batch
    micro_batches: int  # of a mini-batch
    mini_batches: int
    sequences: int  # of the step, on all ranks
    rollout_rows: int  # sequences that a rank decodes together
    rollout_prompts: int  # prompts among them, each of which a whole group answers

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


def workload(
    config: Config, parallel: ResolvedParallel, longest_prompt: int | None = None
) -> Workload:
    """longest_prompt: tokens of the longest one that there is; None: as long as allowed."""
    rollout, objective = config.rollout, config.objective
    prompt = longest_prompt or config.max_prompt_tokens()
    response = rollout.max_response_tokens
    budget = config.training.micro_batch_tokens * parallel.context_parallel_size
    whole = max(1, budget // (prompt + response))
    lengths = [(prompt, response)] * whole
    rest = budget - whole * (prompt + response)
    if rest >= 2 and config.training.packing:
        # nothing says that sequences are long: shorter ones fill the budget up
        lengths.append((rest - min(response, rest - 1), min(response, rest - 1)))
    dp, cp = parallel.data_parallel_size, parallel.context_parallel_size
    sequences = rollout.prompts_per_step * rollout.group_size
    of_rank = -(-sequences // (objective.mini_batches * dp))
    micro_batches = -(-of_rank // whole)
    if parallel.virtual_pipeline_model_parallel_size:
        stages = parallel.pipeline_model_parallel_size
        micro_batches = -(-micro_batches // stages) * stages
    prompts = -(-rollout.prompts_per_step // (dp * cp))
    if rollout.batch_size:
        prompts = min(prompts, max(1, rollout.batch_size // rollout.group_size))
    return Workload(
        lengths=tuple(lengths),
        micro_batches=micro_batches,
        mini_batches=objective.mini_batches,
        sequences=sequences,
        rollout_rows=prompts * rollout.group_size,
        rollout_prompts=prompts,
    )
