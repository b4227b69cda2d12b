"""The parts of an objective: ratios, sums over sequences, rules, corrections, KL and entropy.

losses.py puts them together. Ratios are kept as logarithms as long as possible. Log-ratios outside
the mask are set to 0 first, so that nothing from there, not even a NaN, reaches values or
gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.types import LossInputs

# exp() of this number is finite in float32, and so are sums and squares of such values. Without the
# limit, one token with an infinite ratio would turn the gradient of the whole batch into NaN.
MAX_LOG_RATIO = 40.0

_PER_TOKEN = (
    "old_logprobs",
    "mask",
    "sequence_index",
    "entropy",
    "token_advantages",
    "rollout_logprobs",
    "reference_logprobs",
)


def check_inputs(inputs: LossInputs, *, token_advantages: bool) -> None:
    """Assert that no tensor would broadcast, and that only an objective that reads token advantages
    (`token_advantages`) gets them."""
    tokens, sequences = inputs.logprobs.shape, inputs.advantages.shape
    assert len(tokens) == 1, f"logprobs have shape {tuple(tokens)}, not [tokens]"
    assert len(sequences) == 1, f"advantages have shape {tuple(sequences)}, not [num_sequences]"
    for name in _PER_TOKEN:
        tensor = getattr(inputs, name)
        assert tensor is None or tensor.shape == tokens, (
            f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(tokens)}"
        )
    assert inputs.sequence_lengths.shape == sequences, (
        f"sequence_lengths have shape {tuple(inputs.sequence_lengths.shape)}, "
        f"advantages {tuple(sequences)}"
    )
    assert inputs.global_num_sequences > 0, "a mini-batch without sequences"
    assert token_advantages or inputs.token_advantages is None, (
        "token_advantages are given to an objective with one advantage a sequence"
    )


# --- Sums over sequences -------------------------------------------------------------------------


def segment_sum(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum `values` [..., tokens] by `sequence_index` [tokens] into [..., num_sequences].

    The sum is differentiable. It has the same bits at every call, even on GPUs, where index_add
    adds in random order. Tokens may come in any order. Accumulates and returns float32, or float64
    where `values` is float64. A sequence without tokens has 0. An index outside [0, num_sequences)
    is an error.
    """
    assert sequence_index.dim() == 1, f"sequence_index has shape {tuple(sequence_index.shape)}"
    assert values.shape[-1:] == sequence_index.shape, (
        f"values {tuple(values.shape)} do not end in the tokens of {tuple(sequence_index.shape)}"
    )
    return _SegmentSum.apply(values, sequence_index, num_sequences)


class _SegmentSum(torch.autograd.Function):
    """Sorts the tokens by sequence, so that the tokens of a sequence are neighbours, and sums them
    in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
        ctx.save_for_backward(sequence_index)
        ctx.dtype = values.dtype
        dtype = torch.promote_types(values.dtype, torch.float32)
        shape = (*values.shape[:-1], num_sequences)
        if values.numel() == 0:
            return values.new_zeros(shape, dtype=dtype)
        counts = torch.zeros(num_sequences, dtype=torch.long, device=values.device)
        counts.scatter_add_(0, sequence_index, torch.ones_like(sequence_index))  # exact
        in_order = values.to(dtype)[..., sequence_index.argsort(stable=True)]
        rows = in_order.numel() // len(sequence_index)
        # The matrix is flattened, because CUDA sums a segment of a vector with a thread block, but
        # a segment of a matrix with a single thread.
        sums = torch.segment_reduce(  # ty: ignore[missing-attribute]  # torch hides it from checkers
            in_order.reshape(-1), "sum", lengths=counts.repeat(rows), unsafe=True, initial=0
        )
        return sums.reshape(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (sequence_index,) = ctx.saved_tensors
        return gradient[..., sequence_index].to(ctx.dtype), None, None


def sequence_sums(inputs: LossInputs, *values: Tensor) -> Tensor:
    """Sum each of `values` [tokens] over whole sequences: [len(values), num_sequences].

    The value is the sum over all shards of a sequence, the same on each of them. The gradient is
    that of this rank's own tokens alone. The gradients of all shards add up to the gradient of the
    whole sequence. So the forward pass needs one collective, and the backward pass none.
    """
    local = segment_sum(torch.stack(values), inputs.sequence_index, len(inputs.advantages))
    # The sum may be made in place, so it gets a copy.
    total = inputs.sum_over_shards(local.detach().clone())
    # The difference is zero, so the value is exactly `total`. But the difference carries the
    # gradient.
    return total + (local - local.detach())


# --- Ratios --------------------------------------------------------------------------------------


def inside_mask(inputs: LossInputs, values: Tensor) -> Tensor:
    """`values` [tokens], with 0 outside the mask, where values and gradients may be NaN."""
    return values.where(inputs.mask > 0, 0.0)


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """log pi(y_t) - log pi_old(y_t), [tokens]; 0 outside the mask."""
    return inside_mask(inputs, inputs.logprobs - inputs.old_logprobs)


def sequence_log_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Mean of `log_ratio` [tokens] over whole sequences, [num_sequences] (GSPO paper, eq. 7); 0 for
    a sequence without tokens in the mask. See `sequence_sums`."""
    return sequence_sums(inputs, log_ratio)[0] / inputs.sequence_lengths.clamp_min(1)


