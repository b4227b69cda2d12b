"""Bytes that the loss sends under context parallelism, compared with gathering whole responses.

    python tools/bench_cp_loss.py [--cp 2] [--tokens 1024 … 131072] [--objectives gspo …]

Runs the package's policy update (gspo_megatron.rl.policy_update) on real gloo ranks that hold
zig-zag shards of packed sequences. Only the model is left out: log-probs are random numbers. The
script counts the bytes of the tensors that a rank gives to the collectives of torch.distributed,
below its Python functions. The first mini-batch also measures the mismatch with the rollout engine,
so it has its own column. The last column is the usual way, an all-gather of each response's
log-ratios, one float32 per token, as verl, slime and NeMo-RL gather the log-probs. The script
checks that both give the same sequence ratios. Exits with 1 if the loss and its metrics send more
than 16 bytes per sequence, or more for longer sequences. The 16 bytes are one float32 for the sum
of the log-ratios, and, for objectives that clip tokens, three more for the counts of clipped
tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gspo_megatron.process.launcher import launch
from gspo_megatron.process.ranks import join_launcher

if TYPE_CHECKING:
    from gspo_megatron.rl.policy_update import PolicyUpdater

MOST_BYTES = 16  # per sequence
PROMPT = 64  # tokens
MINI_BATCHES = 2


class Step:
    """One rank's sequences of a step: random tokens and log-probs, the same on all ranks."""

    def __init__(self, tokens: int, count: int) -> None:
        import torch

        from gspo_megatron.batching.plan import plan_step
        from gspo_megatron.batching.redistribute import Sequences, StepIndex

        source = random.Random(tokens)
        self.responses = [source.randint(tokens // 2, tokens) for _ in range(count)]
        lengths = [PROMPT + response for response in self.responses]
        offsets = [sum(self.responses[:n]) for n in range(count)]
        generator = torch.Generator().manual_seed(tokens)
        total = sum(self.responses)
        self.rollout_logprobs = -torch.rand(total, generator=generator)
        self.trained_logprobs = self.rollout_logprobs + 0.01 * torch.randn(
            total, generator=generator
        )
        self.entropies = torch.rand(total, generator=generator)
        self.sequences = Sequences(
            tokens={n: torch.arange(length) for n, length in enumerate(lengths)},
            rollout_logprobs=self.rollout_logprobs,
            offsets=dict(enumerate(offsets)),
        )
        self.index = StepIndex(
            source=(0,) * count,
            prompt_lengths=(PROMPT,) * count,
            response_lengths=tuple(self.responses),
            masked_lengths=tuple(self.responses),
            groups=(0,) * count,
            rewards=torch.arange(count, dtype=torch.float64),
        )
        self.plan = plan_step(
            lengths,
            self.responses,
            mini_batches=MINI_BATCHES,
            data_parallel_size=1,
            token_budget=2 * max(lengths),
        )

    def ratios(self, members: Sequence[int]) -> list[float]:
        """The exact sequence ratios."""
        starts = [self.sequences.offsets[n] for n in members]
        difference = (self.trained_logprobs - self.rollout_logprobs).double()
        means = [difference[s : s + self.responses[n]].mean() for s, n in zip(starts, members)]
        return [float(mean.exp()) for mean in means]


def make_counter() -> Any:
    """A context that records (name, bytes sent by this rank) of every collective."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    # the position of the input tensors in the arguments of the operator
    inputs = {"allreduce_": 0, "allgather_": 1, "_allgather_base_": 1}

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, int]] = []

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.namespace == "c10d":
                name = function._opname
                tensors = [x for x in tree_leaves(args[inputs[name]]) if isinstance(x, Tensor)]
                self.calls.append((name, sum(tensor.nbytes for tensor in tensors)))
            return function(*args, **(kwargs or {}))

    return Counter()


def make_updater(objective: str, cp: int) -> PolicyUpdater:
    """The package's policy update without a model: parts that only the model uses are empty."""
    from gspo_megatron.batching.micro_batches import MicroBatchBuilder
    from gspo_megatron.config.schema import ObjectiveSection
    from gspo_megatron.objectives import build_objective
    from gspo_megatron.rl.policy_update import PolicyUpdater

    policy: Any = SimpleNamespace(
        chunks=(),
        config=SimpleNamespace(
            context_parallel_size=cp,
            tensor_model_parallel_size=1,
            sequence_parallel=False,
            variable_seq_lengths=True,
            fp8=None,
        ),
    )
    trainer: Any = SimpleNamespace(
        optimizer=SimpleNamespace(zero_grad=lambda: None), update=lambda: (1.0, 1e-6)
    )
    section = ObjectiveSection(name=objective, mini_batches=MINI_BATCHES, old_logprobs="rollout")
    builder = MicroBatchBuilder(policy, pad_id=0, temperature=1.0)
    return PolicyUpdater(policy, trainer, builder, build_objective(section, 1), section)


def count_update(objective: str, step: Step, cp: int) -> list[tuple[int, int, int, int]]:
    """(micro-batches, sequences, collectives, bytes) of each mini-batch of an update. Only calls
    from the loss are counted."""
    import torch

    from gspo_megatron.rl import policy_update as step_module

    counted = []

    def without_model(_: Any, batch: Any, loss: Any, __: int) -> list[Any]:
        found, calls, sequences = [], [], 0
        for micro_batch in batch:
            packed = micro_batch.packed
            logprobs = step.trained_logprobs[packed.response_index].requires_grad_()
            entropies = step.entropies[packed.response_index]
            with make_counter() as counter:
                value, outputs = loss(micro_batch, logprobs, entropies)
                value.backward()
            assert logprobs.grad.shape == logprobs.shape
            check_ratios(step, packed.members, outputs.values["ratio/sequence"])
            calls += counter.calls
            sequences += len(packed.members)
            found.append(outputs)
        counted.append((len(batch), sequences, len(calls), sum(size for _, size in calls)))
        return found

    original = step_module.forward_backward
    step_module.forward_backward = without_model
    try:
        updater = make_updater(objective, cp)
        batches = updater.build_micro_batches(step.plan, step.sequences, step.index)
        updater.compute_old_logprobs(batches)
        advantages = updater.objective.advantages.of_sequences(
            step.index.rewards, torch.tensor(step.index.groups)
        )
        for mini_batch, micro_batches in zip(step.plan, batches, strict=True):
            updater.train(mini_batch, micro_batches, advantages)
    finally:
        step_module.forward_backward = original
    return counted


def count_gathering(step: Step, cp: int) -> tuple[int, int]:
    """(sequences, bytes) when every rank gathers the responses' log-ratios instead."""
    import torch
    import torch.distributed as dist

    updater = make_updater("gspo", cp)
    sequences = sent = 0
    for batch in updater.builder.build_step(step.plan, step.sequences, step.index):
        for packed in (micro_batch.packed for micro_batch in batch):
            place = packed.response_index
            local = step.trained_logprobs[place] - step.rollout_logprobs[place]
            # not counted: every rank can compute the positions from the lengths
            places: list[Any] = [None] * cp
            dist.all_gather_object(places, (place, packed.sequence_index))
            longest = max(len(index) for index, _ in places)
            shard = local.new_zeros(longest)
            shard[: len(local)] = local
            shards = [torch.empty_like(shard) for _ in range(cp)]
            with make_counter() as counter:
                dist.all_gather(shards, shard)
            index = torch.cat([sequences_of for _, sequences_of in places])
            values = torch.cat(
                [s[: len(index)] for s, (index, _) in zip(shards, places, strict=True)]
            )
            sums = torch.zeros(len(packed.members), dtype=torch.float64)
            sums.index_add_(0, index, values.double())
            check_ratios(step, packed.members, (sums / packed.response_lengths).exp())
            sequences += len(packed.members)
            sent += sum(size for _, size in counter.calls)
    return sequences, sent


def check_ratios(step: Step, members: Sequence[int], ratios: Any) -> None:
    """Compare with float64. Only the primary shard has ratios."""
    import torch

    if len(ratios):
        expected = torch.tensor(step.ratios(members), dtype=torch.float64)
        torch.testing.assert_close(ratios.double(), expected, rtol=1e-6, atol=0.0)


def run(arguments: argparse.Namespace) -> int:
    """All objectives and lengths, as one of the ranks; rank 0 prints."""
    from gspo_megatron.platform.groups import parallel_state, start_processes, stop_processes

    ranks = start_processes()
    parallel_state.initialize_model_parallel(
        context_parallel_size=arguments.cp, create_gloo_process_groups=False
    )
    rows: dict[str, list[float]] = {name: [] for name in arguments.objectives}
    calls: dict[str, float] = {}
    gathered = []
    if ranks.is_main:
        print(f"{arguments.cp} context-parallel ranks; bytes per sequence that a rank sends")
        columns = "".join(f"{name:>14} (first)" for name in arguments.objectives)
        print(f"{'tokens':>8} {columns} {'gathering':>14}")
    for tokens in arguments.tokens:
        step = Step(tokens, arguments.sequences)
        sequences, sent = count_gathering(step, arguments.cp)
        gathered.append(sent / sequences)
        text = ""
        for name in arguments.objectives:
            (_, first, _, first_bytes), *later = count_update(name, step, arguments.cp)
            micro_batches, sequences, collectives, sent = map(sum, zip(*later, strict=True))
            rows[name].append(sent / sequences)
            calls[name] = collectives / micro_batches
            text += f"{rows[name][-1]:14.4g} {first_bytes / first:7.4g}"
        if ranks.is_main:
            print(f"{tokens:8d} {text} {gathered[-1]:14.0f}", flush=True)
    stop_processes()
    if not ranks.is_main:
        return 0
    missed = [n for n, sizes in rows.items() if max(sizes) > MOST_BYTES or len(set(sizes)) > 1]
    for name in missed:
        print(f"{name}: more than {MOST_BYTES} bytes per sequence, or not the same for all lengths")
    totals = {f"bytes_{name}": max(sizes) for name, sizes in rows.items()}
    totals |= {f"collectives_{name}": number for name, number in calls.items()}
    totals |= {"bytes_gathering": gathered[-1], "missed": len(missed)}
    print(" ".join(f"{name}={value:.6g}" for name, value in totals.items()))
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks, each a process")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[2**n for n in range(10, 18)], help="in a response"
    )
    parser.add_argument("--objectives", nargs="+", default=["gspo", "gspo_token", "grpo"])
    parser.add_argument("--sequences", type=int, default=8, help="in a step")
    arguments = parser.parse_args()
    if arguments.cp < 2 or min(arguments.tokens) < 2 or arguments.sequences < MINI_BATCHES:
        parser.error(f"--cp and --tokens are at least 2, --sequences at least {MINI_BATCHES}")
    if "RANK" not in os.environ:
        return launch([sys.executable, *sys.argv], arguments.cp)
    join_launcher()
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
