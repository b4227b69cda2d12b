"""Find the settings at which each objective stops converging.

    python examples/evidence/frontier.py            # all runs that are not in the results yet
    python examples/evidence/frontier.py --quick    # repeats one run, and compares the outcomes

Each run is `gspo-megatron train` on frontier.yaml, with the settings of an arm (objective and
Routing Replay), and with one value of an axis: the learning rate, the number of mini-batches, or
the age of the weights that generated the responses. For every arm, bisection finds two values: the
largest value at which all seeds converge, and the largest value at which no seed collapses
(frontier_rule.py says which runs converge and collapse). At these two values and at the next larger
values, the script also runs the seeds that bisection left out. On the axis on which a vLLM in bf16
generates, every arm has only one value. Each run adds one line to the results. A run that has a
line is not repeated.

If the start model does not exist, the script makes it first: the model learns to add, and then
learns from answers with careless mistakes (long_addition.py).

GSPO's clip range was chosen before these runs, in a trial with one seed. In the first five steps, a
range of 0.01 on both sides clipped 3% of the tokens at a learning rate of 1e-4, 19% at 4e-4 and 31%
at 1e-3. The paper reports 15%; its range of 3e-4 is for much longer responses. GRPO has the range
that the paper uses for GRPO, which clipped 0.2% to 4%.

Arms are compared at equal learning rates, and also at equal effects of an update. Adam makes
updates of about the same length from different gradients, but the effects of these updates differ.
So each line has `update_change`: the mean absolute change of a token's log-prob by one update, on
responses that the update did not use, computed without replay. `update_change` is a mean over the
first updates of the first five steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from frontier_rule import (
    CHECKPOINTS_EVERY,
    SEEDS,
    STEPS,
    Record,
    all_seeds,
    largest_that_holds,
    last_good_checkpoint,
    lowest,
    mean,
    outcome,
)
from long_addition import make_data
from records import read
from vllm_engine import VllmEngine, VllmProcess, vllm_python

from gspo_megatron.batching.micro_batches import MicroBatch, response_logprobs
from gspo_megatron.checkpoint.start import open_session
from gspo_megatron.config import Config, check_config, load
from gspo_megatron.observe.environment import describe_environment
from gspo_megatron.process.failures import run_script
from gspo_megatron.rl.loop import ReinforcementLoop
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rl.run import assemble, read_parts

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "frontier.jsonl"
RUNS = Path("runs/frontier")
FIRST_STEPS = 5  # the steps whose clipping and updates are measured
# After a run, Megatron-Core keeps the graph of the last pass, and so also the model and 48 threads
# of its process groups.
RUNS_OF_A_PROCESS = 8

# Overrides of the last stage of the start model. This stage comes after the stage of
# frontier_start.yaml.
CARELESS = (
    f"data.examples={RUNS}/data/careless.jsonl",
    f"data.eval_examples={RUNS}/data/careless.jsonl",
    f"model.checkpoint_path={RUNS}/adds",
    "model.preset=null",
    "optimizer.learning_rate=1e-3",
    "training.steps=400",
    "checkpoint.interval=400",
    f"logging.dir={RUNS}/start",
)

GSPO = ["objective.name=gspo", "objective.clip_low=0.01", "objective.clip_high=0.01"]
GSPO_TOKEN = ["objective.name=gspo_token", *GSPO[1:]]
GRPO = ["objective.name=grpo", "objective.clip_low=0.2", "objective.clip_high=0.27"]
PAPER = ["objective.name=gspo", "objective.clip_low=3e-4", "objective.clip_high=4e-4"]
R2, R3 = "routing.replay=r2", "routing.replay=r3"
RECOMPUTE, ROLLOUT = "objective.old_logprobs=recompute", "objective.old_logprobs=rollout"
ARMS = {
    "gspo": GSPO,
    "grpo": GRPO,
    "gspo+r2": [*GSPO, R2],
    "grpo+r2": [*GRPO, R2],
    "gspo+r3": [*GSPO, R3],
    "grpo+r3": [*GRPO, R3],
    "gspo_token": GSPO_TOKEN,
    # Controls: does the effect come from the sequence ratio, or from the amount of clipping?
    "grpo, tight clip": ["objective.name=grpo", *GSPO[1:]],
    "gspo, no clip": [
        *("objective.name=gspo", "objective.allow_wide_clip=true"),
        *("objective.clip_low=0.9", "objective.clip_high=9"),
    ],
    # The old log-probs are the trainer's (with or without a correction), or the engine's.
    "gspo: recompute": [*GSPO, RECOMPUTE],
    "gspo: rollout": [*GSPO, ROLLOUT],
    "gspo: sequence_tis": [*GSPO, RECOMPUTE, "objective.correction=sequence_tis"],
    "gspo: sequence_mask": [*GSPO, RECOMPUTE, "objective.correction=sequence_mask"],
    "grpo: recompute": [*GRPO, RECOMPUTE],
    "grpo: rollout": [*GRPO, ROLLOUT],
    "grpo: token_tis": [*GRPO, RECOMPUTE, "objective.correction=token_tis"],
    "grpo: icepop": [*GRPO, RECOMPUTE, "objective.correction=icepop"],
    "grpo: sequence_mask": [*GRPO, RECOMPUTE, "objective.correction=sequence_mask"],
    # the paper's range, which is narrower than the bf16 noise here
    "gspo 3e-4: recompute": [*PAPER, RECOMPUTE],
    "gspo 3e-4: rollout": [*PAPER, ROLLOUT],
}

QUICK: Record = {"axis": "learning rate", "arm": "grpo", "value": 1.6e-3, "seed": 1}
RATES = (1e-4, 1.4e-4, 2e-4, 2.8e-4, 4e-4, 5.7e-4, 8e-4, 1.1e-3, 1.6e-3, 2.3e-3, 3.2e-3)
EXACT, NOISY = ("gspo", "grpo", "gspo+r2", "grpo+r2", "gspo_token"), tuple(ARMS)[:6]
CONTROLS = ("gspo, no clip", "grpo, tight clip")
OLD = tuple(arm for arm in ARMS if ": " in arm)


@dataclass(frozen=True)
class Axis:
    """One axis: the quantity that is varied, and the settings that are fixed."""

    key: str  # a key of the configuration, or STALENESS
    values: Sequence[float]
    arms: Sequence[str]
    fixed: Sequence[str] = ()
    # dtype of a vLLM that generates; None: the trained model itself generates
    dtype: str | None = None
    bisects: bool = True  # False: every arm runs with every value

    def overrides(self, arm: str, value: float) -> list[str]:
        """The overrides of frontier.yaml for a run."""
        number = value if self.key == "optimizer.learning_rate" else int(value)
        varied = [] if self.key == STALENESS else [f"{self.key}={number}"]
        return [*ARMS[arm], *self.fixed, *varied]


STALENESS = "staleness"  # the age of the weights that generate a step's responses, in steps
AXES = {
    # The engine is the trained model itself in fp32. So r3 would replay the same experts as r2, and
    # the axis has no arms with r3.
    "learning rate": Axis("optimizer.learning_rate", RATES, (*EXACT, *CONTROLS)),
    # The engine's experts differ from the trainer's.
    "learning rate, noisy routers": Axis(
        "optimizer.learning_rate", RATES, NOISY, ["routing.rollout_noise=0.3"]
    ),
    "mini-batches": Axis(
        "objective.mini_batches",
        (4, 8, 16, 32, 64),
        ("gspo", "grpo"),
        ["optimizer.learning_rate=2.8e-4"],
    ),
    # The denominator of the ratio is the policy of the weights that generated the response.
    "staleness": Axis(
        STALENESS, (1, 2, 4, 8, 16), ("gspo", "grpo"), ["optimizer.learning_rate=4e-4", ROLLOUT]
    ),
    "old log-probs, vLLM in bf16": Axis(
        "optimizer.learning_rate", (5.7e-4,), OLD, dtype="bfloat16", bisects=False
    ),
}


class Ahead:
    """A mixin for steps that train on responses from older weights. The responses of step t come
    from the weights after t - 1 - `staleness` steps, or from the start model. `roll_out` of this
    class replaces the loop's method, and calls the replaced method."""

    def __init__(self, loop: ReinforcementLoop, staleness: int) -> None:
        self._draw, self._staleness, self._drawn = loop.roll_out, staleness, 0
        self._waiting: deque[Experience] = deque()
        loop.roll_out = self.roll_out

    def roll_out(self, step: int) -> Experience:
        """Return the step's responses. Afterwards all responses up to step + staleness are
        generated."""
        while self._drawn < min(step + self._staleness, STEPS):
            self._drawn += 1
            self._waiting.append(self._draw(self._drawn))
        return self._waiting.popleft()


