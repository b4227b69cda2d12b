"""The objectives as the papers print them, computed for one response and one token at a time, in
float64.

The code uses nothing of the package except the records of inputs and outputs. N responses y_i have
advantages A_i. D_it = log pi(y_it) - log pi_old(y_it). |y_i| is the number of tokens inside the
mask. The papers' mu is the policy as the rollout engine computed it.

A new objective needs one formula and one entry in PAPERS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_megatron.types import LossInputs

# The name of the bound that decides the value ("low", "high", or "" if no bound does), and whether
# the ratio is outside the range of the clip.
Clip = tuple[str, bool]


class Term(NamedTuple):
    """A summand of an objective, its importance ratio, and the effect of the clip."""

    value: Tensor | float
    ratio: float
    clip: Clip | list[Clip] = ("", False)  # a list has the clip of each token of the response


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

    def drift(self) -> list[float]:
        """D_it of each token."""
        return [float(n.detach()) - o for n, o in zip(self.new, self.old, strict=True)]

    def token_ratio(self, t: int) -> Tensor:
        return torch.exp(self.new[t]) / math.exp(self.old[t])

    def geometric_ratio(self) -> Tensor:
        return torch.exp(sum(n - o for n, o in zip(self.new, self.old, strict=True)) / len(self))

    def product_ratio(self) -> Tensor:
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(self)):
            product = product * self.token_ratio(t)
        return product


def clipped(
    ratio: Tensor, advantage: float, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> Term:
    """min(r A, clip(r, 1 - low, 1 + high) A), but not below dual_clip * A where A < 0."""
    value = float(ratio.detach())
    bound = min(max(value, 1 - clip_low), 1 + clip_high)
    if advantage < 0 and value > dual_clip:
        return Term(dual_clip * advantage, value, ("high", True))
    if bound * advantage < value * advantage:
        return Term(bound * advantage, value, ("low" if value < 1 else "high", True))
    return Term(ratio * advantage, value, ("", bound != value))


# --- The objectives of whole responses: one term for each response ------------------------------


def gspo(response: Response, **numbers: float) -> Term:
    """arXiv 2507.18071, eqs. 5 and 7."""
    return clipped(response.geometric_ratio(), response.advantage, **numbers)


def luspo(response: Response, **numbers: float) -> Term:
    """arXiv 2602.05261: the term of GSPO times |y_i|."""
    term = gspo(response, **numbers)
    return term._replace(value=term.value * len(response))


def reinforce_leave_one_out(response: Response, **numbers: float) -> Term:
    """arXiv 2402.14740: a response is one action with probability prod_t pi(y_it)."""
    return clipped(response.product_ratio(), response.advantage, **numbers)


def gmpo(response: Response, log_clip: float) -> Term:
    """arXiv 2507.20673, eq. 4: (prod_t |min(w_it A, clip(w_it, e^-c, e^c) A)|)^(1/|y|) sgn(A). The
    clip limits each token's w_it. The ratio is the geometric mean of the limited w_it."""
    advantage = response.advantage
    product = torch.ones((), dtype=torch.float64)
    left, clips = [], []
    for t in range(len(response)):
        ratio = response.token_ratio(t)
        value = float(ratio.detach())
        bound = min(max(value, math.exp(-log_clip)), math.exp(log_clip))
        binds = bound * advantage < value * advantage
        product = product * abs((bound if binds else ratio) * advantage)
        left.append(bound if binds else value)
        side = "low" if value < 1 else "high"
        clips.append((side if binds else "", bound != value))
    mean = math.prod(left) ** (1 / len(response))
    if advantage == 0:
        return Term(0.0, mean, clips)
    return Term(product ** (1 / len(response)) * math.copysign(1.0, advantage), mean, clips)


# --- The objectives of tokens: one term for each token -------------------------------------------


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
        terms.append(Term(weight * advantage * response.new[t], ratio, (side, over)))
    return terms


