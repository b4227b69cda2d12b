"""Importance ratios between the current and the old policy, by token and by sequence.

Everything is kept as a logarithm until the last moment, and positions outside the mask are set to
a log-ratio of 0 first: whatever stands there, NaN included, reaches neither values nor gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_megatron.objectives.segments import shared_segment_sum
from gspo_megatron.types import LossInputs

# exp() of this is finite in float32 with room for sums and squares. A larger log-ratio is a policy
# beyond repair; one infinite token must not turn the gradient of the whole batch into NaN.
MAX_LOG_RATIO = 40.0


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """log pi(y_t) - log pi_old(y_t), [tokens]; 0 outside the mask."""
    difference = inputs.logprobs - inputs.old_logprobs
    return difference.where(inputs.mask > 0, 0.0)


def sequence_sums(inputs: LossInputs, *values: Tensor) -> Tensor:
    """Sums over whole sequences of `values` [tokens] each, [len(values), num_sequences].

    The same on every shard of a sequence, with the gradient of the local tokens. One collective,
    whatever the number of values.
    """
    return shared_segment_sum(
        torch.stack(values), inputs.sequence_index, len(inputs.advantages), inputs.sum_over_shards
    )


def sequence_log_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Mean of `log_ratio` [tokens] over whole sequences, [num_sequences] (GSPO paper, eq. 7); 0 for
    a sequence without masked tokens. See `sequence_sums`."""
    return sequence_sums(inputs, log_ratio)[0] / inputs.sequence_lengths.clamp_min(1)


def sequence_token_log_ratio(
    inputs: LossInputs, log_ratio: Tensor, sequence_log_ratio: Tensor
) -> Tensor:
    """Log of s_it = sg[s_i] pi(y_t) / sg[pi(y_t)], [tokens] (GSPO paper, eq. 14).

    Its value is that of the whole sequence, its gradient that of the token alone.
    """
    detached = sequence_log_ratio.detach()[inputs.sequence_index]
    return detached + (log_ratio - log_ratio.detach())


def exponentiate(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, limited so that it stays finite."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def token_advantages(inputs: LossInputs) -> Tensor:
    """Advantage of each token, [tokens]: its own if given, else that of its sequence."""
    if inputs.token_advantages is not None:
        return inputs.token_advantages
    return inputs.advantages[inputs.sequence_index]