@dataclass
class Probe:
    """A mixin that measures how much the update on the first mini-batch changes the log-probs of
    the second mini-batch. Its methods replace two methods of the updater, and call the replaced
    methods."""

    updater: PolicyUpdater
    changes: list[float] = field(default_factory=list)  # mean |change of a log-prob| in each step
    divergences: list[float] = field(default_factory=list)  # mean k3 of these changes in each step

    def __post_init__(self) -> None:
        self._build, self._train = self.updater.build_micro_batches, self.updater.train
        self.updater.build_micro_batches, self.updater.train = self._remember, self._watch

    def _remember(self, *arguments: Any) -> list[list[MicroBatch]]:
        mini_batches = self._build(*arguments)
        self._second = mini_batches[1]
        self._before: torch.Tensor | None = None
        return mini_batches

    def _watch(self, *arguments: Any) -> None:
        if len(self.changes) < FIRST_STEPS and self._before is None:
            self._before = self._logprobs()
            self._train(*arguments)
            change = self._logprobs() - self._before
            self.changes.append(float(change.abs().mean()))
            self.divergences.append(float((change.exp() - 1 - change).mean()))
        else:
            self._train(*arguments)

    def _logprobs(self) -> torch.Tensor:
        found = response_logprobs(self.updater.policy, self._second)
        return torch.cat([logprobs for logprobs, _ in found]).double()