def sapo(response: Response, tau_positive: float, tau_negative: float) -> list[Term]:
    """arXiv 2511.20347: (4 / tau) sigmoid(tau (w_it - 1)) A, tau by the sign of A."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        tau = tau_positive if advantage > 0 else tau_negative
        ratio = response.token_ratio(t)
        gate = 1 / (1 + torch.exp(-tau * (ratio - 1)))
        terms.append(Term(4 / tau * gate * advantage, float(ratio.detach())))
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
        terms.append(Term(value, ratio, (side, low or high)))
    return terms


def _step(response: Response, t: int) -> tuple[float, float]:
    """pi_old and pi of a token."""
    return math.exp(response.old[t]), math.exp(float(response.new[t].detach()))


def bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def dppo(response: Response, kind: str, max_divergence: float) -> list[Term]:
    """arXiv 2602.04879: M_it w_it A. M_it is 0 for tokens that have moved too far in the direction
    of their advantage: where A > 0 and pi > pi_old, or A < 0 and pi < pi_old, and the divergence of
    the two exceeds the bound. The divergence is the binary total variation or the binary KL."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        ratio, (old, new) = response.token_ratio(t), _step(response, t)
        far = abs(new - old) if kind == "tv" else bernoulli_kl(old, new)
        outside = far > max_divergence
        side = (
            "high" if new > old and advantage > 0 else "low" if new < old and advantage < 0 else ""
        )
        side = side if outside else ""
        terms.append(
            Term(0.0 if side else ratio * advantage, float(ratio.detach()), (side, outside))
        )
    return terms


def ipo(response: Response, max_divergence: float, log_ratio_penalty: float) -> list[Term]:
    """prime-rl's loss: w_it A where |pi - pi_old| is within the bound, minus tau (log w_it)^2."""
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        ratio, (old, new) = response.token_ratio(t), _step(response, t)
        outside = abs(new - old) > max_divergence
        value = -log_ratio_penalty * torch.log(ratio) ** 2
        value = value if outside else value + ratio * advantage
        side = ("high" if new > old else "low") if outside and advantage != 0 else ""
        terms.append(Term(value, float(ratio.detach()), (side, outside)))
    return terms


