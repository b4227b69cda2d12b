"""The check that a server has the trainer's weights: responses to fixed prompts, and tensors' sums.

The responses decide: log-probs depend on all that a server computes with. The sums say where to
look when the responses are wrong, and at the start they compare each layer's tensors with the
folder's, exactly in any precision. They do not see what kernels make of parameters; the responses
do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response

# [elements, sum, sum of squares] of each family of tensors: GspoWorker.weight_sums
Sums = Mapping[str, Sequence[float]]

# Greedy responses to fixed prompts, of which one in eight may differ. Three prompts are longer than
# a block of vLLM's prefix cache (16 tokens on GPUs, 128 on CPUs), so that a cache of old weights is
# noticed; all but their last tokens are the same, because tokens cost time. The others are short,
# and many: experts of the last layer move nothing but the next token. A second token is decoded
# with kernels, and on GPUs CUDA graphs, of its own.
_PROMPTS = ((20, 8, 1), (3, 136, 2))  # prompts, tokens of each, tokens of a response
_OWN_TOKENS = 8  # at the end of a prompt
_OUTLIERS = 8  # one response in so many may differ
# Largest difference of a log-prob from the trainer's, and of a response's on average. In fp32 vLLM
# and Megatron-Core agree to 1e-5, unless two experts are as likely as each other; a single expert
# that is left behind moves them by 1e-3 and more. In bf16 rounding alone moves them by 0.04 on
# average (measured on a model of random weights).
_TOLERANCES = {"fp32": (0.3, 3e-5)}
_COARSE = (1.0, 0.15)
# vLLM multiplies latent attention's queries, not its keys, by the matrix of the keys: other sums,
# 1e-5 on average and 4e-5 in single responses (measured in fp32 on a CPU).
_LATENT_MEAN = 1e-4

_SUM_TOLERANCE = 1e-12  # of sums in float64: their order differs
_PADDED = ("embedding", "output layer")  # vLLM adds rows of zeros
_SHOWN = 6
NOT_THE_WEIGHTS = "does not have the trainer's weights"


@dataclass(frozen=True)
class WeightCheck:
    """Responses of servers with the same weights as the trainer."""

    prompts: list[list[int]]  # token ids
    tokens: list[list[int]]  # of the greedy responses
    logprobs: list[list[float]]  # of these tokens, at temperature 1
    largest: float  # tolerance of a single log-prob
    mean: float  # tolerance of the mean absolute difference of a response's

    def difference(self, responses: Sequence[Response]) -> str | None:
        """How greedy responses differ from the trainer's, in words; None where they do not.

        Greedy decoding takes the likeliest token, so the log-probs agree up to the first token that
        differs, and there too: two tokens that are as likely as each other may be told apart by
        rounding. So may two experts, which moves the log-probs of one response; wrong weights move
        nearly all of them, and an old prefix cache those of all long prompts. So one in eight may
        differ.
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
            f"more than {self.mean:g} on average, the largest by {largest:.2g}; allowed: "
            f"{allowed}, "
            f"and {self.largest:g}"
        )


def check_prompts(vocab_size: int, longest: int) -> Iterator[tuple[list[list[int]], int]]:
    """The prompts of each length, as token ids, and the number of tokens that answer each. With it
    no sequence has more than `longest` tokens."""
    random = np.random.default_rng(0)
    for number, length, count in _PROMPTS:
        size = (number, min(length, longest - count))
        ids = random.integers(0, vocab_size, size)
        ids[:, :-_OWN_TOKENS] = ids[0, :-_OWN_TOKENS]
        yield ids.tolist(), count


def tolerances(precision: str, *, latent: bool = False) -> tuple[float, float]:
    """`largest` and `mean` of a check, for training.precision. latent: the model has multi-head
    latent attention."""
    largest, mean = _TOLERANCES.get(precision, _COARSE)
    return largest, max(mean, _LATENT_MEAN) if latent else mean


def suspect_families(workers: Sequence[Sums], folder: Sums) -> list[str]:
    """Families of tensors that are not the folder's.

    workers: of each worker of a server. A tensor that all of them have whole counts as often as
    there are workers. Families of which vLLM has another number of elements cannot be compared and
    are left out: on CPUs it keeps linear layers in a kernel's own form only (the experts stay), and
    with more workers than key heads it repeats these.
    """
    found = []
    for family, (count, total, squares) in folder.items():
        parts = [each[family] for each in workers if family in each]
        copies, rest = divmod(sum(part[0] for part in parts), count)
        if not copies or (rest and family not in _PADDED):
            continue
        differs = abs(sum(part[1] for part in parts) / copies - total)
        differs_squared = abs(sum(part[2] for part in parts) / copies - squares)
        scale = math.sqrt(count * squares)  # the sum of absolute values is not above it
        if differs > _SUM_TOLERANCE * scale or differs_squared > _SUM_TOLERANCE * squares:
            found.append(family)
    return found


def describe_families(families: Sequence[str], known: int) -> str:
    """Families in words: `experts of layers 1, 2; embedding`. known: how many there are."""
    if len(families) == known > 1:
        return "all of them"
    layers: dict[str, list[str]] = {}
    for family in families:
        kind, _, layer = family.partition(" of layer ")
        layers.setdefault(kind, []).extend([layer] if layer else [])
    told = []
    for kind, numbers in layers.items():
        shown = ", ".join(numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        plural = "s" if len(numbers) > 1 else ""
        told.append(f"{kind} of layer{plural} {shown}" if numbers else kind)
    return "; ".join(told)