class Laboratory:
    """Runs experiments one after the other in this process. Their files are below `scratch`."""

    def __init__(self, results: Path, scratch: Path) -> None:
        self.results, self.scratch = results, scratch
        self.versions = versions()
        self.engines: dict[str, VllmProcess] = {}  # by precision
        self.count = 0  # the number of new lines

    def record(self, axis: str, arm: str, value: float, seed: int) -> Record:
        """The line of a run. If the results do not have it, make the run and add its line."""
        place = {"axis": axis, "arm": arm, "value": value, "seed": seed}
        for line in read(self.results):
            if place.items() <= line.items():
                return line
        line = place | self.measure(axis, arm, value, seed)
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.count += 1
        told = f"{line['rewards'][0]:.2f} -> {line['rewards'][-1]:.2f}, {line['seconds']:.0f} s"
        print(f"{axis} {value:g}, {arm}, seed {seed}: {line['outcome']} ({told})", flush=True)
        if self.count == RUNS_OF_A_PROCESS:
            self.close()
            # Start the script again; the new process makes the runs that have no line yet.
            os.execv(sys.executable, sys.orig_argv)
        return line

    def measure(self, axis: str, arm: str, value: float, seed: int) -> Record:
        """Make a run. If it collapses, make a second run from one of its checkpoints."""
        overrides = AXES[axis].overrides(arm, value)
        staleness = int(value) if AXES[axis].key == STALENESS else 0
        begin = self.processor_seconds()
        run = self.train(overrides, seed, staleness, AXES[axis].dtype)
        start = run["rewards"][0]
        run |= {
            "outcome": outcome(run["rewards"], start),
            "lowest": round(lowest(run["rewards"]), 4),
            "heals": None,
        }
        if run["outcome"] == "collapsed":
            step = last_good_checkpoint(run["rewards"], start)
            saved = self.scratch / "run" / "checkpoints" / f"rl_{step:08d}"
            again = self.scratch / "earlier"
            shutil.rmtree(again, ignore_errors=True)
            weights = []
            if step:
                saved.rename(again)
                weights.append(f"model.checkpoint_path={again}")
            second = self.train([*overrides, *weights], seed + 1000, staleness, AXES[axis].dtype)[
                "rewards"
            ]
            ends = outcome(second, start)
            run["heals"] = {"from_step": step, "outcome": ends, "rewards": second}
        run["seconds"] = round(self.processor_seconds() - begin, 1)
        return run | {"overrides": overrides, **self.versions}

    def train(
        self, overrides: Sequence[str], seed: int, staleness: int = 0, dtype: str | None = None
    ) -> Record:
        """The measurements of one run. dtype: the precision of the vLLM that generates; None: the
        trained model generates."""
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        own = [f"training.steps={STEPS}", f"training.seed={seed}", f"logging.dir={folder}"]
        own.append(f"checkpoint.interval={CHECKPOINTS_EVERY}")
        config = load.load_config(HERE / "frontier.yaml", [*own, *overrides], Config)
        check_config(config, 1, for_training=True)
        metrics, parts = [], read_parts(config)
        with open_session(config, fresh=True) as session:
            session.begin()
            run = assemble(config, *parts, session.start, session.stop)
            with closing(run.logger), closing(run.collector), closing(run.checkpoints):
                if dtype is not None:
                    ends = parts[0].tokenizer.eos_ids
                    engine = VllmEngine(run.policy, self.engine(dtype), ends)
                    run.collector.source.engine = engine
                loop = ReinforcementLoop(run)
                Ahead(loop, staleness)
                probe = Probe(loop.updater)
                loop.collector.source.take_weights(version=0)
                for step in range(1, STEPS + 1):
                    metrics.append(loop.step(step))
                    run.checkpoints.end_of_step(step, metrics[-1], is_last=False)
                held_out = loop.evaluate(STEPS)
        first = metrics[:FIRST_STEPS]
        return {
            "rewards": [round(each["reward/mean"], 4) for each in metrics],
            "held_out_reward": round(held_out["evaluation/reward"], 4),
            "held_out_accuracy": round(held_out["evaluation/accuracy"], 4),
            "update_change": significant(mean(probe.changes)),
            "update_k3": significant(mean(probe.divergences)),
            "step_k3": significant(mean([each["kl/k3"] for each in first])),
            "clipped_tokens": significant(mean([each["clip/token/binding"] for each in first])),
            "mismatch": significant(mean([each["mismatch/abs_mean"] for each in first])),
            "entropy": [significant(metrics[at]["policy/entropy"]) for at in (0, -1)],
            "grad_norm": significant(mean([each["grad_norm"] for each in first])),
        }

    def engine(self, dtype: str) -> VllmProcess:
        """The vLLM process of this precision. All runs share it, because its start takes half a
        minute."""
        if dtype not in self.engines:
            self.engines[dtype] = VllmProcess(vllm_python(), dtype, max_tokens=72)
        return self.engines[dtype]

    def processor_seconds(self) -> float:
        """The processor seconds of this process and of vLLM's."""
        return time.process_time() + sum(engine.seconds for engine in self.engines.values())

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def significant(value: float) -> float:
    return float(f"{value:.4g}")


