"""The objectives as the papers print them: one response and one token at a time, in float64.

Nothing of the package is used but the record that the batch arrives in. N responses y_i with
advantage A_i; D_it = log pi(y_it) - log pi_old(y_it); |y_i| counts the tokens inside the mask; mu
in the papers is the policy as the rollout engine evaluated it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_megatron.types import LossInputs

# Every paper's own numbers. CISPO's cap of 5 is 1 + clip_high.
NUMBERS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "grpo": {"clip_low": 0.2, "clip_high": 0.27},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_high": 4.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "gmpo": {"log_clip": 0.4},
    "luspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "minirl": {"clip_low": 0.2, "clip_high": 0.27},
    "reinforce_leave_one_out": {"clip_low": 0.2, "clip_high": 0.2},
}


# The spread of log-ratios at which these bind for a part of them.
SPREADS = {
    **dict.fromkeys(("gspo", "gspo_token", "luspo"), 1e-3),
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "sapo", "gmpo", "minirl"), 0.4),
    "cispo": 1.2,
    "reinforce_leave_one_out": 0.1,
}


class Term(NamedTuple):
    """A summand of an objective, and what the clip did to it."""

    value: Tensor | float
    side: str = ""  # "low" or "high" where a bound decides the value
    outside: bool = False


@dataclass
class Response:
    """The tokens of one response that are inside the mask."""

    new: list[Tensor]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    entropy: list[Tensor]
    advantage: float
    token_advantages: list[float]

    def __len__(self) -> int:
        return len(self.old)

    def token_ratio(self, t: int) -> Tensor:
        return torch.exp(self.new[t]) / math.exp(self.old[t])

    def geometric_ratio(self) -> Tensor:
        return torch.exp(sum(n - o for n, o in zip(self.new, self.old, strict=True)) / len(self))

    def product_ratio(self) -> Tensor:
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(self)):
            product = product * self.token_ratio(t)
        return product


@dataclass
class Expected:
    """A loss, to be minimised, its gradients [tokens], and the clip per masked token."""

    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor
    binding: list[list[str]] = field(default_factory=list)
    outside: list[list[bool]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)


def clipped(
    ratio: Tensor, advantage: float, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> Term:
    """min(r A, clip(r, 1 - low, 1 + high) A), and not below dual_clip * A where A < 0."""
    value = float(ratio.detach())
    bound = min(max(value, 1 - clip_low), 1 + clip_high)
    outside = bound != value
    if advantage < 0 and value > dual_clip:
        return Term(dual_clip * advantage, "high", True)
    if bound * advantage < value * advantage:
        return Term(bound * advantage, "low" if value < 1 else "high", outside)
    return Term(ratio * advantage, "", outside)


# --- The objectives of whole responses: one term each -------------------------------------------


def gspo(response: Response, **numbers: float) -> Term:
    """arXiv 2507.18071, eqs. 5 and 7."""
    return clipped(response.geometric_ratio(), response.advantage, **numbers)


def luspo(response: Response, **numbers: float) -> Term:
    """arXiv 2602.05261: the term of GSPO times |y_i|."""
    term = gspo(response, **numbers)
    return term._replace(value=term.value * len(response))


def reinforce_leave_one_out(response: Response, **numbers: float) -> Term:
    """arXiv 2402.14740: a response is one action, of probability prod_t pi(y_it)."""
    return clipped(response.product_ratio(), response.advantage, **numbers)


def gmpo(response: Response, log_clip: float) -> list[Term]:
    """arXiv 2507.20673, eq. 4: (prod_t |min(w_it A, clip(w_it, e^-c, e^c) A)|)^(1/|y|) sgn(A).

    A list: the value is that of the whole response, divided up evenly among its tokens; the clip
    is that of each token.
    """
    advantage = response.advantage
    product = torch.ones((), dtype=torch.float64)
    flags = []
    for t in range(len(response)):
        ratio = response.token_ratio(t)
        value = float(ratio.detach())
        bound = min(max(value, math.exp(-log_clip)), math.exp(log_clip))
        if bound * advantage < value * advantage:
            product = product * abs(bound * advantage)
            flags.append(("low" if value < 1 else "high", True))
        else:
            product = product * abs(ratio * advantage)
            flags.append(("", bound != value))
    if advantage == 0:
        return [Term(0.0, side, outside) for side, outside in flags]
    mean = product ** (1 / len(response)) * math.copysign(1.0, advantage)
    return [Term(mean / len(response), side, outside) for side, outside in flags]


# --- The objectives of tokens: a term for each --------------------------------------------------


def gspo_token(response: Response, **numbers: float) -> list[Term]:
    """arXiv 2507.18071, eqs. 13-14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]."""
    level = response.geometric_ratio().detach()
    return [
        clipped(level * torch.exp(n) / torch.exp(n).detach(), advantage, **numbers)
        for n, advantage in zip(response.new, response.token_advantages, strict=True)
    ]


def grpo(response: Response, **numbers: float) -> list[Term]:
    """arXiv 2402.03300, eq. 3; the summands of DAPO and Dr. GRPO are the same."""
    return [
        clipped(response.token_ratio(t), response.token_advantages[t], **numbers)
        for t in range(len(response))
    ]


def cispo(response: Response, clip_high: float) -> list[Term]:
    """arXiv 2506.13585, eq. 4: sg[min(w_it, cap)] A log pi(y_it)."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        ratio = float(response.token_ratio(t).detach())
        over = ratio > 1 + clip_high
        weight = 1 + clip_high if over else ratio
        side = "high" if over and advantage != 0 else ""
        terms.append(Term(weight * advantage * response.new[t], side, over))
    return terms


