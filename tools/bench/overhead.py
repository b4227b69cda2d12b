"""Measures what a policy update costs beyond bare Megatron-Core: seconds per trained token.

    python tools/bench/overhead.py [--ranks 1 4] [--sizes mid long] [--rounds 5]

Both sides train the same model on the same sequences, packed into the same micro-batches, through
Megatron-Core's schedule, DDP and distributed optimizer, with the same number of updates:

    ours   the update of a GSPO step: packing, log-prob head, objective, metrics; no Routing Replay
    bare   packing, GPTModel's own output layer and vocab-parallel cross entropy over the same
           response tokens, and the loss as pre-training scripts of Megatron-LM compute it

Both sides share one policy and take turns in one run. Between turns, the classes of the policy's
model and of its output layer are switched. The ratios are medians over the rounds, once for the
wall time and once for the CPU time of all ranks. CPU time is reliable on a busy machine, too, and
with more ranks than cores. The target for ours / bare is 1.05. Shapes and lengths are those of
peers/workload.py. Each rank has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from our_step import build_loop
from torch import Tensor
from workload import SEED, SHAPES, WORKLOADS

from gspo_megatron.batching.plan import plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.models.policy import HiddenStates, PolicyModel
from gspo_megatron.models.transformer_config import changed
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.process.launcher import launch
from gspo_megatron.process.ranks import join_launcher
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.types import RolloutBatch

if TYPE_CHECKING:
    from gspo_megatron.batching.micro_batches import MicroBatch
    from gspo_megatron.rl.loop import ReinforcementLoop

WARMUP_ROUNDS = 1
SIDES = ("ours", "bare")


def draw_batch(size: str) -> RolloutBatch:
    """Return this rank's share of a step's sequences: random tokens, each with the probability
    that an untrained model would give it."""
    work, vocabulary = WORKLOADS[size], SHAPES[size]["vocab_size"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = torch.arange(rank, work.responses, ranks)
    responses = torch.tensor(work.lengths(1))[samples]
    total = int(responses.sum()) + work.prompt_tokens * len(samples)
    generator = torch.Generator().manual_seed(SEED + rank)
    return RolloutBatch(
        tokens=torch.randint(vocabulary, (total,), generator=generator),
        prompt_lengths=torch.full_like(responses, work.prompt_tokens),
        response_lengths=responses,
        rollout_logprobs=torch.full((int(responses.sum()),), 1 / vocabulary).log(),
        truncated=torch.ones(len(samples), dtype=torch.bool),
        sample_index=samples,
        group_index=samples // work.group,
    )


class Step:
    """A step's sequences on the ranks that train on them, and both ways to train."""

    def __init__(self, loop: ReinforcementLoop, size: str) -> None:
        self.loop, group = loop, data_parallel_group()
        self.models = loop.run_components.policy.models
        batch = draw_batch(size)
        rewards = torch.linspace(0.0, 1.0, len(batch.sample_index), dtype=torch.float64)
        self.index = gather_index(batch, rewards, group)
        self.plan = plan_step(
            self.index.lengths,
            self.index.masked_lengths,
            mini_batches=loop.config.objective.mini_batches,
            data_parallel_size=1,
            token_budget=loop.config.training.micro_batch_tokens,
        )
        self.sequences = redistribute(
            batch, self.index, self.plan, group, context_parallel_size=1, token_advantages=None
        )
        groups = torch.tensor(self.index.groups)
        self.advantages = loop.updater.objective.advantages.of_sequences(self.index.rewards, groups)

    def ours(self) -> None:
        self._switch(PolicyModel, HiddenStates)
        update_policy(
            self.loop.updater, self.sequences, self.index, self.plan, self.advantages.clone()
        )

    def bare(self) -> None:
        self._switch(GPTModel, ColumnParallelLinear)
        self._train()

    def _switch(self, model_class: type[GPTModel], layer_class: type[ColumnParallelLinear]) -> None:
        """Switch the classes of model and output layer. Both classes have the same parameters."""
        for model in self.models:
            model.__class__, model.output_layer.__class__ = model_class, layer_class

    def _train(self) -> None:
        """Run the train_step of a pre-training script for each mini-batch. Megatron-Core's
        `finalize_model_grads` divides the gradients by the number of tokens."""
        config = self.loop.run_components.policy.config
        with changed([(config, "finalize_model_grads_func", finalize_model_grads)]):
            self._updates()

    def _updates(self) -> None:
        run, trainer = self.loop.run_components, self.loop.trainer
        for micro_batches in run.builder.build_step(self.plan, self.sequences, self.index):
            for chunk in run.policy.chunks:
                chunk.zero_grad_buffer()
            trainer.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=pretraining_step,
                data_iterator=iter(micro_batches),
                model=run.policy.chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=max(each.packed.input_ids.shape[1] for each in micro_batches),
                micro_batch_size=1,
                forward_only=False,
            )
            trainer.optimizer.step()
            trainer.scheduler.step(increment=1)