def versions() -> Record:
    """The versions of the code that runs."""
    found = describe_environment()
    packages = {name: found["versions"][name] for name in ("torch", "megatron-core")}
    return {"commit": (found["git"] or {}).get("commit"), "versions": packages}


def make_start() -> None:
    """Make data and start model below runs/frontier, if they do not exist."""
    make_data(RUNS / "data")
    sft = [sys.executable, "-m", "gspo_megatron", "sft", str(HERE / "frontier_start.yaml")]
    # a stage that is finished ends immediately
    subprocess.run(sft, check=True, stdout=sys.stderr)
    subprocess.run([*sft, *CARELESS], check=True, stdout=sys.stderr)


def holds(ends: str, laboratory: Laboratory, axis: str, arm: str) -> Callable[[float], bool]:
    """A function that tells whether a value of the axis holds: all seeds converge, or none
    collapses."""

    def passes(value: float, seed: int) -> bool:
        found = laboratory.record(axis, arm, value, seed)["outcome"]
        return found == "converged" if ends == "converged" else found != "collapsed"

    return lambda value: all_seeds(lambda seed: passes(value, seed))


def explore(laboratory: Laboratory, axes: Sequence[str], arms: Sequence[str]) -> None:
    """Make all runs that the map needs, the most important ones first."""
    pairs = [
        (axis, arm)
        for axis in axes
        for arm in AXES[axis].arms
        if arm in arms and AXES[axis].bisects
    ]
    edges: dict[tuple[str, str], set[float]] = {pair: set() for pair in pairs}
    for ends in ("converged", "not collapsed"):
        for axis, arm in pairs:
            values = AXES[axis].values
            largest = largest_that_holds(values, holds(ends, laboratory, axis, arm))
            print(f"{axis}, {arm}: largest with all seeds {ends}: {largest}", flush=True)
            at = -1 if largest is None else values.index(largest)
            edges[axis, arm] |= set(values[max(at, 0) : at + 2])
    for seed in range(1, SEEDS + 1):
        for axis, arm in pairs:
            for value in sorted(edges[axis, arm]):
                laboratory.record(axis, arm, value, seed)
    for axis in axes:
        if not AXES[axis].bisects:
            fill(laboratory, axis, [a for a in AXES[axis].arms if a in arms], AXES[axis].values)


def fill(laboratory: Laboratory, axis: str, arms: Sequence[str], values: Sequence[float]) -> None:
    """Run all seeds of some cells of the map."""
    for seed in range(1, SEEDS + 1):
        for value in values:
            for arm in arms:
                laboratory.record(axis, arm, value, seed)


def quick(laboratory: Laboratory) -> bool:
    """Make one run again. Returns whether its outcome is the same as in the kept line."""
    kept = next(r for r in read(RESULTS) if QUICK.items() <= r.items())
    again = laboratory.measure(**QUICK)
    same = again["outcome"] == kept["outcome"]
    change = f"{again['update_change']:.4g} (kept: {kept['update_change']:.4g})"
    print(f"{QUICK}: {again['outcome']} (kept: {kept['outcome']}), update_change {change}")
    print(f"processor seconds={again['seconds']:.0f} same_outcome={same}")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="repeat one run, and compare")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--values", nargs="+", type=float, help="all seeds with these values only")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, default=RUNS / "scratch", help="of the runs' files")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    make_start()
    with closing(Laboratory(arguments.results, arguments.scratch)) as laboratory:
        if arguments.quick:
            return 0 if quick(laboratory) else 1
        if arguments.values:
            for axis in arguments.axes:
                fill(laboratory, axis, arguments.arms, arguments.values)
        else:
            explore(laboratory, arguments.axes, arguments.arms)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
