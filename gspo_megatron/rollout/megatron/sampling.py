"""Random numbers, sampling of the next token, and stop strings.

Every random number depends only on seed, sample index and position. So a response does not depend
on the layout, on the other responses of its batch, or on resuming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_megatron.rollout.engine import Sampling


def _wrapped(value: int) -> int:
    """Return the signed integer with the same bits as an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


BLOCK = 128  # the most tokens of the vocabulary in one partial sum

_GAMMA = 0x9E3779B97F4A7C15
_MIX = (_wrapped(0xBF58476D1CE4E5B9), _wrapped(0x94D049BB133111EB))


def uniforms(seed: int, samples: Tensor, num_positions: int) -> Tensor:
    """Return random numbers, [samples, positions] float64 in (0, 1).

    Uses SplitMix64 (Steele, Lea, Flood 2014) over a counter: three rounds of its finaliser mix
    seed, sample index and position.
    """
    positions = torch.arange(num_positions, device=samples.device)
    state = _finalise(torch.full_like(samples, _wrapped(seed * _GAMMA % (1 << 64))))
    state = _finalise(state + samples * _wrapped(_GAMMA))[:, None]
    bits = _finalise(state + (positions + 1) * _wrapped(_GAMMA))
    # The top 52 bits, centred in their interval: the result is never 0 or 1.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _finalise(z: Tensor) -> Tensor:
    """Mix the bits of each number, as the finaliser of SplitMix64 does."""
    z = (z ^ _shift_right(z, 30)) * _MIX[0]
    z = (z ^ _shift_right(z, 27)) * _MIX[1]
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic and would copy the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class RouterRandomness:
    """Random numbers for noise on the routers' scores (routing/noise.py).

    They depend only on seed, sample, position and layer, and differ from the random numbers that
    sample tokens.
    """

    seed: int
    samples: Tensor  # [sequences]; for a prompt, the first of its samples

    def numbers(self, positions: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function of (layer, experts) that returns [tokens, experts] float64 in (0, 1).

        positions: [sequences, length]. Tokens have the routers' order: the first token of all
        sequences, then the second.
        """
        # A number for each token: it has room for 2^20 positions and 2^24 samples.
        tokens = ((self.samples[:, None] << 20) + positions).t().flatten()
        # With `seed` itself, layer 0 would repeat the numbers that sample tokens.
        return lambda layer, experts: uniforms(~self.seed, tokens + (layer << 44), experts)


def sample_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return next tokens and their log-probs under softmax(logits / temperature), [sequences] each.

    logits [sequences, vocabulary] fp32, uniform [sequences] float64. Sampling inverts the
    cumulative distribution of the tokens that top-k and top-p leave.
    """
    greedy = sampling.temperature == 0
    if not greedy and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    probabilities = torch.softmax(logits, dim=-1)
    if greedy:
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        tokens = _inverted(_top_k_top_p(probabilities, sampling), uniform[:, None])
    # On CPUs torch's softmax adds up the exponentials one after the other, and loses small ones. So
    # the probabilities of a large vocabulary add up to 1 + 1e-4. torch.sum is exact to 1e-7.
    exact = probabilities.gather(1, tokens) / probabilities.sum(-1, keepdim=True)
    return tokens[:, 0], exact.log()[:, 0]


def _inverted(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative weight is above the threshold, [sequences, 1].

    weights: [sequences, vocabulary]; uniform: [sequences, 1]. Finds the token's block first,
    because running sums over a whole vocabulary in float64 take ten times as long as the softmax.
    """
    size = weights.shape[1]
    # A width near the square root of the vocabulary size balances the cost of the two sums. A
    # vocabulary is often a multiple of 128 and then needs no padding.
    width = min(BLOCK, 1 << ((size - 1).bit_length() + 1) // 2)
    missing = -size % width
    padded = F.pad(weights, (0, missing)) if missing else weights
    blocks = padded.unflatten(1, (-1, width))
    sums = blocks.sum(-1)
    ends = sums.cumsum(1, dtype=torch.float64)
    threshold = uniform * ends[:, -1:]
    block = _first_above(ends, threshold)
    # rounding could make it negative
    within = (threshold - (ends - sums).gather(1, block)).clamp(min=0.0)
    of_block = block[:, :, None].expand(-1, -1, width)
    cumulative = blocks.gather(1, of_block)[:, 0].cumsum(1, dtype=torch.float64)
    index = block * width + _first_above(cumulative, within)
    return index.clamp(max=size - 1)  # with NaN, no sum is above the threshold


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the index of the first sum above the threshold: [sequences, n], [sequences, 1] ->
    [sequences, 1].

    Rounding may lift the threshold to the last sum or above. It is then lowered to the number just
    below the last sum, so that the chosen index has a weight above 0.
    """
    highest = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    index = torch.searchsorted(cumulative, torch.minimum(threshold, highest), right=True)
    return index.clamp(max=cumulative.shape[1] - 1)


def _top_k_top_p(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Set the probabilities of the tokens that top-k and then top-p leave out to zero. The
    likeliest token is always kept."""
    size = probabilities.shape[-1]
    limit = min(sampling.top_k, size) if sampling.top_k else size
    if limit == size and sampling.top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.topk(limit, dim=-1)
    if sampling.top_p < 1.0:
        total_before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered * (total_before < sampling.top_p * ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(probabilities).scatter(1, order, ordered)


def with_special_tokens(
    decode: Callable[[Sequence[int]], str], names: Mapping[int, str]
) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes like `decode`, but also writes the special tokens in
    `names`."""

    def decode_all(ids: Sequence[int]) -> str:
        runs = ((name, list(run)) for name, run in groupby(ids, names.get))
        return "".join(decode(run) if name is None else name * len(run) for name, run in runs)

    return decode_all


class StopStrings:
    """Finds the token that completes a stop string in a response.

    It decodes only the last tokens. A token with text has at least one byte, so a stop string of n
    UTF-8 bytes has at most n tokens with text. A few more are decoded, because special tokens have
    no text, decoders drop a leading space, and the first token may begin inside a character.
    """

    SPARE_TOKENS = 8
    BROKEN = "\ufffd"  # decoders write it for bytes that are not a whole character

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """texts: the stop strings, at least one; decode: token ids to text."""
        self._texts, self._decode = tuple(texts), decode
        self.window = max(len(text.encode()) for text in texts) + self.SPARE_TOKENS  # tokens

    def end(self, ids: Sequence[int], searched: int) -> int | None:
        """Return the number of tokens up to the one that completes the first stop string, or None.

        The first `searched` tokens are known to contain no stop string. Of these tokens, `ids`
        needs only the last `window`.
        """
        text = self._text(ids)
        if self.BROKEN not in text and not self._in(text):
            return None  # the usual case, with a single decode
        lengths = range(searched + 1, len(ids) + 1)
        return next((n for n in lengths if self._in(self._text(ids[:n]))), None)

    def _in(self, text: str) -> bool:
        return any(stop in text for stop in self._texts)

    def _text(self, ids: Sequence[int]) -> str:
        """Decode `ids`, if necessary without the first tokens.

        `ids` may begin inside a character, and some decoders then also replace the characters that
        follow. Leaves up to 3 tokens out.
        """
        for start in range(4):
            text = self._decode(ids[start:])
            if not text.startswith(self.BROKEN) or self._in(text):
                break
        return text
