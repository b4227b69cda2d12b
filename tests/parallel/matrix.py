"""The cases in which an update must give the same result: a product of several dimensions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.config import Config
from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.config.parallel import Layout
from gspo_megatron.verify.parity import Cut
from gspo_megatron.verify.synthetic import SyntheticBatch, synthetic_batch
from tests.parallel.models import NO_ROUTER_LOSSES, VOCAB_SIZE, odd_moe

LAYOUTS = (
    "dp=2",
    "dp=4",
    "tp=2",
    "pp=2",
    "pp=2,vpp=2",
    "ep=2",
    "ep=4",
    "tp=2,etp=2",
    "cp=2",
    "cp=4",
    "tp=2,pp=2",
    "tp=2,ep=2",
    "pp=2,ep=2",
    "cp=2,ep=2",
    "tp=2,cp=2",
    "pp=2,cp=2,ep=2",
    "tp=2,pp=2,ep=2",
    "tp=2,pp=2,cp=2,ep=2",
    "pp=2,vpp=2,ep=2,cp=2",
)


@dataclass(frozen=True)
class Case:
    """One case of an update. `split` says how the batch is cut into micro-batches. "one": each data
    rank has one micro-batch; "even": each data rank has several micro-batches with equal numbers of
    sequences; "uneven": each data rank has several micro-batches, each filled up to a token
    budget."""

    layout: str = "tp=1"
    dispatcher: str = "alltoall"
    packing: bool = True
    split: str = "uneven"  # one | even | uneven
    objective: str = "gspo"
    router_losses: bool = False
    recompute: str = "none"
    precision: str = "fp32"

    def __str__(self) -> str:
        words = [self.layout, self.dispatcher, "packed" if self.packing else "padded"]
        words += [f"split-{self.split}", self.objective]
        words += ["router-losses"] * self.router_losses
        words += ["recompute"] * (self.recompute != "none")
        return " ".join([*words, self.precision])

    def config(self) -> Config:
        return odd_moe(
            self.layout,
            {"name": self.objective},
            training={k: getattr(self, k) for k in ("packing", "recompute", "precision")},
            moe_token_dispatcher_type=self.dispatcher,
            **({} if self.router_losses else NO_ROUTER_LOSSES),
        )

    def batch(self) -> SyntheticBatch:
        size = {"shortest": 13, "longest": 13} if self.split == "even" else {}
        return synthetic_batch(self.config().objective, VOCAB_SIZE, **size)

    def cut(self) -> Cut:
        layout = Layout.parse(self.layout)
        multiple = layout.pp if layout.vpp else 1
        if self.split == "one":
            model = layout.tp * layout.pp * layout.cp
            return Cut(layout.world_size // model, token_budget=1000, multiple=multiple)
        # There are four shares of two micro-batches. As a layout has at most 4 data ranks, the
        # routers' losses get the same micro-batches on every layout.
        return Cut(replicas=4, token_budget=40, multiple=2)

    def on_one_rank(self) -> Case:
        """The same micro-batches on one rank, with default options."""
        return replace(self, layout="tp=1", dispatcher="alltoall", recompute="none")


Dimensions = dict[str, tuple[Any, ...]]
DIMENSIONS: Dimensions = {
    "layout": LAYOUTS,
    "dispatcher": ("alltoall", "allgather"),
    "packing": (True, False),
    "split": ("one", "even", "uneven"),
    "objective": ("gspo", "gspo_token", "grpo"),
    "router_losses": (False, True),
    "recompute": ("none", "full"),
    "precision": ("fp32", "fp64"),
}

# With these dimensions and the mark `full`, two objectives are tested on all layouts.
LAYOUT_DIMENSIONS: Dimensions = DIMENSIONS | {
    "split": ("one", "uneven"),
    "objective": ("gspo", "grpo"),
}
# Each of these layouts is a part of another one.
PARTS = ("dp=2", "ep=2", "tp=2,pp=2", "tp=2,ep=2", "pp=2,ep=2", "cp=2,ep=2")
QUICK_DIMENSIONS: Dimensions = LAYOUT_DIMENSIONS | {
    "layout": tuple(layout for layout in LAYOUTS if layout not in PARTS)
}
# With these dimensions and the mark `full`, all objectives are tested on fewer layouts.
OBJECTIVE_DIMENSIONS: Dimensions = {
    "layout": ("dp=2", "cp=2", "tp=2"),
    "packing": (True, False),
    "split": ("one", "even", "uneven"),
    "objective": tuple(RECIPES),
    "precision": ("fp32", "fp64"),
}


def each_objective() -> list[Case]:
    """One case for each objective, on a layout that cuts the batch and the sequences. On other
    layouts, objectives run the same code: a loss sees no more of the vocabulary than the log-probs
    of tokens. The other dimensions take turns."""
    ways = itertools.product((True, False), ("one", "uneven"), ("fp64", "fp32"))
    return [
        Case("dp=2,cp=2", packing=packing, split=split, objective=name, precision=precision)
        for name, (packing, split, precision) in zip(RECIPES, itertools.cycle(ways))
    ]


def full_product() -> Iterator[Case]:
    """Yields all cases, ordered by layout."""
    for values in itertools.product(*DIMENSIONS.values()):
        yield Case(**dict(zip(DIMENSIONS, values, strict=True)))


def covering_selection(dimensions: Dimensions, seed: int = 0) -> list[Case]:
    """Cases in which each pair of values of two dimensions occurs at least once. They are chosen
    greedily among random candidates. Each candidate contains a pair that is still missing."""
    source = random.Random(seed)
    names = list(dimensions)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(dimensions[a], dimensions[b])
    }
    cases = []
    while missing:
        # A fixed order, because the order of a set differs between processes.
        wanted = min(missing, key=repr)
        candidates = [
            {name: source.choice(dimensions[name]) for name in names} | dict(wanted)
            for _ in range(200)
        ]
        best = max(candidates, key=lambda values: len(missing & _pairs(values)))
        missing -= _pairs(best)
        cases.append(Case(**best))
    return sorted(cases, key=lambda case: (Layout.parse(case.layout).world_size, str(case)))


def _pairs(values: dict[str, Any]) -> set:
    return set(itertools.combinations(values.items(), 2))
