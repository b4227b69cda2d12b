"""Generated tokens per second of this package over whole RL steps: our side of the benchmark.

The benchmark takes the shapes and workloads of workload.py, as trl_step.py does. It runs the code
of `gspo-megatron train`: the package's launcher and its ReinforcementLoop. A small model has two
data-parallel ranks with one thread each, because its operators are slower with a second thread.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from limit import measure_limit
from workload import (
    ROUTER_AUX_LOSS_COEF,
    SEED,
    THREADS,
    WORKLOADS,
    Workload,
    peak_memory_gb,
    sections_of,
    shape_of,
)

from gspo_megatron.process.launcher import launch
from gspo_megatron.process.ranks import join_launcher
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.types import RolloutBatch


class WordTokenizer:
    """A tokenizer whose texts are lists of ids. The end-of-sequence id is outside the vocabulary,
    so every response has its full length. The reward reads the ids from a response's text."""

    name = "benchmark"
    bos_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eos_id, self.pad_id = vocab_size, vocab_size, 0
        self.eos_ids = (self.eos_id,)
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    decode_response = decode

    def symbol_id(self, symbol: str) -> None:
        """Return None, because this tokenizer has no special tokens."""

    def render(self, messages: Any, **_: Any) -> str:
        raise AssertionError("the benchmark has no chat")


def even_share(sample: Any) -> float:
    """Reward: the share of even token ids, so that every group has a spread at no cost."""
    ids = sample.response.split()
    return sum(int(word) % 2 == 0 for word in ids) / len(ids)


class PlannedLengths:
    """An engine that gives responses their planned lengths. No token ends a response, so the limit
    decides. A limit belongs to a prompt, so each response gets a prompt of its own in the request.
    This costs us a prefill of the prompt for each response, as in transformers."""

    def __init__(self, engine: RolloutEngine, work: Workload) -> None:
        self.engine, self.work = engine, work
        self.step = 0  # number of the RL step
        self.update_weights = engine.update_weights

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """See RolloutEngine.generate."""
        group, samples = requests.responses_per_prompt, requests.sample_indices()
        lengths = self.work.lengths(self.step)
        prompts = [prompt for prompt in requests.prompts for _ in range(group)]
        alone = Requests(prompts, samples, 1, [lengths[number] for number in samples])
        batch = self.engine.generate(alone, sampling, seed)
        assert batch.response_lengths.tolist() == alone.max_tokens, "other lengths"
        return replace(batch, group_index=batch.group_index // group)


def configuration(size: str, steps: int, folder: str) -> Any:
    """Return the run's Config: GSPO at the paper's clip range, no evaluation."""
    from gspo_megatron.config import parse_config

    shape, work = dict(shape_of(size)), WORKLOADS[size]
    return parse_config(
        {
            **sections_of(work),
            "model": {
                "preset": "tiny",
                "vocab_size": shape.pop("vocab_size"),
                "max_sequence_length": max(128, work.prompt_tokens + work.longest),
                "megatron": {**shape, "moe_aux_loss_coeff": ROUTER_AUX_LOSS_COEF},
            },
            "parallel": {"layout": f"dp={world_size()}"},
            "optimizer": {"learning_rate": 1e-6, "weight_decay": 0.1},
            "training": {"steps": steps, "seed": SEED, "precision": work.precision},
            "logging": {"dir": folder, "samples_per_step": 0},
        }
    )


def build_loop(size: str, steps: int, folder: str) -> Any:
    """Build the package's loop on random prompts."""
    loop = loop_of(
        configuration(size, steps, folder), WORKLOADS[size], shape_of(size)["vocab_size"]
    )
    if WORKLOADS[size].median is not None:
        source = loop.collector.source
        source.engine = PlannedLengths(source.engine, WORKLOADS[size])
    return loop


def loop_of(config: Any, work: Workload, vocab_size: int) -> Any:
    """Build the loop of a configuration, with enough random prompts for all its steps."""
    from gspo_megatron.config import check_config
    from gspo_megatron.data.inputs import Inputs
    from gspo_megatron.objectives import build_objective
    from gspo_megatron.rewards.registry import Reward
    from gspo_megatron.rl.loop import ReinforcementLoop
    from gspo_megatron.rl.run import assemble
    from gspo_megatron.types import Prompt

    check_config(config, world_size(), for_training=True)
    tokenizer = WordTokenizer(vocab_size)
    generator = random.Random(SEED)
    prompts = []
    for number in range(work.prompts * config.training.steps):
        ids = tuple(generator.randrange(vocab_size) for _ in range(work.prompt_tokens))
        prompts.append(Prompt(tokenizer.decode(ids), "", f"benchmark:{number}", token_ids=ids))
    inputs = Inputs(tokenizer, {"data.prompts": prompts})
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    job = assemble(config, inputs, Reward("even_share", even_share), objective)
    return ReinforcementLoop(job)


def step(loop: Any, number: int) -> dict[str, float]:
    """Run RL step `number`. Returns its metrics."""
    loop.collector.source.engine.step = number  # the engine is a PlannedLengths
    return loop.step(number)


def measure(size: str, steps: int) -> dict[str, Any]:
    """Measure `steps` steps after the warm-up. Returns the record with median seconds."""
    import torch

    work = WORKLOADS[size]
    torch.set_num_threads(THREADS // world_size())
    last = work.warmup_steps + steps
    with tempfile.TemporaryDirectory() as folder:
        loop = build_loop(size, last + 1, folder)
        records = [step(loop, number) for number in range(1, last + 1)][work.warmup_steps :]
        memory = peak_memory_gb()  # the record has the memory of rank 0
        limit = measure_limit(lambda: step(loop, last + 1), loop.updater)
    for number, record in enumerate(records, work.warmup_steps + 1):
        mean = sum(work.lengths(number)) / work.responses
        assert abs(record["response/length_mean"] - mean) < 0.01, "other lengths"
    parts = {
        name: statistics.median(record[f"perf/{name}_seconds"] for record in records)
        for name in PARTS
    }
    return {
        "peer": "gspo-megatron",
        "size": size,
        "steps": steps,
        "ranks": world_size(),
        "tokens_per_second": round(
            work.rate([record["perf/step_seconds"] for record in records]), 1
        ),
        "seconds": {name: round(value, 4) for name, value in parts.items()},
        "peak_memory_gb": round(memory, 2),
        "limit": limit,
    }


def world_size() -> int:
    """Return the number of ranks: 1 unless the launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1"))


PARTS = ("step", "rollout", "logprob", "train", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--steps", type=int, default=20, help="RL steps measured")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    ranks = WORKLOADS[arguments.size].ranks
    if "RANK" not in os.environ and ranks > 1:
        raise SystemExit(launch([sys.executable, *sys.argv], ranks))
    join_launcher()
    record = measure(arguments.size, arguments.steps)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(record))


if __name__ == "__main__":
    main()