def sapo(response: Response, tau_positive: float, tau_negative: float) -> list[Term]:
    """arXiv 2511.20347: (4 / tau) sigmoid(tau (w_it - 1)) A, tau by the sign of A."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        tau = tau_positive if advantage > 0 else tau_negative
        gate = 1 / (1 + torch.exp(-tau * (response.token_ratio(t) - 1)))
        terms.append(Term(4 / tau * gate * advantage))
    return terms


def minirl(response: Response, clip_low: float, clip_high: float) -> list[Term]:
    """arXiv 2512.01374: M_it sg[pi / pi_rollout] A log pi; M_it = 0 where PPO's clip would bind."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        ratio = float(response.token_ratio(t).detach())
        low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
        side = "high" if advantage > 0 and high else "low" if advantage < 0 and low else ""
        weight = math.exp(float(response.new[t].detach())) / math.exp(response.rollout[t])
        value = 0.0 if side else weight * advantage * response.new[t]
        terms.append(Term(value, side, low or high))
    return terms


# --- The objective and its divisor ---------------------------------------------------------------


# By response, sequences, tokens and the longest response.
DIVISORS: dict[str, Callable[[Response, int, int, int], float]] = {
    "sequence_mean": lambda i, n, tokens, longest: 1 / (n * len(i)),
    "token_mean": lambda i, n, tokens, longest: 1 / tokens,
    "token_sum": lambda i, n, tokens, longest: 1 / n,
    "constant_length": lambda i, n, tokens, longest: 1 / (n * longest),
}


# What divides each token's term; a single term for a response is divided by N.
PAPERS: dict[str, tuple[Callable[..., Term | list[Term]], str]] = {
    "gspo": (gspo, "sequence_mean"),
    "gspo_token": (gspo_token, "sequence_mean"),
    "grpo": (grpo, "sequence_mean"),
    "dapo": (grpo, "token_mean"),
    "dr_grpo": (grpo, "constant_length"),
    "cispo": (cispo, "token_mean"),
    "sapo": (sapo, "sequence_mean"),
    "gmpo": (gmpo, "token_sum"),  # its terms are parts of one for the response already
    "luspo": (luspo, "token_sum"),
    "minirl": (minirl, "token_sum"),
    "reinforce_leave_one_out": (reinforce_leave_one_out, "sequence_mean"),
}