def sequence_token_log_ratio(
    inputs: LossInputs, log_ratio: Tensor, sequence_log_ratio: Tensor
) -> Tensor:
    """Log of s_it = sg[s_i] pi(y_t) / sg[pi(y_t)], [tokens] (GSPO paper, eq. 14): each token has
    the value of the whole sequence (a mean or a sum), and the gradient of its own log-prob
    alone."""
    detached = sequence_log_ratio.detach()[inputs.sequence_index]
    return detached + (log_ratio - log_ratio.detach())


def exponentiate(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, limited so that it stays finite."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


# --- Rules: what is done with a ratio far from 1 -------------------------------------------------
#
# ratio and advantages are both [tokens] or both [num_sequences]; log-probs of tokens are taken from
# `inputs`. RULES in config/objectives.py declares each rule: its function here, its numbers, and
# the ratios on which it is defined.


@dataclass(frozen=True)
class Clipped:
    """A surrogate, which carries the gradient, and flags for the effect of the rule. All have the
    ratio's shape."""

    surrogate: Tensor
    low: Tensor  # bool: the lower bound binds, that is, it cuts the gradient off
    high: Tensor  # bool: the upper bound binds
    outside: Tensor  # bool: the ratio is out of the range, even if the rule changes nothing


def min_clip(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Clipped:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), the pessimistic clip of PPO.

    The upper bound binds only for positive advantages, and the lower bound only for negative
    advantages. For an advantage of 0 no bound binds.
    """
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    below, above = ratio.detach() < lower, ratio.detach() > upper
    return Clipped(surrogate, below & (advantages < 0), above & (advantages > 0), below | above)


def dual_clip(
    inputs: LossInputs,
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Clipped:
    """`min_clip`, but for negative advantages the result is never less than dual_clip * A (arXiv
    1912.09729).

    Without this bound, one token outweighs the batch if its advantage is negative and its
    probability has grown much. `high` is also set where this bound binds, and `outside` where the
    ratio is beyond this bound.
    """
    inner = min_clip(inputs, ratio, advantages, clip_low, clip_high)
    beyond = (advantages < 0) & (ratio.detach() > dual_clip)
    surrogate = inner.surrogate.where(~beyond, dual_clip * advantages)
    return Clipped(surrogate, inner.low, inner.high | beyond, inner.outside | beyond)


def cispo_cap(inputs: LossInputs, ratio: Tensor, advantages: Tensor, clip_high: float) -> Clipped:
    """sg[min(ratio, 1 + clip_high)] A log pi (CISPO, arXiv 2506.13585, eqs. 4-5).

    The weight is limited, but the gradient is not cut off: every token keeps learning. `high` is
    set where the limit changes the loss, for advantages of both signs.
    """
    above = ratio.detach() > 1.0 + clip_high
    weights = ratio.detach().clamp(max=1.0 + clip_high)
    surrogate = weights * advantages * inside_mask(inputs, inputs.logprobs)
    return Clipped(surrogate, torch.zeros_like(above), above & (advantages != 0), above)


def sapo_gate(
    inputs: LossInputs,
    ratio: Tensor,
    advantages: Tensor,
    tau_positive: float,
    tau_negative: float,
) -> Clipped:
    """(4 / tau) sigmoid(tau (ratio - 1)) A (SAPO, arXiv 2511.20347): its slope at ratio 1 is 1 and
    falls off to both sides, faster with a larger tau. Nothing is clipped."""
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return _unclipped(torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages)


def policy_gradient_mask(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Clipped:
    """M sg[pi / pi_rollout] A log pi with M = 0 where `min_clip` would bind (MiniRL, arXiv
    2512.01374). The mask uses the trainer's ratio pi / pi_old, the weight uses the rollout
    policy."""
    assert inputs.rollout_logprobs is not None, "rule masked needs the rollout's log-probs"
    bounds = min_clip(inputs, ratio.detach(), advantages, clip_low, clip_high)
    logprobs = inside_mask(inputs, inputs.logprobs)
    rollout_logprobs = inside_mask(inputs, inputs.rollout_logprobs)
    surrogate = exponentiate(logprobs.detach() - rollout_logprobs) * advantages * logprobs
    surrogate = surrogate.where(~(bounds.low | bounds.high), 0.0)
    return Clipped(surrogate, bounds.low, bounds.high, bounds.outside)


def geometric_clip(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, log_clip: float
) -> Clipped:
    """ratio * A. The ratio comes from the mean of the tokens' log-ratios. Before the mean is taken,
    `clip_log_ratio` limits each log-ratio."""
    return _unclipped(ratio * advantages)


def clip_log_ratio(log_ratio: Tensor, advantages: Tensor, log_clip: float) -> Clipped:
    """Token log-ratios limited to at most log_clip if the advantage is positive, and to at least
    -log_clip if it is negative (GMPO, arXiv 2507.20673, eq. 4). `surrogate` has the limited
    log-ratios, for a geometric mean."""
    high = (log_ratio.detach() > log_clip) & (advantages > 0)
    low = (log_ratio.detach() < -log_clip) & (advantages < 0)
    limited = log_ratio.where(~high, log_clip).where(~low, -log_clip)
    return Clipped(limited, low, high, log_ratio.detach().abs() > log_clip)


def total_variation_mask(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, max_divergence: float
) -> Clipped:
    """ratio * A, but 0 for a token whose probability has moved by more than `max_divergence`, if
    the update would move it further (DPPO with binary total variation, arXiv 2602.04879)."""
    moved = _moved(inputs)
    return _masked(ratio * advantages, advantages, moved, moved.abs() > max_divergence)


def binary_kl_mask(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, max_divergence: float
) -> Clipped:
    """`total_variation_mask`, but the move is measured by KL(old, new) of two events, the token and
    all others (DPPO with binary KL)."""
    old, new = (inside_mask(inputs, x) for x in (inputs.old_logprobs, inputs.logprobs.detach()))
    far = binary_kl(old, new) > max_divergence
    return _masked(ratio * advantages, advantages, _moved(inputs), far)


def two_sided_mask(
    inputs: LossInputs,
    ratio: Tensor,
    advantages: Tensor,
    max_divergence: float,
    log_ratio_penalty: float,
) -> Clipped:
    """ratio * A - log_ratio_penalty * log-ratio^2 (the loss `ipo` of prime-rl). The first term is 0
    for a token whose probability has moved by more than `max_divergence` in either direction."""
    moved = _moved(inputs)
    outside = moved.abs() > max_divergence
    surrogate = (ratio * advantages).where(~outside, 0.0)
    surrogate = surrogate - log_ratio_penalty * token_log_ratio(inputs).square()
    cut = outside & (advantages != 0)
    return Clipped(surrogate, cut & (moved < 0), cut & (moved > 0), outside)


def gamma_weight(
    inputs: LossInputs,
    ratio: Tensor,
    advantages: Tensor,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> Clipped:
    """sg[W^k exp(lambda (1 - W))] A log pi with W the ratio of the whole sequence (VESPO, arXiv
    2602.10693): the weight is 1 at W = 1 and falls off to both sides. Nothing is clipped."""
    weight, positive = ratio.detach(), advantages >= 0
    k = torch.full_like(weight, k_negative).masked_fill(positive, k_positive)
    fall = torch.full_like(weight, lambda_negative).masked_fill(positive, lambda_positive)
    gamma = torch.exp(k * weight.log() + fall * (1.0 - weight))  # gamma is 0 where W = 0
    return _unclipped(gamma * advantages * inside_mask(inputs, inputs.logprobs))


def _moved(inputs: LossInputs) -> Tensor:
    """pi(y_t) - pi_old(y_t), [tokens], detached; 0 outside the mask."""
    return inside_mask(inputs, inputs.logprobs.detach().exp() - inputs.old_logprobs.exp())


def _masked(surrogate: Tensor, advantages: Tensor, moved: Tensor, outside: Tensor) -> Clipped:
    """The surrogate without the terms `outside` that would move the policy further away."""
    high, low = outside & (moved > 0) & (advantages > 0), outside & (moved < 0) & (advantages < 0)
    return Clipped(surrogate.where(~(high | low), 0.0), low, high, outside)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of two events, a token and all others: p log(p/q) + (1-p) log((1-p)/(1-q)). It is
    exact near p = 0, and infinite where q is 0 for a token that p allows."""
    total = torch.zeros_like(log_p)
    for mine, other in ((log_p, log_q), (_log_complement(log_p), _log_complement(log_q))):
        share = mine.exp()
        total = total + (share * (mine - other)).where(share > 0, 0.0)
    return total


def _log_complement(log_p: Tensor) -> Tensor:
    """log(1 - p). In float32, log p of a nearly certain token is often 0. Then 1 - p is not 0, but
    below the rounding error, 2^-24. With log 0, two policies that are both certain of the token
    would have an infinite divergence."""
    return torch.log((-torch.expm1(log_p)).clamp(min=2.0**-24))


def _unclipped(surrogate: Tensor) -> Clipped:
    nothing = torch.zeros_like(surrogate, dtype=torch.bool)
    return Clipped(surrogate, nothing, nothing, nothing)


# --- Weights of terms, detached ------------------------------------------------------------------
# Corrections are weights for responses that were sampled by an engine other than the trainer. For a
# token, k = pi_old / pi_rollout. The weight of a sequence uses the geometric mean of k, like GSPO's
# ratio. The product of k over hundreds of tokens is very different; functions that use the product
# have `product` in their names.


def log_mismatch(inputs: LossInputs) -> Tensor:
    """log k = log pi_old - log pi_rollout, [tokens]; 0 outside the mask."""
    assert inputs.rollout_logprobs is not None, "a correction needs the rollout's log-probs"
    return inside_mask(inputs, inputs.old_logprobs - inputs.rollout_logprobs)


def token_tis(inputs: LossInputs, log_k: Tensor, correction_high: float) -> Tensor:
    """min(k, high), [tokens]: truncated importance sampling."""
    return exponentiate(log_k.detach()).clamp(max=correction_high)


# Masks compare log k, not k, because the k of a dropped token may be infinite or NaN.


def icepop(
    inputs: LossInputs, log_k: Tensor, correction_low: float, correction_high: float
) -> Tensor:
    """k where low <= k <= high, else 0, [tokens] (IcePop of Ring-1T, arXiv 2510.18855)."""
    return _kept_ratio(log_k, _is_within(log_k.detach(), correction_low, correction_high))


def kpop(inputs: LossInputs, log_k: Tensor, correction_high: float) -> Tensor:
    """k if the binary KL divergences of pi_old and pi_rollout are at most high in both directions,
    else 0, [tokens] (KPop of the Ring team: https://ringtech.notion.site/kpop)."""
    assert inputs.rollout_logprobs is not None
    old, sampled = (inside_mask(inputs, x) for x in (inputs.old_logprobs, inputs.rollout_logprobs))
    largest = torch.maximum(binary_kl(old, sampled), binary_kl(sampled, old))
    return _kept_ratio(log_k, largest <= correction_high)


def _kept_ratio(log_k: Tensor, kept: Tensor) -> Tensor:
    return exponentiate(log_k.detach().where(kept, 0.0)).where(kept, 0.0)


def _is_within(logs: Tensor, low: float, high: float) -> Tensor:
    """Whether each of `logs` is the logarithm of a number from low to high. False for NaN."""
    return (logs >= math.log(low)) & (logs <= math.log(high))


def token_k1_mask(
    inputs: LossInputs, log_k: Tensor, correction_low: float, correction_high: float
) -> Tensor:
    """1 where low <= k <= high, else 0, [tokens]."""
    return _is_within(log_k.detach(), correction_low, correction_high).to(log_k.dtype)


def token_k2_mask(inputs: LossInputs, log_k: Tensor, correction_high: float) -> Tensor:
    """1 where log(k)^2 / 2 is at most high, else 0, [tokens]."""
    return (0.5 * log_k.detach().square() <= correction_high).to(log_k.dtype)


def token_k3_mask(inputs: LossInputs, log_k: Tensor, correction_high: float) -> Tensor:
    """1 where k - 1 - log k is at most high, else 0, [tokens]."""
    return (k3(log_k.detach()) <= correction_high).to(log_k.dtype)


def is_outside(log_k: Tensor, correction_low: float, correction_high: float) -> Tensor:
    """1 where k is out of [low, high], else 0, [tokens]. `worst_token_mask` takes the sums of these
    numbers."""
    return (~_is_within(log_k.detach(), correction_low, correction_high)).to(log_k.dtype)


# In the next functions, `sums` [num_sequences] are sums over whole sequences: of `k3(log k)` for
# k3_mask, of `is_outside(log k)` for worst_token_mask, and of log k for all other functions.


def sequence_tis(sums: Tensor, lengths: Tensor, correction_high: float) -> Tensor:
    """min(g, high) with g the geometric mean of k over a sequence."""
    return exponentiate(_mean(sums, lengths)).clamp(max=correction_high)


def sequence_product_tis(sums: Tensor, lengths: Tensor, correction_high: float) -> Tensor:
    """min(product of k, high)."""
    return exponentiate(sums.detach()).clamp(max=correction_high)


def sequence_mask(
    sums: Tensor, lengths: Tensor, correction_low: float, correction_high: float
) -> Tensor:
    """1 where low <= g <= high with g the geometric mean of k over a sequence, else 0."""
    return _is_within(_mean(sums, lengths), correction_low, correction_high).to(sums.dtype)


def k3_mask(sums: Tensor, lengths: Tensor, correction_high: float) -> Tensor:
    """1 where the mean of k - 1 - log k over a sequence is at most high, else 0."""
    return (_mean(sums, lengths) <= correction_high).to(sums.dtype)


def worst_token_mask(sums: Tensor, lengths: Tensor) -> Tensor:
    """1 for a sequence of which no token is outside the bounds, else 0."""
    return (sums.detach() == 0).to(sums.dtype)


def _mean(sums: Tensor, lengths: Tensor) -> Tensor:
    return sums.detach() / lengths.clamp_min(1)


def kept_by_off_policy_mask(log_ratio_means: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """[num_sequences] bool: False where the advantage is negative and the mean of log(pi_old / pi)
    is above `bound`, that is, the policy has moved away (off-policy sequence masking, arXiv
    2512.02556)."""
    return (advantages >= 0) | (-log_ratio_means.detach() <= bound)


# --- Divergence and entropy ----------------------------------------------------------------------


def divergence(estimator: str, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimates of KL(pi, reference) from tokens sampled by pi, with gradient. The log-probs may
    have any shape.

    With d = log reference - log pi: k1 = -d is unbiased and may be negative; k2 = d^2 / 2 is
    biased; k3 = e^d - 1 - d is unbiased and never negative (http://joschu.net/blog/kl-approx.html).
    As a term of the loss, k2 has the gradient of the divergence. The gradient of k1 is zero in
    expectation.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    assert estimator == "k3", estimator
    return k3(difference)


def k3_unbiased(inputs: LossInputs, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 times pi / pi_old, [tokens], with the gradient of both factors. From samples of the old
    policy, it estimates the current policy's divergence without bias, in value and gradient (arXiv
    2512.02556)."""
    ratio = exponentiate(token_log_ratio(inputs))
    return ratio * k3(reference_logprobs - logprobs)


def k3(log_ratio: Tensor) -> Tensor:
    """ratio - 1 - log ratio. With ratio = p / q and samples of q, it is an estimate of KL(q, p)."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio


def mean_entropy(inputs: LossInputs) -> Tensor:
    """This shard's part of the mean entropy of the mini-batch's response tokens, with gradient."""
    assert inputs.entropy is not None
    return inside_mask(inputs, inputs.entropy).sum() / max(inputs.global_num_tokens, 1)
