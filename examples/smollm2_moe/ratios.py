"""Measure how the noise of importance ratios depends on the length of the responses.

    python examples/smollm2_moe/ratios.py OLD NEW

OLD and NEW are Hugging Face folders of the same model, before and after some updates. The script
generates responses of one length with OLD. No token ends a response. It computes the log-probs of
the tokens in three ways: in decoding (the rollout engine), and in a forward pass of OLD and of NEW.
For the first 8, 16, ... tokens of the responses it prints two comparisons: OLD with the engine,
which is noise alone, and NEW with OLD, which is what the update changed. --output keeps the figures
as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.config import parse_config, resolve_parallel
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.process.failures import run_script
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine

TOPICS = ("the sea", "a small town", "winter", "a lost letter", "two brothers", "an old tree")
TOPICS += ("a long journey", "a market")
GROUP = 4  # responses to each topic
AT_ONCE = 4  # sequences in a forward pass
SHORTEST = 8  # tokens; the next lengths are twice as long each
RANGES = {"paper": (3e-4, 4e-4), "run": (0.04, 0.04)}  # clip ranges: the paper's, and config.yaml's


def figures(delta: Tensor) -> dict[str, float]:
    """The figures of delta, [responses, tokens] float64: new log-probs minus old log-probs."""
    length = delta.shape[1]
    means = delta.mean(1)  # [responses]
    token, sequence = delta.std().item(), means.std().item()
    ratio = means.exp()
    outside = {
        f"outside_{name}": ((ratio < 1 - low) | (ratio > 1 + high)).double().mean().item()
        for name, (low, high) in RANGES.items()
    }
    # `predicted` is the spread of a mean of independent tokens.
    predicted = token / math.sqrt(length)
    return {"token": token, "sequence": sequence, "predicted": predicted, **outside}


def by_length(delta: Tensor) -> dict[int, dict[str, float]]:
    """The figures for the first 8, 16, ... tokens, and for all tokens."""
    lengths = [SHORTEST]
    while lengths[-1] * 2 <= delta.shape[1]:
        lengths.append(lengths[-1] * 2)
    return {length: figures(delta[:, :length].double()) for length in lengths}


def build(folder: Path, tokens: int, precision: str) -> Policy:
    """A policy with the shape of the model in `folder`, on this process alone."""
    config = parse_config(
        {
            "model": {"hf_path": str(folder), "max_sequence_length": tokens + 64},
            "data": {"tokenizer": str(folder)},
            "training": {"precision": precision},
        }
    )
    parallel = resolve_parallel(config, start_processes().world_size)
    set_up_model_parallel(parallel, seed=1)
    return build_policy(config, parallel, config.resolved_model().vocab_size)


def measure(old: Path, new: Path, tokens: int, precision: str) -> dict[str, Any]:
    """Generate responses with OLD. Returns the figures of both comparisons."""
    policy = build(old, tokens, precision)
    load_hf(old, policy)
    tokenizer = load_tokenizer(str(old))
    questions = [{"role": "user", "content": f"Write a story about {topic}."} for topic in TOPICS]
    rendered = [tokenizer.render([question], open_answer=True) for question in questions]
    prompts = [tokenizer.encode_rendered(each.text, each.quoted).ids for each in rendered]
    engine = MegatronEngine(policy, pad_id=tokenizer.pad_id, eos_id=())
    requests = Requests(prompts, group_index=range(len(prompts)), responses_per_prompt=GROUP)
    batch = engine.generate(requests, Sampling(tokens), seed=1)
    builder = MicroBatchBuilder(policy, tokenizer.pad_id, temperature=1.0)
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()  # [responses]
    sequences = batch.tokens.split(lengths)

    count = len(sequences)
    columns = [tokens] * count, [number * tokens for number in range(count)]

    def logprobs() -> Tensor:
        """The log-probs of all response tokens, [responses, tokens]."""
        found = torch.empty(count * tokens)
        for first in range(0, count, AT_ONCE):
            members = range(first, min(first + AT_ONCE, count))
            built = builder.build(members, sequences, *columns)
            [(values, _)] = response_logprobs(policy, [built])
            found[built.packed.response_index] = values
        return found.view(count, tokens)

    before = logprobs()
    load_hf(new, policy)
    after = logprobs()
    return {
        "responses": count,
        "tokens": tokens,
        "precision": precision,
        "engine": by_length(before - batch.rollout_logprobs.view(before.shape)),
        "update": by_length(after - before),
    }


def print_table(name: str, rows: dict[int, dict[str, float]]) -> None:
    print(f"\n{name}")
    print(" tokens  token ratio  sequence ratio  predicted  outside 3e-4/4e-4  outside 0.04")
    for length, row in rows.items():
        print(
            f"{length:7}  {row['token']:11.4f}  {row['sequence']:14.4f}  {row['predicted']:9.4f}"
            f"  {row['outside_paper']:17.0%}  {row['outside_run']:12.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="the length of each response")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.tokens < SHORTEST:
        parser.error(f"--tokens must be at least {SHORTEST}")
    for folder in (arguments.old, arguments.new):
        if not (folder / "config.json").is_file():
            parser.error(f"{folder}: no config.json; name the Hugging Face folder of a model")
    try:
        found = measure(arguments.old, arguments.new, arguments.tokens, arguments.precision)
    finally:
        stop_processes()
    shape = f"{found['responses']} responses of {found['tokens']} tokens, {found['precision']}"
    print(f"{shape}; ratios are standard deviations of log-ratios")
    print_table("OLD over the engine that sampled", found["engine"])
    print_table("NEW over OLD", found["update"])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_script(main))