def vespo(
    response: Response,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> list[Term]:
    """arXiv 2602.10693: sg[W^k e^(lambda (1 - W))] A log pi(y_it), W = prod_t w_it."""
    product = float(response.product_ratio().detach())
    terms = []
    for t, advantage in enumerate(response.token_advantages):
        k, fall = (k_positive, lambda_positive) if advantage >= 0 else (k_negative, lambda_negative)
        weight = product**k * math.exp(fall * (1 - product))
        terms.append(Term(weight * advantage * response.new[t], product))
    return terms


# --- The table -----------------------------------------------------------------------------------


class Paper(NamedTuple):
    """A formula, the aggregation, and the numbers of the paper. The aggregation divides each
    token's term. If an objective has one term for each response, that term is divided by N."""

    terms: Callable[..., Term | list[Term]]
    aggregation: str
    numbers: dict[str, float]
    spread: float  # log-ratios of this size reach the bounds in `numbers` for some tokens


_SEQUENCES = {"clip_low": 3e-4, "clip_high": 4e-4}
_PPO = {"clip_low": 0.2, "clip_high": 0.2}
_GRPO = {"clip_low": 0.2, "clip_high": 0.27}
PAPERS: dict[str, Paper] = {
    "gspo": Paper(gspo, "sequence_mean", _SEQUENCES, 1e-3),
    "gspo_token": Paper(gspo_token, "sequence_mean", _SEQUENCES, 1e-3),
    "grpo": Paper(grpo, "sequence_mean", _GRPO, 0.4),
    "dapo": Paper(grpo, "token_mean", {"clip_low": 0.2, "clip_high": 0.28}, 0.4),
    "dr_grpo": Paper(grpo, "constant_length", _PPO, 0.4),
    "cispo": Paper(cispo, "token_mean", {"clip_high": 4.0}, 1.2),  # weights up to 5
    "sapo": Paper(sapo, "sequence_mean", {"tau_positive": 1.0, "tau_negative": 1.05}, 0.4),
    "gmpo": Paper(gmpo, "sequence_mean", {"log_clip": 0.4}, 0.4),
    "luspo": Paper(luspo, "token_sum", _SEQUENCES, 1e-3),
    "minirl": Paper(minirl, "token_sum", _GRPO, 0.4),
    "reinforce_leave_one_out": Paper(reinforce_leave_one_out, "sequence_mean", _PPO, 0.1),
    "dppo_tv": Paper(partial(dppo, kind="tv"), "token_mean", {"max_divergence": 0.15}, 0.6),
    "dppo_kl": Paper(partial(dppo, kind="kl"), "token_mean", {"max_divergence": 0.05}, 0.6),
    "ipo": Paper(ipo, "token_mean", {"max_divergence": 0.1, "log_ratio_penalty": 1e-3}, 0.6),
    "vespo": Paper(
        vespo,
        "token_mean",
        {
            "k_positive": 2.0,
            "lambda_positive": 3.0,
            "k_negative": 3.0,
            "lambda_negative": 2.0,
        },
        0.1,
    ),
}
LONGEST = 40  # rollout.max_response_tokens in the tests


def divisor(aggregation: str, length: int, inputs: LossInputs) -> float:
    """The factor of a token's term: 1 / the divisor of the aggregation."""
    sequences, tokens = inputs.global_num_sequences, inputs.global_num_tokens
    return {
        "sequence_mean": 1 / (sequences * length),
        "token_mean": 1 / tokens,
        "token_sum": 1 / sequences,
        "constant_length": 1 / (sequences * LONGEST),
    }[aggregation]


TOKEN_MASKS: dict[str, Callable[[float, float, float], bool]] = {
    "token_k1_mask": lambda k, low, high: low <= k <= high,
    "token_k2_mask": lambda k, low, high: math.log(k) ** 2 / 2 <= high,
    "token_k3_mask": lambda k, low, high: k - 1 - math.log(k) <= high,
}
OF_TOKENS = ("token_tis", "icepop", "kpop", *TOKEN_MASKS)


def correction_weights(
    name: str, response: Response, high: float = math.inf, low: float = 0.0
) -> list[float]:
    """The weight of each token, from k = pi_old / pi_rollout."""
    logs = [o - m for o, m in zip(response.old, response.rollout, strict=True)]
    ratios = [math.exp(log) for log in logs]
    mean = math.exp(sum(logs) / len(logs))
    if name == "token_tis":
        return [min(k, high) for k in ratios]
    if name == "icepop":
        return [k if low <= k <= high else 0.0 for k in ratios]
    if name == "kpop":
        return [
            k if max(bernoulli_kl(p, q), bernoulli_kl(q, p)) <= high else 0.0
            for k, p, q in zip(ratios, map(math.exp, response.old), map(math.exp, response.rollout))
        ]
    if name in TOKEN_MASKS:
        return [float(TOKEN_MASKS[name](k, low, high)) for k in ratios]
    one = {
        "sequence_tis": min(mean, high),
        "sequence_mask": 1.0 if low <= mean <= high else 0.0,
        "sequence_product_tis": min(math.prod(ratios), high),
        "k3_mask": float(sum(k - 1 - math.log(k) for k in ratios) / len(logs) <= high),
        "worst_token_mask": float(all(low <= k <= high for k in ratios)),
    }[name]
    return [one] * len(logs)


def divergence(kind: str, new: Tensor, reference: float, old: float) -> Tensor:
    """Schulman's estimators of KL(pi, reference) from a sample of pi. k3_unbiased takes a sample of
    pi_old and multiplies by the ratio (arXiv 2512.02556)."""
    log = reference - new
    k3 = torch.exp(log) - log - 1
    ratio = torch.exp(new) / math.exp(old)
    return {"k1": -log, "k2": log**2 / 2, "k3": k3, "k3_unbiased": ratio * k3}[kind]


def corrections_of(keys: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The bounds of each correction of a section. A section with several corrections gives its
    bounds by their names."""
    names = keys.get("correction", "none")
    names = names if isinstance(names, list) else [] if names == "none" else [names]
    sides = {side: keys[k] for side in ("low", "high") if (k := f"correction_{side}") in keys}
    return {
        name: {
            side: bound[name] if isinstance(bound, dict) else bound
            for side, bound in sides.items()
            if not isinstance(bound, dict) or name in bound
        }
        for name in names
    }


# --- A whole batch -------------------------------------------------------------------------------


@dataclass
class Expected:
    """A loss (which is minimised), its gradients [tokens], and the metrics."""

    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor
    means: dict[str, list[float]] = field(default_factory=dict)  # [sum, count]
    values: dict[str, list[float]] = field(default_factory=dict)

    def equals(self, other: Expected) -> bool:
        own, others = ((each.loss, each.gradient, each.entropy_gradient) for each in (self, other))
        return self.means.keys() == other.means.keys() and all(map(torch.equal, own, others))

    def count(self, key: str, values: Iterable[float]) -> None:
        values = [float(value) for value in values]
        self.means[key] = [sum(values), len(values)]


def expect(name: str, inputs: LossInputs, **keys: Any) -> Expected:
    """The results that objective `name` must return for these keys of its section: the loss -J +
    kl_coefficient * KL - entropy_coefficient * entropy, and all metrics."""
    paper = PAPERS[name]
    numbers = paper.numbers | {k: keys[k] for k in (*paper.numbers, "dual_clip") if k in keys}
    aggregation = keys.get("aggregation", paper.aggregation)
    corrections, kl = corrections_of(keys), keys.get("kl", "none")
    new = inputs.logprobs.detach().double().requires_grad_()
    entropy = inputs.entropy.detach().double().requires_grad_()
    policy = penalty = bonus = torch.zeros((), dtype=torch.float64)
    rows: list[tuple[Response, list[Term], list[Clip], dict[str, list[float]], bool]] = []
    geometric = []
    for i in range(len(inputs.advantages)):
        response = _response(inputs, i, new, entropy)
        if len(response) == 0:
            continue
        geometric.append(math.exp(sum(response.drift()) / len(response)))
        found = paper.terms(response, **numbers)
        terms = found if isinstance(found, list) else [found]
        clips = [term.clip for term in terms] if isinstance(found, list) else found.clip
        clips = clips if isinstance(clips, list) else [clips] * len(response)
        of_each = {
            each: correction_weights(each, response, **bounds)
            for each, bounds in corrections.items()
        }
        weights = [math.prod(row) for row in zip([1.0] * len(response), *of_each.values())]
        mask = keys.get("off_policy_mask")
        dropped = mask is not None and response.advantage < 0
        dropped = dropped and -sum(response.drift()) / len(response) > mask
        by = divisor(aggregation, len(response), inputs)
        of_term = by if isinstance(found, list) else 1 / inputs.global_num_sequences
        for term, weight in zip(terms, weights, strict=False):
            policy = policy - of_term * weight * (not dropped) * term.value
        if kl != "none":
            for n, old, reference in zip(
                response.new, response.old, response.reference, strict=True
            ):
                # Each token has a penalty. The sum of the penalties is divided by the same number
                # as the objective's loss.
                penalty = penalty + by * divergence(kl, n, reference, old)
        bonus = bonus + sum(response.entropy) / inputs.global_num_tokens
        rows.append((response, terms, clips, of_each | {"": weights}, dropped))
    in_loss = kl != "none" and keys.get("kl_in") != "reward"
    loss = policy - keys.get("entropy_coefficient", 0.0) * bonus
    loss = loss + keys["kl_coefficient"] * penalty if in_loss else loss
    gradients = torch.autograd.grad(loss + 0 * (new.sum() + entropy.sum()), (new, entropy))
    expected = Expected(loss.detach(), *gradients)
    expected.values["ratio/sequence"] = geometric
    _count_metrics(expected, rows, keys)
    global_count, count = inputs.global_num_sequences, len(inputs.advantages)
    if aggregation == "token_mean":
        global_count, count = inputs.global_num_tokens, sum(len(row[0]) for row in rows)
    expected.means["loss"] = [float(policy.detach()) * global_count, count]
    if in_loss:
        expected.means["kl/penalty"] = [float(penalty.detach()) * global_count, count]
    return expected


def _count_metrics(expected: Expected, rows: list[Any], keys: dict[str, Any]) -> None:
    """Add the metrics that are sums or counts, over tokens or responses."""
    drifts = [d for response, *_ in rows for d in response.drift()]
    expected.values["ratio/token"] = [math.exp(d) for d in drifts]
    expected.count("kl/k1", (-d for d in drifts))
    expected.count("kl/k3", (math.exp(d) - 1 - d for d in drifts))
    expected.count("policy/entropy", (e.detach() for row in rows for e in row[0].entropy))
    left = [r - float(n.detach()) for row in rows for n, r in zip(row[0].new, row[0].reference)]
    if not any(map(math.isnan, left)):
        expected.count("kl/reference_k1", (-d for d in left))
        expected.count("kl/reference_k3", (math.exp(d) - 1 - d for d in left))
    ratios = [term.ratio for row in rows for term in row[1]]
    expected.count("ratio/weight", ratios)
    expected.count("ratio/squared_weight", (ratio**2 for ratio in ratios))
    for key, sides in {"binding": ("low", "high"), "low": ("low",), "high": ("high",)}.items():
        flags = [[side in sides for side, _ in clips] for _, _, clips, _, _ in rows]
        expected.count(f"clip/token/{key}", (flag for row in flags for flag in row))
        expected.count(f"clip/sequence/{key}", map(any, flags))
    flags = [[outside for _, outside in clips] for _, _, clips, _, _ in rows]
    expected.count("clip/token/outside", (flag for row in flags for flag in row))
    expected.count("clip/sequence/outside", map(any, flags))
    names = list(corrections_of(keys))
    for name in ("", *(names if len(names) > 1 else ())) if names else ():
        of_tokens = bool({*([name] if name else names)} & {*OF_TOKENS})
        weights = [w for row in rows for w in (row[3][name] if of_tokens else row[3][name][:1])]
        prefix = f"correction/{name}" if name else "correction"
        expected.count(f"{prefix}/weight", weights)
        expected.count(f"{prefix}/squared_weight", (w * w for w in weights))
        expected.count(f"{prefix}/dropped", (w == 0 for w in weights))
    if "off_policy_mask" in keys:
        expected.count("off_policy/dropped", (row[4] for row in rows))


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
