"""Checks that a server has the trainer's weights, by responses to prompts and by sums of tensors.

The responses decide, because log-probs depend on everything that a server computes with. If the
responses are wrong, the sums show which tensors are suspect. When a server starts, the sums of each
layer's tensors are also compared with the sums of the folder's tensors. This comparison is exact in
any precision. The sums cannot detect errors in the copies of parameters that kernels make; the
responses can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response

# [elements, sum, sum of squares] of each family of tensors: GspoWorker.weight_sums
Sums = Mapping[str, Sequence[float]]

# The prompts of the check; responses are greedy. Three prompts are longer than a block of vLLM's
# prefix cache (16 tokens on GPUs, 128 on CPUs), to detect a cache of old weights. These three
# differ only in their last tokens, which saves time. The other prompts are short and many, because
# the last layer's experts affect only the next token. Responses of two tokens also test decoding,
# which uses other kernels, and on GPUs CUDA graphs.
_PROMPTS = ((20, 8, 1), (3, 136, 2))  # prompts, tokens of each, tokens of a response
_OWN_TOKENS = 8  # tokens at the end of a prompt that differ between prompts
_OUTLIERS = 8  # one of 8 responses may differ
# Largest difference of a single log-prob from the trainer's, and largest mean difference of a
# response. In fp32 vLLM and Megatron-Core agree to 1e-5, unless two experts are equally likely. A
# single expert with old weights changes log-probs by 1e-3 and more. In bf16 rounding alone changes
# them by 0.04 on average (measured on a model with random weights).
_TOLERANCES = {"fp32": (0.3, 3e-5)}
_COARSE = (1.0, 0.15)
# For latent attention, vLLM multiplies the queries, not the keys, by the key matrix. So it rounds
# differently: log-probs change by 1e-5 on average, 4e-5 in single responses (measured in fp32 on a
# CPU).
_LATENT_MEAN = 1e-4
# On a CPU torch's log_softmax in fp32 adds up the exponentials one after the other, and loses the
# smallest ones. Log-probs become too large, by at most this for each entry of the vocabulary
# (measured up to 262,144 entries): 2e-5 on average with SmolLM2's 49,152.
_CPU_MEAN = 2e-9

_SUM_TOLERANCE = 1e-12  # relative, for float64 sums in different orders
_PADDED = ("embedding", "output layer")  # vLLM pads these with rows of zeros
_SHOWN = 6
NOT_THE_WEIGHTS = "does not have the trainer's weights"


@dataclass(frozen=True)
class WeightCheck:
    """The responses that servers with the trainer's weights must give."""

    prompts: list[list[int]]  # token ids
    tokens: list[list[int]]  # tokens of the greedy responses
    logprobs: list[list[float]]  # log-probs of these tokens at temperature 1
    largest: float  # tolerance for a single log-prob
    mean: float  # tolerance for the mean absolute difference over a response

    def difference(self, responses: Sequence[Response]) -> str | None:
        """Return in words how greedy responses differ from the trainer's; None if they agree.

        With equal weights, the tokens may differ only where rounding decides between two equally
        likely tokens. So the log-probs must agree up to and including the first different token.
        Rounding may also decide between two equally likely experts, which changes the log-probs of
        one response. So one response in eight may differ. Wrong weights change nearly all
        responses. An old prefix cache changes the responses to all long prompts.
        """
        differences = []
        for tokens, logprobs, response in zip(self.tokens, self.logprobs, responses, strict=True):
            same = np.array(tokens) == response.token_ids
            end = len(same) if same.all() else int(same.argmin()) + 1
            differences.append(np.abs(np.array(logprobs) - response.logprobs)[:end])
        largest = max(each.max() for each in differences)
        wrong = sum(each.mean() > self.mean for each in differences)
        allowed = len(differences) // _OUTLIERS
        if wrong <= allowed and largest <= self.largest:
            return None
        return (
            f"{NOT_THE_WEIGHTS}: log-probs of {wrong} of {len(differences)} responses differ by "
            f"more than {self.mean:g} on average (allowed: {allowed}), and the largest difference "
            f"is {largest:.2g} (allowed: {self.largest:g})"
        )


def check_prompts(vocab_size: int, longest: int) -> Iterator[tuple[list[list[int]], int]]:
    """Yield the prompts of each length as token ids, and the number of tokens of their responses.

    No prompt with its response has more than `longest` tokens.
    """
    random = np.random.default_rng(0)
    for number, length, count in _PROMPTS:
        size = (number, min(length, longest - count))
        ids = random.integers(0, vocab_size, size)
        ids[:, :-_OWN_TOKENS] = ids[0, :-_OWN_TOKENS]
        yield ids.tolist(), count


def tolerances(
    precision: str, *, vocab_size: int, latent: bool = False, on_cpu: bool = False
) -> tuple[float, float]:
    """Return `largest` and `mean` of a check for a value of training.precision.

    latent: the model has multi-head latent attention; on_cpu: servers compute on a CPU.
    """
    largest, mean = _TOLERANCES.get(precision, _COARSE)
    return largest, max(mean, _LATENT_MEAN * latent, _CPU_MEAN * vocab_size * on_cpu)


def suspect_families(workers: Sequence[Sums], folder: Sums) -> list[str]:
    """Return the families of tensors that differ from the folder's.

    workers: the sums of each worker of a server. A tensor that every worker holds whole counts
    once for each worker. A family with a different number of elements in vLLM cannot be compared
    and is skipped. There are two such cases. On CPUs, vLLM stores linear layers, except experts,
    only in the format of a kernel. With more workers than key heads, vLLM repeats these heads.
    """
    found = []
    for family, (count, total, squares) in folder.items():
        parts = [each[family] for each in workers if family in each]
        copies, rest = divmod(sum(part[0] for part in parts), count)
        if not copies or (rest and family not in _PADDED):
            continue
        differs = abs(sum(part[1] for part in parts) / copies - total)
        differs_squared = abs(sum(part[2] for part in parts) / copies - squares)
        scale = math.sqrt(count * squares)  # an upper bound of the sum of absolute values
        if differs > _SUM_TOLERANCE * scale or differs_squared > _SUM_TOLERANCE * squares:
            found.append(family)
    return found


def describe_families(families: Sequence[str], known: int) -> str:
    """Describe families in words: `experts of layers 1, 2; embedding`. known: the number of all
    families."""
    if len(families) == known > 1:
        return "all of them"
    layers: dict[str, list[str]] = {}
    for family in families:
        kind, _, layer = family.partition(" of layer ")
        layers.setdefault(kind, []).extend([layer] if layer else [])
    parts = []
    for kind, numbers in layers.items():
        shown = ", ".join(numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        plural = "s" if len(numbers) > 1 else ""
        parts.append(f"{kind} of layer{plural} {shown}" if numbers else kind)
    return "; ".join(parts)
