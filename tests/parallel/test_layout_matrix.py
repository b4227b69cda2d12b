"""Loss, gradient norm, metrics and the gradient of every parameter are the same for every
sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.branches import branched_batch
from tests.parallel.matrix import (
    DIMENSIONS,
    LAYOUT_DIMENSIONS,
    LAYOUTS,
    OBJECTIVE_DIMENSIONS,
    QUICK_DIMENSIONS,
    Case,
    Dimensions,
    covering_selection,
    each_objective,
    full_product,
)
from tests.parallel.models import VOCAB_SIZE
from tests.parallel.updates import FP64_TOLERANCE_OF_ROUTERS, Updates, assert_follows_formulas

FEWER = covering_selection(QUICK_DIMENSIONS)
SELECTION = covering_selection(LAYOUT_DIMENSIONS)
OBJECTIVES = covering_selection(OBJECTIVE_DIMENSIONS)


@pytest.mark.parametrize(
    ("selection", "dimensions"),
    [
        (FEWER, QUICK_DIMENSIONS),
        (SELECTION, LAYOUT_DIMENSIONS),
        (OBJECTIVES, OBJECTIVE_DIMENSIONS),
    ],
)
def test_any_two_values_of_two_dimensions_meet_in_the_selection(
    selection: list[Case], dimensions: Dimensions
) -> None:
    met = set()
    for case in selection:
        values = [(name, getattr(case, name)) for name in dimensions]
        met.update(itertools.combinations(values, 2))
    for (a, left), (b, right) in itertools.combinations(dimensions.items(), 2):
        for pair in itertools.product(left, right):
            assert ((a, pair[0]), (b, pair[1])) in met
    # The selection needs at least as many cases as the product of the two largest dimensions. It
    # has hardly more.
    sizes = sorted(map(len, dimensions.values()))
    assert len(selection) < 1.1 * sizes[-1] * sizes[-2]


@pytest.mark.parametrize("objective", DIMENSIONS["objective"])
@pytest.mark.parametrize("split", ["even", "uneven"])
def test_batches_meet_both_clip_bounds_and_stay_inside_too(
    updates: Updates, objective: str, split: str
) -> None:
    metrics = updates.one_rank(Case(objective=objective, split=split)).metrics
    assert metrics["clip/token/low"] > 0.02
    assert metrics["clip/token/high"] > 0.02
    assert metrics["clip/token/binding"] < 0.9
    # Some ratios are outside the range but not clipped, because of the sign of their advantage.
    assert metrics["clip/token/outside"] > metrics["clip/token/binding"] + 0.02


@pytest.mark.parametrize(
    "case",
    [
        *(QUICK := dict.fromkeys(FEWER + each_objective())),
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in dict.fromkeys(SELECTION + OBJECTIVES)
            if each not in QUICK
        ),
    ],
    ids=str,
)
def test_update_is_the_same_on_every_layout(updates: Updates, case: Case) -> None:
    updates.check(case)


# (prompt tokens, response tokens, advantage). The matrix has a token budget of 40; with CP2, a rank
# has at least 20 tokens. With CP4, a packed micro-batch of 40 tokens has 8 chunks.
EDGES = (
    (7, 0, 1.5),  # no response token counts: the sequence counts in the mean, but has no term
    (5, 1, -0.8),  # a response of one token
    (4, 9, 0.0),  # a group without spread
    (6, 3, 0.0),
    # Longer than the budget, so it is alone in its micro-batch. All boundaries of its CP chunks are
    # in the response.
    (1, 95, 1.1),
    (62, 1, -1.3),  # also alone in its micro-batch; only one CP rank has a response token
    (1, 1, 0.9),  # fewer tokens than CP chunks
)


def edge_batch() -> SyntheticBatch:
    """The sequences of EDGES. Some of their ratios are above and some below the clip bounds of GSPO
    and GRPO."""
    generator = torch.Generator().manual_seed(5)
    batch = SyntheticBatch([], [], [], [])
    for number, (prompt, response, advantage) in enumerate(EDGES):
        tokens = torch.randint(VOCAB_SIZE, (prompt + response,), generator=generator)
        shift = (-0.6, -2e-4, 2e-4, 0.6)[number % 4]
        noise = 0.02 * torch.randn(response, generator=generator)
        batch.tokens.append(tokens)
        batch.response_lengths.append(response)
        batch.log_ratios.append(shift + noise - noise.mean() if response else noise)
        batch.advantages.append(advantage)
    return batch


# These layouts cut a sequence, the batch or the vocabulary. GSPO and GRPO differ in how they treat
# ranks without tokens and sequences without spread.
EDGE_LAYOUTS = ("tp=1", "dp=4", "cp=2", "cp=4", "tp=2,cp=2", "pp=2,vpp=2,ep=2,cp=2")


def some(layouts: Sequence[str], ways: Sequence[Any], *, of_each: int = 1) -> list[Any]:
    """The parameters of a test: each layout with each of the ways. `of_each` ways of each layout
    have no mark, in turn; the other ways have the mark `full`."""
    turns = [
        {(of_each * row + n) % len(ways) for n in range(of_each)} for row in range(len(layouts))
    ]
    return [
        pytest.param(layout, *way, marks=() if column in quick else pytest.mark.full)
        for layout, quick in zip(layouts, turns, strict=True)
        for column, way in enumerate(ways)
    ]


@pytest.mark.parametrize(
    ("layout", "objective", "packing", "dispatcher"),
    some(
        EDGE_LAYOUTS,
        [
            ("gspo", True, "alltoall"),
            ("grpo", False, "alltoall"),
            ("gspo_token", True, "allgather"),
        ],
    ),
)
def test_update_on_edge_cases_follows_the_formulas(
    updates: Updates, layout: str, objective: str, packing: bool, dispatcher: str
) -> None:
    case = Case(layout, dispatcher, packing, objective=objective, precision="fp64")
    batch = edge_batch()
    result, explicit = updates.run(case, batch), updates.explicit(case, batch)
    assert_follows_formulas(case, result, explicit, FP64_TOLERANCE_OF_ROUTERS)


def masked_batch() -> SyntheticBatch:
    """Responses in which some tokens are not learnt from: runs of tokens, like a tool's output
    between two turns, and single tokens. The ratios of all these tokens are NaN."""
    generator = torch.Generator().manual_seed(6)
    batch = replace(edge_batch(), masks=[])
    for number, ratios in enumerate(batch.log_ratios):
        turns = torch.rand(len(ratios) // 5 + 1, generator=generator) < 0.6
        mask = turns.repeat_interleave(5)[: len(ratios)]
        mask ^= torch.rand(len(ratios), generator=generator) < 0.1
        if number == 2:
            mask[:] = False  # no token of this response is learnt from
        if number == 4:
            mask[-40:] = False  # these tokens include all tokens of a rank's shard
        batch.masks.append(mask)
        batch.log_ratios[number] = ratios.where(mask, torch.nan)
    return batch


@pytest.mark.parametrize(
    ("layout", "objective", "packing"),
    some(
        ["cp=4", "tp=1", "tp=2,cp=2", "pp=2,vpp=2,ep=2,cp=2"],
        [("gspo", True), ("grpo", False), ("gspo_token", True), ("dapo", True), ("gmpo", True)],
        of_each=2,
    ),
)
def test_masked_tokens_have_no_part_in_an_update(
    updates: Updates, layout: str, objective: str, packing: bool
) -> None:
    case = Case(layout, "alltoall", packing, objective=objective, precision="fp64")
    batch = masked_batch()
    assert 0 < sum(batch.masked_lengths()) < sum(batch.response_lengths)
    result, explicit = updates.run(case, batch), updates.explicit(case, batch)
    assert_follows_formulas(case, result, explicit, FP64_TOLERANCE_OF_ROUTERS)
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics


@pytest.mark.parametrize(
    ("layout", "objective", "packing", "dispatcher"),
    some(
        ["tp=1", "dp=4", "cp=4", "tp=2,pp=2,cp=2", "dp=2,ep=2,cp=2"],
        [
            ("gspo", True, "alltoall"),
            ("luspo", False, "alltoall"),
            ("gspo_token", False, "allgather"),
            ("grpo", True, "allgather"),
        ],
    ),
)
def test_branches_of_an_episode_are_one_sequence_of_the_loss(
    updates: Updates, layout: str, objective: str, packing: bool, dispatcher: str
) -> None:
    """All branches of an episode have one ratio, one length and one weight. For the model, each
    branch is a sequence of its own."""
    case = Case(layout, dispatcher, packing, objective=objective, precision="fp64")
    batch = branched_batch(turn_rewards=objective == "gspo_token")
    result, explicit = updates.run(case, batch), updates.explicit(case, batch)
    assert_follows_formulas(case, result, explicit, FP64_TOLERANCE_OF_ROUTERS)


@pytest.mark.parametrize("layout", ["tp=1", "cp=4", "tp=2,pp=2,cp=2", "dp=2,ep=2,cp=2"])
def test_each_token_has_the_advantage_of_its_turn(updates: Updates, layout: str) -> None:
    """A turn has several tokens. The tokens between turns are not the policy's."""
    case = Case(layout, "alltoall", True, objective="gspo_token", precision="fp64")
    generator = torch.Generator().manual_seed(8)
    batch = replace(masked_batch(), token_advantages=[])
    for length in batch.response_lengths:
        of_turns = torch.randn(length // 7 + 1, generator=generator)
        batch.token_advantages.append(of_turns.repeat_interleave(7)[:length])
    result, explicit = updates.run(case, batch), updates.explicit(case, batch)
    assert_follows_formulas(case, result, explicit, FP64_TOLERANCE_OF_ROUTERS)


@pytest.mark.parametrize("layout", ["dp=4", "ep=4"])
def test_update_with_data_ranks_that_have_no_sequence(updates: Updates, layout: str) -> None:
    case = Case(layout=layout, precision="fp64", split="one")
    batch = edge_batch()
    columns = (batch.tokens, batch.response_lengths, batch.advantages, batch.log_ratios)
    few = SyntheticBatch(*(column[3:6] for column in columns))
    result, explicit = updates.run(case, few), updates.explicit(case, few)
    assert_follows_formulas(case, result, explicit, FP64_TOLERANCE_OF_ROUTERS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dispatcher", DIMENSIONS["dispatcher"])
@pytest.mark.parametrize("packing", DIMENSIONS["packing"])
def test_update_is_the_same_in_every_case(
    updates: Updates, layout: str, dispatcher: str, packing: bool
) -> None:
    for case in full_product():
        rest = replace(case, layout=layout, dispatcher=dispatcher, packing=packing)
        # The routers' losses are float32 in any precision, so fp64 adds nothing to these cases.
        if case != rest or (case.precision == "fp64" and case.router_losses):
            continue
        updates.check(case)
