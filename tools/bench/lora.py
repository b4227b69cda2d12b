"""Memory and time of an update that trains adapters of rank 16, and of an update of all weights.

    python tools/bench/lora.py [--layers 30] [--tokens 512] [--rounds 3] [--precision bf16]

The model has the shape of examples/smollm2_moe (SmolLM2-135M with 4 experts, of which each token
uses 2) and random weights. All its matrices have adapters. The two kinds of update run in separate
processes, on one rank and one thread, and the processes alternate. For each kind, the output has
the GB that the rank holds (weights, gradients, optimizer), the GB that autograd keeps for the
backward pass, and the estimates of `gspo-megatron check` for both numbers. The output also has the
CPU time of an update (forward, backward, optimizer), which is reliable even on a busy machine. The
last line has the largest error of `check` and the ratio of the times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
from torch import Tensor
from workload import SHAPES

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, run_chunk
from gspo_megatron.config import Config, check_config, parse_config, resolve_parallel
from gspo_megatron.estimate.activations import SavedTensors, chunk_passes, give_input, micro_batch
from gspo_megatron.estimate.model import rank_model, state_bytes
from gspo_megatron.models.build import build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes

LENGTH, PROMPT = 128, 64
SHAPE = dict(SHAPES["smollm2"])
VOCABULARY = SHAPE.pop("vocab_size")
MORE = {"ffn_hidden_size": 1536, "add_qkv_bias": False}
SIDES = {"all weights": 0, "adapters": 16}
KINDS = ("parameters", "gradients", "optimizer", "activations")


def config_of(rank: int, layers: int, tokens: int, precision: str) -> Config:
    config = parse_config(
        {
            "model": {
                "megatron": {**SHAPE, **MORE, "num_layers": layers},
                "tie_embeddings": True,
                "max_sequence_length": LENGTH,
                "lora": {"rank": rank},
            },
            "data": {"tokenizer": "none"},
            "training": {"precision": precision, "micro_batch_tokens": tokens},
        }
    )
    check_config(config, 1)
    return config


def estimated(config: Config, lengths: list[tuple[int, int]]) -> dict[str, int]:
    """Return the bytes that `gspo-megatron check` estimates."""
    with rank_model(config, resolve_parallel(config, 1), 0, VOCABULARY) as model:
        state = {kind: sum(by.values()) for kind, by in vars(state_bytes(model)).items()}
        passes = chunk_passes(model, micro_batch(model, lengths), samples=False)
    return state | {"activations": sum(each.saved_bytes for each in passes)}


def held(trainer: Trainer, parameters: list[torch.nn.Parameter]) -> dict[str, int]:
    """Return the bytes of the tensors that the rank holds."""
    frozen = [p for p in parameters if not p.requires_grad]
    states: dict[int, int] = {}
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.optimizer else ():
            states |= storages(group["params"])
        for each in part.optimizer.state.values() if part.optimizer else ():
            states |= storages([value for value in each.values() if isinstance(value, Tensor)])
    weights = storages(parameters)
    gradients = storages([p.main_grad for p in parameters if p.requires_grad])
    assert not any(hasattr(p, "main_grad") and p.main_grad is not None for p in frozen)
    states = {place: size for place, size in states.items() if place not in weights}
    sizes = (weights, gradients, states)
    return {kind: sum(part.values()) for kind, part in zip(KINDS, sizes, strict=False)}


def storages(tensors: list[Any]) -> dict[int, int]:
    """Return the storages of tensors: address -> bytes."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


def measure(config: Config, tokens: int, updates: int) -> dict[str, Any]:
    """Return the bytes that a rank holds and keeps, measured and as `check` estimates them, and the
    seconds of the updates after the first one."""
    lengths = [(PROMPT, LENGTH - PROMPT)] * (tokens // LENGTH)
    by_check = estimated(config, lengths)
    start_processes()
    parallel = resolve_parallel(config, 1)
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, VOCABULARY)
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-5, 1e-5, 0, 1, "constant"))
    builder = MicroBatchBuilder(policy, 0, 1.0)
    sequences = [torch.randint(VOCABULARY, (LENGTH,)) for _ in lengths]
    responses = [response for _, response in lengths]
    offsets = [sum(responses[:number]) for number in range(len(lengths))]
    [chunk], seconds, kept = policy.chunks, [], 0
    for number in range(updates + 1):
        start = time.process_time()
        batch = builder.build(range(len(lengths)), sequences, responses, offsets)
        give_input(chunk, batch)
        if number == 0:
            with SavedTensors(policy.models[0]) as saved:
                output = run_chunk(chunk, batch)
            kept = saved.num_bytes()
        else:
            output = run_chunk(chunk, batch)
        (-output[0].sum()).backward()
        trainer.update()
        zero_gradients(policy.chunks, trainer.optimizer)
        seconds.append(time.process_time() - start)
    found = held(trainer, [p for model in policy.models for p in model.parameters()])
    stop_processes()
    return {"held": found | {"activations": kept}, "check": by_check, "seconds": seconds[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512, help=f"a multiple of {LENGTH}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--updates", type=int, default=2, help="timed updates of a turn")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--side", choices=SIDES, help="measure one side, and print JSON")
    given = parser.parse_args()
    if given.side:
        torch.set_num_threads(1)
        config = config_of(SIDES[given.side], given.layers, given.tokens, given.precision)
        print(json.dumps(measure(config, given.tokens, given.updates)))
        return
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    worst = 0.0
    for _ in range(given.rounds):
        for side in SIDES:
            words = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            record = json.loads(done.stdout.splitlines()[-1])
            seconds[side] += record["seconds"]
            print(f"{side:<12}", *(f"{s:6.2f} s" for s in record["seconds"]))
            for kind in KINDS:
                real, by_check = record["held"][kind], record["check"][kind]
                worst = max(worst, abs(by_check - real) / real)
                print(f"    {kind:<12} {real / 1e9:7.3f} GB   check {by_check / 1e9:7.3f} GB")
            sums = (sum(record[where].values()) / 1e9 for where in ("held", "check"))
            print("    {:<12} {:7.3f} GB   check {:7.3f} GB".format("all", *sums), flush=True)
    whole, adapters = (statistics.median(times) for times in seconds.values())
    print(f"error={worst:.3f} seconds={whole:.2f},{adapters:.2f} ratio={adapters / whole:.2f}")


if __name__ == "__main__":
    main()
