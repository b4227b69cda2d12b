"""Group Relative Policy Optimization, in the form of its paper (arXiv 2402.03300), without KL."""

from __future__ import annotations

from gspo_megatron.objectives.aggregation import sequence_mean_of_token_mean
from gspo_megatron.objectives.checks import check_inputs
from gspo_megatron.objectives.metrics import policy_metrics, ratio_values, token_clip_metrics
from gspo_megatron.objectives.ratios import (
    exponentiate,
    sequence_log_ratio,
    token_advantages,
    token_log_ratio,
)
from gspo_megatron.objectives.registry import register
from gspo_megatron.objectives.rules import min_clip
from gspo_megatron.types import LossInputs, LossOutputs


@register("grpo", ratio_level="token", clip_low=0.2, clip_high=0.27)
def grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """mean_i mean_t min(w_it A_it, clip(w_it) A_it) with w_it = pi(y_t) / pi_old(y_t).

    The clip range is that of the GRPO baseline in the GSPO paper.
    """
    check_inputs(inputs, token_advantages=True)
    log_ratio = token_log_ratio(inputs)
    clipped = min_clip(exponentiate(log_ratio), token_advantages(inputs), clip_low, clip_high)
    loss, mean = sequence_mean_of_token_mean(clipped.surrogate, inputs)
    return LossOutputs(
        loss=loss,
        means={
            "loss": mean,
            **token_clip_metrics(clipped, inputs),
            **policy_metrics(inputs, log_ratio),
        },
        values=ratio_values(inputs, log_ratio, sequence_log_ratio(inputs, log_ratio.detach())),
    )
