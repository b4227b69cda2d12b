"""Measure volatility: the share of a token's experts that an update replaces by others.

    python examples/evidence/volatility.py

The measurement starts from a policy that has been warmed up, with a new optimizer, and gives the
volatility after 1, 4 and 16 updates for each layer. One JSON line for each learning rate, number of
experts and seed is added to the output. Settings whose line exists already are not measured again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import records
import torch
from gradients import changed_experts, coefficients, objective_of, response_advantages
from laboratory import RESPONSES, Laboratory, Setting

from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.process.failures import run_script

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
EXPERTS = (8, 32, 128)
UPDATES = (1, 4, 16)
LENGTH, LAYERS, BATCHES = 32, 4, 4


def settings(experts: int, seed: int, rates: Sequence[float]) -> list[Setting]:
    """The settings that one process measures. They differ only in the learning rate."""
    return [
        Setting(LENGTH, seed, learning_rate=rate, experts=experts, layers=LAYERS) for rate in rates
    ]


def measure(experts: int, seed: int, rates: Sequence[float], path: Path) -> None:
    """Measure the settings that the file has no line for, and add their lines."""
    there = [Setting(**line["setting"]) for line in records.read(path)]
    missing = [each for each in settings(experts, seed, rates) if each not in there]
    if not missing:
        return
    start = time.monotonic()
    laboratory = Laboratory(Setting(LENGTH, seed, experts=experts, layers=LAYERS))
    weights = laboratory.weights()
    kept = [laboratory.draw() for _ in range(BATCHES)]
    spent = [laboratory.draw() for _ in range(max(UPDATES))]
    laboratory.remember(kept + spent)
    deviation = float(torch.stack([batch.rewards for batch in kept]).std())
    grpo = objective_of({"name": "grpo"}, LENGTH)
    for setting in missing:
        laboratory.start_training(setting.learning_rate, weights)
        changed, kl = {}, {}
        for number, batch in enumerate(spent, 1):
            laboratory.record_routes([batch], "now")
            now = laboratory.logprobs([batch], "now")[0]
            advantages = response_advantages([batch], deviation)[0]
            found, _ = coefficients(grpo, now, batch.old["off"], batch.rollout, advantages)
            laboratory.update(batch, found)
            if number in UPDATES:
                laboratory.record_routes(kept, "now")
                changed[number] = changed_experts(kept, "r2", "now")
                old = torch.stack([batch.old["off"] for batch in kept])
                kl[number] = float((old - laboratory.logprobs(kept, "now")).mean())
        record = {
            "setting": asdict(setting),
            "responses": BATCHES * RESPONSES,
            "changed_experts": changed,  # number of updates -> share for each layer
            "kl": kl,
            "seconds": time.monotonic() - start,
            "processor_seconds": time.process_time(),
        }
        records.add(path, record)
        print(f"{asdict(setting)}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32, choices=EXPERTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--output", type=Path, default=records.RESULTS / "volatility.jsonl")
    parser.add_argument("--label", help="any word, to know the process by")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        measure(arguments.experts, arguments.seed, arguments.rates, arguments.output)
    finally:
        stop_processes()


if __name__ == "__main__":
    sys.exit(run_script(main))
