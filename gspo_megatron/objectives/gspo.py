"""Group Sequence Policy Optimization (arXiv 2507.18071, eqs. 5-7)."""

from __future__ import annotations

from gspo_megatron.objectives.aggregation import sequence_mean
from gspo_megatron.objectives.checks import check_inputs
from gspo_megatron.objectives.metrics import policy_metrics, ratio_values, sequence_clip_metrics
from gspo_megatron.objectives.ratios import exponentiate, sequence_log_ratio, token_log_ratio
from gspo_megatron.objectives.registry import register
from gspo_megatron.objectives.rules import min_clip
from gspo_megatron.types import LossInputs, LossOutputs


@register("gspo", ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """mean_i min(s_i A_i, clip(s_i) A_i) with s_i the geometric mean of the token ratios.

    Every token of a sequence has the same weight, and a sequence the same whatever its length.
    `loss` has the same value on all shards of the sequences and each shard's own gradient.
    """
    check_inputs(inputs, token_advantages=False)
    log_ratio = token_log_ratio(inputs)
    mean_log_ratio = sequence_log_ratio(inputs, log_ratio)
    clipped = min_clip(exponentiate(mean_log_ratio), inputs.advantages, clip_low, clip_high)
    loss, mean = sequence_mean(clipped.surrogate, inputs)
    return LossOutputs(
        loss=loss,
        means={
            "loss": mean,
            **sequence_clip_metrics(clipped, inputs),
            **policy_metrics(inputs, log_ratio),
        },
        values=ratio_values(inputs, log_ratio, mean_log_ratio),
    )
