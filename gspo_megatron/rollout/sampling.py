"""Drawing tokens: one uniform number a token, derived from (seed, sample, position).

No generator state: a response's randomness does not depend on the layout, on the other responses in
its batch, or on how often the run was resumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_megatron.rollout.engine import Sampling


def _wrapped(value: int) -> int:
    """An unsigned 64-bit constant as the signed integer with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = 0x9E3779B97F4A7C15
_MIX = (_wrapped(0xBF58476D1CE4E5B9), _wrapped(0x94D049BB133111EB))


def uniforms(seed: int, samples: Tensor, num_positions: int) -> Tensor:
    """[samples, positions] float64 in (0, 1), by SplitMix64 (Steele, Lea, Flood 2014) over a
    counter: three rounds of its finaliser join seed, sample index and position."""
    positions = torch.arange(num_positions, device=samples.device)
    state = _finalise(torch.full_like(samples, _wrapped(seed * _GAMMA % (1 << 64))))
    state = _finalise(state + samples * _wrapped(_GAMMA))[:, None]
    bits = _finalise(state + (positions + 1) * _wrapped(_GAMMA))
    # the top 52 bits, centred in their interval: neither 0 nor 1 can come out
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _finalise(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX[0]
    z = (z ^ _shift_right(z, 27)) * _MIX[1]
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic and would drag the sign bit in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens and their log-probs under softmax(logits / temperature), both [sequences].

    logits [sequences, vocabulary] fp32, uniform [sequences] float64. Tokens are drawn by inverting
    the cumulative distribution, over the tokens that top-k and top-p leave.
    """
    greedy = sampling.temperature == 0
    if not greedy and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy:
        tokens = logits.argmax(dim=-1)
    else:
        weights = _kept(logprobs.exp(), sampling).double()
        cumulative = weights.cumsum(dim=-1)
        threshold = uniform[:, None] * cumulative[:, -1:]
        # the first token whose cumulative weight passes the threshold has weight of its own
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _kept(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k and then top-p leave out; the most likely token always stays."""
    size = probabilities.shape[-1]
    limit = min(sampling.top_k, size) if sampling.top_k else size
    if limit == size and sampling.top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.topk(limit, dim=-1)
    if sampling.top_p < 1.0:
        total_before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered * (total_before < sampling.top_p * ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(probabilities).scatter(1, order, ordered)
