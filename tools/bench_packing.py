"""Padding, balance and time of a step's plan, on log-normal lengths.

    python tools/bench_packing.py [--responses 512 2048] [--budgets 8192 16384 32768]
                                  [--context-parallel 1 2 4] [--tensor-parallel 1 2 4 8]

Plans steps as the training loop does (gspo_megatron.batching.plan and .packing) and prints:

    padding      share of all tokens that the model gets
    imbalance    tokens of the fullest data-parallel rank of a mini-batch over the mean, minus 1
    in step      imbalance if ranks wait for each other after every micro-batch, as they do under
                 expert parallelism
    fullness     real tokens of micro-batches over the budget
    number/least number of micro-batches over the smallest number that could hold the tokens

A budget is for one rank: context parallelism multiplies it. Padding and imbalance are the worst
over seeds, mini-batches and tensor-parallel sizes (with sequence parallelism, which pads); the
others are means. Exits with 1 if padding exceeds 2% or imbalance 5%.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gspo_megatron.batching.packing import PackSpec
from gspo_megatron.batching.plan import MiniBatch, plan_step

MOST_PADDING, MOST_IMBALANCE = 0.02, 0.05
MANY = 10_000  # sequences of the step whose planning is timed at the end


@dataclass
class Figures:
    """Figures of all steps of a row of the table."""

    padding: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    in_step: list[float] = field(default_factory=list)
    fullness: list[float] = field(default_factory=list)
    over_bound: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add_plan(
        self, plan: Sequence[MiniBatch], lengths: Sequence[int], budget: int, seconds: float
    ) -> None:
        """`budget`: tokens of a micro-batch over all its context-parallel ranks."""
        self.seconds.append(seconds)
        for mini_batch in plan:
            ranks = mini_batch.micro_batches
            packed = [[sum(lengths[n] for n in members) for members in rank] for rank in ranks]
            tokens = [sum(micro_batches) for micro_batches in packed]
            mean, count = statistics.mean(tokens), len(ranks[0])
            self.imbalance.append(max(tokens) / mean - 1)
            self.in_step.append(sum(map(max, zip(*packed, strict=True))) / mean - 1)
            self.fullness.append(sum(tokens) / (count * len(ranks) * budget))
            self.over_bound.append(count / math.ceil(sum(tokens) / (len(ranks) * budget)))

    def add_padding(
        self, plan: Sequence[MiniBatch], lengths: Sequence[int], cp: int, tp: int
    ) -> None:
        """The share of padding over a step."""
        spec = PackSpec(0, context_parallel_size=cp, multiple=tp)
        given = sum(
            shape.rows * shape.tokens
            for mini_batch in plan
            for rank in mini_batch.micro_batches
            for members in rank
            for shape in [spec.smallest_shape([lengths[n] for n in members])]
        )
        self.padding.append(1 - sum(lengths) / given)


def draw(arguments: argparse.Namespace, count: int, seed: int) -> tuple[list[int], list[int]]:
    """Lengths of sequences and of their responses. Responses are log-normal, with a maximum."""
    source = random.Random(seed)
    location = math.log(arguments.mean) - arguments.sigma**2 / 2
    lengths, responses = [], []
    for number in range(count):
        if number % arguments.group == 0:  # one prompt for all responses of a group
            prompt = source.randint(*arguments.prompt)
        response = int(source.lognormvariate(location, arguments.sigma))
        responses.append(min(max(response, 1), arguments.longest - prompt))
        lengths.append(prompt + responses[-1])
    return lengths, responses


def timed_plan(
    lengths: Sequence[int], responses: Sequence[int], mini_batches: int, ranks: int, budget: int
) -> tuple[list[MiniBatch], float]:
    """A step's plan, and the seconds for making it."""
    start = time.perf_counter()
    plan = plan_step(
        lengths,
        responses,
        mini_batches=mini_batches,
        data_parallel_size=ranks,
        token_budget=budget,
    )
    return plan, time.perf_counter() - start


def measure(arguments: argparse.Namespace, count: int, budget: int, cp: int) -> Figures:
    """One row of the table, over all seeds and tensor-parallel sizes."""
    figures = Figures()
    for seed in range(arguments.seeds):
        lengths, responses = draw(arguments, count, seed)
        plan, seconds = timed_plan(
            lengths, responses, arguments.mini_batches, arguments.data_parallel, budget * cp
        )
        figures.add_plan(plan, lengths, budget * cp, seconds)
        for tp in arguments.tensor_parallel:
            figures.add_padding(plan, lengths, cp, tp)
    return figures


def planning_seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """For MANY sequences: spread as the arguments say, and all in one mini-batch on one rank."""
    lengths, responses = draw(arguments, MANY, 0)
    budget = min(arguments.budgets)
    spread = [
        timed_plan(lengths, responses, arguments.mini_batches, arguments.data_parallel, budget)[1]
        for _ in range(3)
    ]
    alone = [timed_plan(lengths, responses, 1, 1, budget)[1] for _ in range(3)]
    return {"spread": statistics.median(spread), "alone": statistics.median(alone)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", nargs="+", type=int, default=[512, 2048], help="in a step")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--context-parallel", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--tensor-parallel", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--data-parallel", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--mean", type=float, default=1200.0, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of log length")
    parser.add_argument("--longest", type=int, default=8192, help="tokens, prompt included")
    parser.add_argument("--prompt", nargs=2, type=int, default=[64, 512], help="tokens, from to")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--seeds", type=int, default=5)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    print("responses  budget  CP  padding  imbalance  in step  fullness  number/least  plan ms")
    rows = []
    grid = itertools.product(arguments.responses, arguments.budgets, arguments.context_parallel)
    for count, budget, cp in grid:
        figures = measure(arguments, count, budget, cp)
        rows.append(figures)
        print(
            f"{count:9d} {budget:7d} {cp:3d} {max(figures.padding):8.2%} "
            f"{max(figures.imbalance):10.2%} {statistics.mean(figures.in_step):8.2%} "
            f"{statistics.mean(figures.fullness):9.1%} "
            f"{statistics.mean(figures.over_bound):13.2f} "
            f"{1e3 * statistics.median(figures.seconds):8.1f}",
            flush=True,
        )
    seconds = planning_seconds(arguments)
    padding = max(max(figures.padding) for figures in rows)
    imbalance = max(max(figures.imbalance) for figures in rows)
    missed = padding > MOST_PADDING or imbalance > MOST_IMBALANCE
    print(
        f"padding={padding:.4f} imbalance={imbalance:.4f} "
        f"in_step={statistics.mean(v for f in rows for v in f.in_step):.4f} "
        f"fullness={statistics.mean(v for f in rows for v in f.fullness):.3f} "
        f"over_bound={statistics.mean(v for f in rows for v in f.over_bound):.3f} "
        f"plan_{MANY}_seconds={seconds['spread']:.3f} "
        f"plan_{MANY}_on_one_rank_seconds={seconds['alone']:.3f} missed={int(missed)}"
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