def pretraining_step(
    iterator: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Do what Megatron-LM's forward_step does, with a loss mask that keeps the response tokens."""
    micro_batch = next(iterator)
    packed = micro_batch.packed
    labels, loss_mask = torch.zeros_like(packed.input_ids), torch.zeros(packed.input_ids.numel())
    labels[0, packed.token_rows], loss_mask[packed.token_rows] = packed.targets, 1.0

    def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = torch.sum(losses.view(-1).float() * loss_mask)
        tokens = loss_mask.sum().to(torch.int)
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}

    output = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        labels=labels,
        packed_seq_params=micro_batch.packed_seq_params,
    )
    return output, loss_function


def measure(size: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each side's update in each round: wall time of the slowest rank, and
    CPU time of all ranks together."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {
        side: {"clock": [], "processor": []} for side in SIDES
    }
    with tempfile.TemporaryDirectory() as folder:
        step = Step(build_loop(size, WARMUP_ROUNDS + rounds, folder), size)
        for number in range(WARMUP_ROUNDS + rounds):
            for side in found if number % 2 else reversed(found):
                dist.barrier()
                clock, processor = time.perf_counter(), time.process_time()
                getattr(step, side)()
                spent = torch.tensor([time.process_time() - processor], dtype=torch.float64)
                dist.all_reduce(spent)
                if number >= WARMUP_ROUNDS:
                    found[side]["clock"].append(time.perf_counter() - clock)
                    found[side]["processor"].append(spent.item())
    return found


def compare(size: str, ranks: int, rounds: int) -> dict[str, float]:
    """Measure on `ranks` ranks. Prints every round. Returns the ratios by name."""
    command = [sys.executable, __file__, "--rank-of", size]
    command += ["--ranks", str(ranks), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    tokens, ratios = sum(WORKLOADS[size].lengths(1)), {}
    for kind, prefix in (("clock", ""), ("processor", "processor_")):
        each = [a / b for a, b in zip(found["ours"][kind], found["bare"][kind], strict=True)]
        ratios[f"{prefix}{size}_{ranks}"] = statistics.median(each)
        micro = {side: 1e6 * statistics.median(found[side][kind]) / tokens for side in SIDES}
        print(
            f"{size}, {ranks} rank(s), {kind:<9} us a token:",
            *(f"{side} {spent:.1f}" for side, spent in micro.items()),
            f"  ours / bare by round: {' '.join(f'{ratio:.3f}' for ratio in each)}",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4], help="data-parallel")
    parser.add_argument("--sizes", nargs="+", choices=WORKLOADS, default=["mid", "long"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of both sides")
    parser.add_argument("--rank-of", choices=WORKLOADS, help=argparse.SUPPRESS)  # run as a rank
    arguments = parser.parse_args()
    if min(*arguments.ranks, arguments.rounds) < 1:
        parser.error("--ranks and --rounds must be at least 1")
    if arguments.rank_of is None:
        ratios: dict[str, float] = {}
        for size in arguments.sizes:
            for ranks in arguments.ranks:
                ratios |= compare(size, ranks, arguments.rounds)
        print(" ".join(f"{name}={ratio:.3f}" for name, ratio in ratios.items()))
    elif "RANK" not in os.environ and arguments.ranks[0] > 1:
        raise SystemExit(launch([sys.executable, *sys.argv], arguments.ranks[0]))
    else:
        join_launcher()
        found = measure(arguments.rank_of, arguments.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
