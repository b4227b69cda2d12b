"""A custom loss, advantage and reward; custom_objective.yaml names them."""

from torch import Tensor

from gspo_megatron.objectives import (
    aggregate_sequences,
    exponentiate,
    group_mean,
    policy_metrics,
    ratio_values,
    sequence_log_ratio,
    token_log_ratio,
)
from gspo_megatron.types import LossInputs, LossOutputs, Sample


def quadratic_penalty(inputs: LossInputs, epsilon: float) -> LossOutputs:
    """A loss with GSPO's ratio and a quadratic penalty instead of a clip (arXiv 2401.16025)."""
    log_ratio = token_log_ratio(inputs)
    means = sequence_log_ratio(inputs, log_ratio)
    ratio, advantages = exponentiate(means), inputs.advantages
    penalty = advantages.abs() * (ratio - 1).square() / (2 * epsilon)
    loss, mean = aggregate_sequences(ratio * advantages - penalty, inputs, "sequence_mean")
    metrics = {"loss": mean, **policy_metrics(inputs, log_ratio)}
    return LossOutputs(loss, metrics, ratio_values(inputs, log_ratio, means))


def sign_of_group_mean(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Advantages: +1 for a reward above the mean of its group, -1 below it, 0 if equal."""
    return group_mean(rewards, group_index).sign()


def right_so_far(sample: Sample) -> float:
    """The share of characters that are right before the first mistake."""
    wrong = [a != b for a, b in zip(sample.answer, sample.response)] + [True]
    return wrong.index(True) / max(len(sample.answer), len(sample.response), 1)
