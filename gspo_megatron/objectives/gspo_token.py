"""GSPO with an advantage for each token (arXiv 2507.18071, eqs. 13-14)."""

from __future__ import annotations

from gspo_megatron.objectives.aggregation import sequence_mean_of_token_mean
from gspo_megatron.objectives.checks import check_inputs
from gspo_megatron.objectives.metrics import policy_metrics, ratio_values, token_clip_metrics
from gspo_megatron.objectives.ratios import (
    exponentiate,
    sequence_log_ratio,
    sequence_token_log_ratio,
    token_advantages,
    token_log_ratio,
)
from gspo_megatron.objectives.registry import register
from gspo_megatron.objectives.rules import min_clip
from gspo_megatron.types import LossInputs, LossOutputs


@register("gspo_token", ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
def gspo_token(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """mean_i mean_t min(s_it A_it, clip(s_it) A_it) with s_it = sg[s_i] pi(y_t) / sg[pi(y_t)].

    The ratio of every token has the value of the sequence's and the gradient of its own. Where all
    tokens of a sequence have its advantage this is GSPO in value, clip condition and gradient.
    """
    check_inputs(inputs, token_advantages=True)
    log_ratio = token_log_ratio(inputs)
    mean_log_ratio = sequence_log_ratio(inputs, log_ratio)
    ratio = exponentiate(sequence_token_log_ratio(inputs, log_ratio, mean_log_ratio))
    clipped = min_clip(ratio, token_advantages(inputs), clip_low, clip_high)
    loss, mean = sequence_mean_of_token_mean(clipped.surrogate, inputs)
    return LossOutputs(
        loss=loss,
        means={
            "loss": mean,
            **token_clip_metrics(clipped, inputs),
            **policy_metrics(inputs, log_ratio),
        },
        values=ratio_values(inputs, log_ratio, mean_log_ratio),
    )
