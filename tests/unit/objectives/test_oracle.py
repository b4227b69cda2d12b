"""Every objective, with every part and option, compared with the loops of papers.py.

There is one table of cases. Each case is compared on the whole batch, on its micro-batches, with
its tokens in another order, and divided over the ranks of context parallelism. The comparison
covers the loss, the gradients and every metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.objectives import CORRECTIONS, RECIPES, objective_problems
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    EXACT,
    as_mini_batch,
    choose,
    inputs_of,
    make_objective,
    micro_batch,
    owners,
    poisoned,
    run_shards,
    without_tokens,
)
from tests.unit.objectives.papers import PAPERS, Expected, expect

OF_TOKENS = [
    *("gspo_token", "grpo", "dapo", "dr_grpo", "cispo", "sapo", "minirl"),
    *("dppo_tv", "dppo_kl", "ipo", "vespo"),
]


class Case(NamedTuple):
    """A case: the name of an objective, keys of its section, and options of the batch."""

    name: str
    keys: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return "-".join(map(str, (self.name, *self.keys.values(), *self.options)))


# --- The table -----------------------------------------------------------------------------------

# Numbers that differ from those in the papers.
OTHER_NUMBERS = {
    "gspo": {"clip_low": 1e-3, "clip_high": 5e-4},
    "grpo": {"clip_low": 0.3, "clip_high": 0.1},
    "cispo": {"clip_high": 1.5},
    "sapo": {"tau_positive": 1.6, "tau_negative": 0.7},
    "gmpo": {"log_clip": 0.2},
    "minirl": {"clip_low": 0.3, "clip_high": 0.1},
    "dppo_tv": {"max_divergence": 0.05},
    "dppo_kl": {"max_divergence": 0.01},
    "ipo": {"max_divergence": 0.05, "log_ratio_penalty": 0.7},
    "vespo": {"k_positive": 1.5, "lambda_positive": 0.5, "k_negative": 0.5, "lambda_negative": 4.0},
}
DUAL_CLIPS = {"gspo": 1.001, "gspo_token": 1.001, "grpo": 1.5, "dapo": 1.5}
# For each correction: bounds, and a size of log pi_old - log pi_rollout at which the bounds bind
# for some weights.
BOUNDS: dict[str, tuple[dict[str, float], float]] = {
    "token_tis": ({"correction_high": 2.0}, 0.5),
    "icepop": ({"correction_low": 0.5, "correction_high": 5.0}, 1.0),
    "sequence_tis": ({"correction_high": 1.3}, 0.5),
    "sequence_mask": ({"correction_low": 0.99, "correction_high": 1.01}, 0.01),
    "sequence_product_tis": ({"correction_high": 2.0}, 0.3),
    # a difference so large that exchanging the two policies changes the result
    "k3_mask": ({"correction_high": 0.4}, 0.7),
    "kpop": ({"correction_high": 0.1}, 0.7),
    "token_k1_mask": ({"correction_low": 0.6, "correction_high": 1.8}, 0.5),
    "token_k2_mask": ({"correction_high": 0.1}, 0.5),
    "token_k3_mask": ({"correction_high": 0.1}, 0.5),
    "worst_token_mask": ({"correction_low": 0.3, "correction_high": 3.5}, 0.5),
}
# Several corrections at once: masks of sequences and of tokens, and one weight. The bounds are
# given by name.
PAIRS: list[tuple[str, list[str], dict[str, dict[str, float]]]] = [
    ("gspo", ["sequence_mask", "sequence_tis"], {"correction_low": {"sequence_mask": 0.8},
     "correction_high": {"sequence_mask": 1.5, "sequence_tis": 1.1}}),
    ("grpo", ["token_tis", "sequence_mask"], {"correction_low": {"sequence_mask": 0.8},
     "correction_high": {"sequence_mask": 1.4, "token_tis": 1.2}}),
    ("reinforce_leave_one_out", ["sequence_mask", "sequence_product_tis"],
     {"correction_low": {"sequence_mask": 0.8},
      "correction_high": {"sequence_mask": 1.4, "sequence_product_tis": 1.5}}),
    ("dapo", ["worst_token_mask", "k3_mask", "kpop"], {"correction_low": {"worst_token_mask": 0.5},
     "correction_high": {"worst_token_mask": 4.0, "k3_mask": 0.2, "kpop": 0.2}}),
    ("minirl", ["k3_mask", "token_k2_mask", "sequence_mask"],
     {"correction_low": {"sequence_mask": 0.7},
      "correction_high": {"sequence_mask": 1.6, "k3_mask": 0.3, "token_k2_mask": 0.1}}),
]  # fmt: skip


def allowed(keys: dict[str, Any]) -> bool:
    return not list(objective_problems(ObjectiveSection(**keys)))


def cases() -> Iterator[Case]:
    for name, paper in PAPERS.items():
        yield Case(name)
        for kl in ("k1", "k2", "k3", "k3_unbiased"):
            keys = {"kl": kl, "kl_coefficient": 0.3, "entropy_coefficient": 0.2}
            keys |= {"off_policy_mask": 0.3 * paper.spread}
            yield Case(name, keys, {"with_reference": True})
        for correction, (bounds, mismatch) in BOUNDS.items():
            keys = {"correction": correction, **bounds}
            if allowed({"name": name, **keys}):
                yield Case(name, keys, {"mismatch": mismatch})
    for name, corrections, bounds in PAIRS:
        yield Case(name, {"correction": corrections, **bounds}, {"mismatch": 0.5})
    for name in OF_TOKENS:
        yield Case(name, {}, {"with_token_advantages": True})
    for name, numbers in OTHER_NUMBERS.items():
        yield Case(name, numbers)
    for name, bound in DUAL_CLIPS.items():
        yield Case(name, {"rule": "dual_clip", "dual_clip": bound})
    for name in ("grpo", "dapo", "cispo"):
        for aggregation in ("sequence_mean", "token_mean", "token_sum", "constant_length"):
            yield Case(name, {"aggregation": aggregation})
    in_reward = {"kl": "k3", "kl_coefficient": 0.7, "kl_in": "reward"}
    yield Case("grpo", in_reward, {"with_reference": True})
    both = {"correction": "token_tis", "correction_high": 1.05, "off_policy_mask": 0.1}
    yield Case("grpo", both)


CASES = list(cases())


def batch(case: Case, seed: int, poison: float) -> LossInputs:
    """A batch with the value `poison` outside the mask. Seed 1 is a whole mini-batch, and seed 2
    has a sequence without tokens."""
    inputs = inputs_of(case.name, seed, **case.options)
    if seed == 1:
        inputs = as_mini_batch(inputs)
    if seed == 2:
        inputs = without_tokens(inputs, 4)
    return poisoned(inputs, poison)


# --- The comparison ------------------------------------------------------------------------------

# A part of a batch on one rank: the numbers of its tokens in order, the inputs, and the outputs.
Part = tuple[Tensor, LossInputs, LossOutputs]
Objective = Callable[[LossInputs], LossOutputs]


def whole(inputs: LossInputs, objective: Objective) -> list[Part]:
    every = choose(inputs, torch.arange(len(inputs.mask)))
    return [(torch.arange(len(inputs.mask)), every, objective(every))]


def shuffled(inputs: LossInputs, objective: Objective) -> list[Part]:
    order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(0))
    part = choose(inputs, order)
    return [(order, part, objective(part))]


def micro_batches(inputs: LossInputs, objective: Objective) -> list[Part]:
    parts = []
    for first, last in ((0, 1), (1, 4), (4, 6)):
        part = micro_batch(inputs, first, last)
        mine = (inputs.sequence_index >= first) & (inputs.sequence_index < last)
        parts.append((mine.nonzero()[:, 0], part, objective(part)))
    return parts


def shards(kind: str, number: int) -> Callable[[LossInputs, Objective], list[Part]]:
    def cut(inputs: LossInputs, objective: Objective) -> list[Part]:
        owner = owners(kind, len(inputs.mask), number)
        parts = enumerate(run_shards(inputs, owner, objective))
        return [((owner == shard).nonzero()[:, 0], *part) for shard, part in parts]

    return cut


DIVISIONS = {
    "shuffled": shuffled,
    "micro-batches": micro_batches,
    "zigzag over 2": shards("zigzag", 2),
    "zigzag over 3": shards("zigzag", 3),
    "random over 4": shards("random", 4),
    "all on one of 2": shards("one_shard_has_all", 2),
}


def differences(expected: Expected, parts: list[Part]) -> Iterator[str]:
    """The differences between the expected results and the sum over the parts of a batch."""
    gradient = torch.zeros_like(expected.gradient)
    entropy_gradient = torch.zeros_like(expected.gradient)
    for rows, inputs, outputs in parts:
        assert torch.isfinite(outputs.loss)
        outputs.loss.backward()  # must also work for a shard without tokens
        gradient[rows] = inputs.logprobs.grad
        if inputs.entropy.grad is not None:
            entropy_gradient[rows] = inputs.entropy.grad
        for pair in outputs.means.values():
            assert pair.shape == (2,) and pair.dtype == torch.float64 and not pair.requires_grad
        for values in outputs.values.values():
            assert values.dim() == 1 and not values.requires_grad
        if outputs.means.keys() != expected.means.keys():
            yield f"metrics {outputs.means.keys() ^ expected.means.keys()}"
            return
    pairs = {
        "gradient": (gradient, expected.gradient),
        "gradient of the entropy": (entropy_gradient, expected.entropy_gradient),
    }
    for key, pair in expected.means.items():
        found = sum(outputs.means[key] for *_, outputs in parts)
        pairs[key] = found, torch.tensor(pair, dtype=torch.float64)
    for key, values in expected.values.items():
        found = torch.cat([outputs.values[key] for *_, outputs in parts])
        found = found[~found.isnan()]  # without fully masked responses
        pairs[key] = found.sort().values, torch.tensor(sorted(values), dtype=torch.float64)
    for key, (found, wanted) in pairs.items():
        if found.shape != wanted.shape or not torch.allclose(found, wanted, **EXACT):
            yield f"{key}: {found.tolist()} instead of {wanted.tolist()}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_division_of_a_batch_gives_what_the_papers_print(case: Case) -> None:
    objective, largest = make_objective(case.name, **case.keys), 0.0
    for seed, poison in enumerate((math.nan, math.inf, -math.inf, 50.0)):
        inputs = batch(case, seed, poison)
        expected = expect(case.name, inputs, **case.keys)
        parts = whole(inputs, objective)
        assert not list(differences(expected, parts)), f"seed {seed}"
        outputs = parts[0][2]
        torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
        largest = max(largest, float(expected.gradient.abs().max()))
        if seed == 0:
            for how, divide in DIVISIONS.items():
                parts = divide(inputs, objective)
                assert not list(differences(expected, parts)), how
                if how == "micro-batches":
                    loss = sum(outputs.loss.detach() for *_, outputs in parts)
                    torch.testing.assert_close(loss, expected.loss, **EXACT)
        if seed == 1:  # the micro-batch is the whole mini-batch, so the metric is its loss
            reduced = {key: float(a / b) for key, (a, b) in outputs.means.items()}
            assert objective.complete(reduced)["loss"] == pytest.approx(float(expected.loss))
    assert largest > 1e-4, "the comparison is of zeros"


@pytest.mark.parametrize("case", [case for case in CASES if case.keys], ids=str)
def test_every_key_of_a_case_changes_what_is_expected(case: Case) -> None:
    same = case.keys.keys() - {"rule", "kl_coefficient"}
    if "kl_in" in case.keys:  # the penalty is then in the reward and not in the loss
        same.remove("kl")
    if case.keys.get("aggregation") == PAPERS[case.name].aggregation:
        same.remove("aggregation")
    for seed in range(20):
        inputs = batch(case, seed, 0.0)
        expected = expect(case.name, inputs, **case.keys)
        for key in list(same):
            others = {name: value for name, value in case.keys.items() if name != key}
            other = expect(case.name, inputs, **others)
            if not other.equals(expected):
                same.remove(key)
        if not same:
            break
    assert not same, "without effect in 20 batches"


def test_the_table_has_every_objective_and_correction() -> None:
    assert RECIPES.keys() == PAPERS.keys()
    assert BOUNDS.keys() == CORRECTIONS.keys()
    assert BOUNDS.keys() <= {str(case.keys.get("correction")) for case in CASES}


@EVERY_OBJECTIVE
def test_the_batches_make_both_sides_of_the_clip_bind(name: str) -> None:
    sides = {"cispo": ["high"], "sapo": [], "vespo": []}.get(name, ["low", "high"])
    both = [expect(name, batch(Case(name), seed, 0.0)).means for seed in range(4)]
    for level in ("token", "sequence"):
        for side in ("low", "high"):
            binding = sum(means[f"clip/{level}/{side}"][0] for means in both)
            assert (binding > 0) == (side in sides), (level, side)
    # Some ratios are outside the range on the side where the clip has no effect.
    outside, binding = (
        sum(m[f"clip/token/{key}"][0] for m in both) for key in ("outside", "binding")
    )
    assert outside > binding or name in ("cispo", "sapo", "vespo", "ipo")


@EVERY_OBJECTIVE
def test_float32_follows_float64(name: str) -> None:
    inputs = inputs_of(name, 11, dtype=torch.float32)
    expected = expect(name, inputs)
    outputs = make_objective(name)(inputs)
    outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    # A ratio near 1 is precise to 1e-7. Sums over a sequence have a size of 10.
    torch.testing.assert_close(outputs.loss.detach().double(), expected.loss, rtol=1e-6, atol=3e-7)
    gradient = inputs.logprobs.grad.double()
    torch.testing.assert_close(gradient, expected.gradient, rtol=1e-5, atol=1e-7)