def correction_weights(
    name: str, response: Response, high: float = math.inf, low: float = 0.0
) -> list[float]:
    """The weight of each token for k = pi_old / pi_rollout."""
    logs = [o - m for o, m in zip(response.old, response.rollout, strict=True)]
    ratios = [math.exp(log) for log in logs]
    mean = math.exp(sum(logs) / len(logs))
    if name == "token_tis":
        return [min(k, high) for k in ratios]
    if name == "icepop":
        return [k if low <= k <= high else 0.0 for k in ratios]
    one = {
        "sequence_tis": min(mean, high),
        "sequence_mask": 1.0 if low <= mean <= high else 0.0,
        "sequence_product_tis": min(math.prod(ratios), high),
        "k3_mask": 1.0
        if sum(k - 1 - log for k, log in zip(ratios, logs, strict=True)) / len(logs) <= high
        else 0.0,
    }[name]
    return [one] * len(logs)


def divergence(kind: str, new: Tensor, reference: float) -> Tensor:
    """Schulman's estimators of KL(pi, reference) from a sample of pi."""
    log = reference - new
    return {"k1": -log, "k2": log**2 / 2, "k3": torch.exp(log) - log - 1}[kind]


def expect(
    name: str,
    inputs: LossInputs,
    *,
    longest: int = 40,
    numbers: dict[str, float] | None = None,
    correction: Callable[[Response], list[float]] | None = None,
    off_policy_mask: float | None = None,
    kl: tuple[str, float] | None = None,
    entropy_coefficient: float = 0.0,
) -> Expected:
    """The loss of a micro-batch: -J + coefficient * KL - coefficient * entropy."""
    new = inputs.logprobs.detach().double().requires_grad_()
    entropy = inputs.entropy.detach().double().requires_grad_()
    terms_of, divided = PAPERS[name]
    divisor_of = DIVISORS[divided]
    numbers = NUMBERS[name] if numbers is None else numbers
    sizes = inputs.global_num_sequences, inputs.global_num_tokens, longest
    loss = torch.zeros((), dtype=torch.float64)
    found = Expected(loss, new, entropy)
    for i in range(len(inputs.advantages)):
        response = _response(inputs, i, new, entropy)
        if len(response) == 0:
            continue
        terms = terms_of(response, **numbers)
        if isinstance(terms, Term):
            # the same for every token, each carrying its share of the response's one term
            terms = [terms._replace(value=terms.value / len(response))] * len(response)
            divisor = 1 / inputs.global_num_sequences
        else:
            divisor = divisor_of(response, *sizes)
        weights = [1.0] * len(response) if correction is None else correction(response)
        if off_policy_mask is not None and response.advantage < 0:
            drift = sum(
                o - float(n.detach()) for o, n in zip(response.old, response.new, strict=True)
            )
            if drift / len(response) > off_policy_mask:
                weights = [0.0] * len(response)
        for t, (weight, term) in enumerate(zip(weights, terms, strict=True)):
            loss = loss - divisor * weight * term.value
            if kl is not None:
                penalty = divergence(kl[0], response.new[t], response.reference[t])
                # a penalty is a token's whatever the ratio: by the objective's own divisor
                by = DIVISORS["sequence_mean"] if name == "gmpo" else divisor_of
                loss = loss + by(response, *sizes) * kl[1] * penalty
            loss = loss - entropy_coefficient * response.entropy[t] / inputs.global_num_tokens
        found.binding.append([term.side for term in terms])
        found.outside.append([term.outside for term in terms])
        found.weights.append(weights)
    gradients = torch.autograd.grad(loss + 0 * (new.sum() + entropy.sum()), (new, entropy))
    found.loss, (found.gradient, found.entropy_gradient) = loss.detach(), gradients
    return found


def _response(inputs: LossInputs, i: int, new: Tensor, entropy: Tensor) -> Response:
    chosen = [
        t
        for t in range(len(new))
        if int(inputs.sequence_index[t]) == i and float(inputs.mask[t]) == 1.0
    ]

    def numbers(vector: Tensor | None) -> list[float]:
        return [math.nan] * len(chosen) if vector is None else [float(vector[t]) for t in chosen]

    advantage = float(inputs.advantages[i])
    own = inputs.token_advantages
    return Response(
        new=[new[t] for t in chosen],
        old=numbers(inputs.old_logprobs),
        rollout=numbers(inputs.rollout_logprobs),
        reference=numbers(inputs.reference_logprobs),
        entropy=[entropy[t] for t in chosen],
        advantage=advantage,
        token_advantages=[advantage] * len(chosen) if own is None else numbers(own),
    )
