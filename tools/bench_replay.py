"""Memory and time of Routing Replay: bytes per token, and its share of a training step.

    python tools/bench_replay.py [--rounds 25] [--threads 1]

Bytes are those of the table that a real forward pass of 48 layers of 128 experts, top 8, records
(the routing of Qwen3-30B-A3B at a small width). The sizes in int16 and int32 are printed, too.

Time is that of whole policy updates on one process: old log-probs, then 4 mini-batches of training
with their optimizer steps, of a 4-layer Qwen3-MoE-shaped model of width 256 with 32 experts, top 8.
The cost of a layer grows with the square of the width, the cost of routes does not, so the share in
a real model is smaller. Updates without replay, with r2 and with r3 take turns, round after round.
Each is compared with the update without replay of the same round. The medians are printed, of
wall-clock and of processor time (other processes disturb the latter less). "Routing code" is the
time inside it, without the routers' native choice. The routes of r3 are recorded by a forward pass
before the clock starts, as a rollout would record them. Exits with 1 if replay takes more than 3%
of processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

MOST_OVERHEAD = 0.03
MODES = ("off", "r2", "r3")
MINI_BATCHES, SEQUENCES, PROMPT, RESPONSE, BUDGET = 4, 32, 16, 48, 1024
VOCABULARY = 512
WIDE = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 32,
    "moe_ffn_hidden_size": 96,
    "num_moe_experts": 32,
    "moe_router_topk": 8,
}
# The depth and the routing of Qwen3-30B-A3B; the size of routes does not depend on the width.
DEEP = WIDE | {
    "num_layers": 48,
    "hidden_size": 32,
    "kv_channels": 8,
    "moe_ffn_hidden_size": 16,
    "num_moe_experts": 128,
}


def build_policy_of(megatron: dict[str, Any]) -> Any:
    """The policy on this process, in fp32."""
    from gspo_megatron.config import parse_config, resolve_parallel
    from gspo_megatron.models.build import build_policy

    config = parse_config(
        {
            "data": {"tokenizer": "none"},
            "model": {"megatron": megatron | {"moe_aux_loss_coeff": 0.001}},
            "training": {"precision": "fp32"},
        }
    )
    return build_policy(config, resolve_parallel(config, 1), VOCABULARY)


@dataclass
class Workload:
    """One RL step's sequences and its plan, always the same."""

    sequences: Any
    index: Any
    plans: Any

    @classmethod
    def random(cls) -> Workload:
        import torch

        from gspo_megatron.batching.plan import plan_step
        from gspo_megatron.batching.redistribute import Sequences, StepIndex

        generator = torch.Generator().manual_seed(1)
        numbers = range(SEQUENCES)
        tokens = torch.randint(VOCABULARY, (SEQUENCES, PROMPT + RESPONSE), generator=generator)
        sequences = Sequences(
            tokens=dict(enumerate(tokens)),
            rollout_logprobs=torch.full((SEQUENCES * RESPONSE,), -6.0),
            offsets={n: n * RESPONSE for n in numbers},
        )
        index = StepIndex(
            source=(0,) * SEQUENCES,
            prompt_lengths=(PROMPT,) * SEQUENCES,
            response_lengths=(RESPONSE,) * SEQUENCES,
            masked_lengths=(RESPONSE,) * SEQUENCES,
            groups=tuple(n // 8 for n in numbers),
            rewards=torch.rand(SEQUENCES, generator=generator, dtype=torch.float64),
        )
        plans = plan_step(
            index.lengths,
            index.response_lengths,
            mini_batches=MINI_BATCHES,
            data_parallel_size=1,
            token_budget=BUDGET,
        )
        return cls(sequences, index, plans)


class Updates:
    """A policy that is updated with replay and without."""

    def __init__(self) -> None:
        import torch

        from gspo_megatron.batching.micro_batches import MicroBatchBuilder
        from gspo_megatron.config.schema import ObjectiveSection, OptimizerSection, RoutingSection
        from gspo_megatron.models.optimizer import Schedule, build_trainer
        from gspo_megatron.objectives import build_objective
        from gspo_megatron.rl.policy_update import PolicyUpdater

        self.policy = build_policy_of(WIDE)
        self.work = Workload.random()
        trainer = build_trainer(
            self.policy, OptimizerSection(), Schedule(1e-6, 1e-6, 0, 1, "constant")
        )
        self.builder = MicroBatchBuilder(self.policy, 0, 1.0)
        section = ObjectiveSection(name="gspo")
        objective = build_objective(section, RESPONSE)
        index = self.work.index
        groups = torch.tensor(index.groups)
        self.advantages = objective.advantages.of_sequences(index.rewards, groups)
        self.updaters = {
            mode: PolicyUpdater(
                self.policy,
                trainer,
                self.builder,
                objective,
                section,
                RoutingSection(replay=mode),
            )
            for mode in MODES
        }

    def run(self, mode: str) -> tuple[float, float]:
        """Wall-clock and processor seconds of one update."""
        from megatron.core.transformer.moe.router import TopKRouter

        from gspo_megatron.rl.loop import update_policy
        from gspo_megatron.routing.hooks import attach_hooks

        attach_hooks(self.policy.models)
        sequences = self.work.sequences
        if mode == "r3":
            sequences = replace(sequences, routes=self.recorded_routes())
        if mode == "off":
            for module in self.policy.models[0].modules():
                if isinstance(module, TopKRouter):
                    module.router_replay = None
        start, processor = time.perf_counter(), time.process_time()
        metrics = update_policy(
            self.updaters[mode], sequences, self.work.index, self.work.plans, self.advantages
        )
        seconds = time.perf_counter() - start, time.process_time() - processor
        assert (metrics.get("replay/bytes", 0) > 0) == (mode != "off")
        return seconds

    def recorded_routes(self) -> dict[int, Any]:
        """[length, layers, k] of each sequence, as the policy routes them now."""
        from gspo_megatron.batching.micro_batches import response_logprobs
        from gspo_megatron.routing.replay import Recording

        routes = {}
        batches = self.builder.build_step(self.work.plans, self.work.sequences, self.work.index)
        for micro_batch in (m for batch in batches for m in batch):
            recording = micro_batch.routes = Recording()
            response_logprobs(self.policy, [micro_batch])
            experts = recording.table().experts.transpose(0, 1)
            members = micro_batch.packed.members
            routes |= zip(members, experts.split(PROMPT + RESPONSE), strict=True)
        return routes


class Clock:
    """Seconds inside some methods; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0

    def around(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """sign -1: the time of a nested call is subtracted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            counts = self._inside == (0 if sign > 0 else 1)
            self._inside += 1
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if counts:
                self.seconds += sign * (time.perf_counter() - start)
            self._inside -= 1
            return result

        return timed

    @contextlib.contextmanager
    def on_the_routing_code(self) -> Iterator[None]:
        from gspo_megatron.rl.routing_replay import RoutingReplay
        from gspo_megatron.routing.hooks import RouterHook

        native = RouterHook.get_replay_topk

        def hook(*args: Any, default_compute_topk: Any = None) -> Any:
            *args, default = args
            return native(*args, default_compute_topk=self.around(default, sign=-1))

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(RouterHook, "get_replay_topk", self.around(hook)))
            for name in (
                "start",
                "_replaying",
                "_take",
                "_release",
                "metrics",
            ):
                timed = self.around(getattr(RoutingReplay, name))
                stack.enter_context(mock.patch.object(RoutingReplay, name, timed))
            yield


def bytes_of_a_token() -> float:
    """Size of the table that a forward pass records, per token."""
    from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
    from gspo_megatron.routing.hooks import attach_hooks
    from gspo_megatron.routing.replay import Recording

    policy = build_policy_of(DEEP)
    attach_hooks(policy.models)
    work = Workload.random()
    builder = MicroBatchBuilder(policy, 0, 1.0)
    micro_batch = builder.build_step(work.plans, work.sequences, work.index)[0][0]
    recording = micro_batch.routes = Recording()
    response_logprobs(policy, [micro_batch])
    table = recording.table()
    assert table.experts.shape[::2] == (48, 8)
    return table.num_bytes / table.experts.shape[1]


def compare(rounds: int) -> dict[str, float]:
    """Print every round. Returns the median overheads."""
    updates = Updates()
    for mode in MODES:
        updates.run(mode)  # the first of anything is slow
    overheads: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        order = MODES[number % 3 :] + MODES[: number % 3]
        taken = {mode: updates.run(mode) for mode in order}
        for mode in MODES:
            seconds[mode].append(taken[mode][0])
        for mode in MODES[1:]:
            for name, which in ((mode, 0), (f"{mode}_cpu", 1)):
                overheads.setdefault(name, []).append(taken[mode][which] / taken["off"][which] - 1)
        texts = (f"{m} {taken[m][0]:.3f} s ({taken[m][1]:.3f})" for m in MODES)
        print(f"  round {number + 1}: {'   '.join(texts)}", flush=True)
    found = {f"overhead_{name}": statistics.median(v) for name, v in overheads.items()}
    for mode in MODES[1:]:
        clock = Clock()
        with clock.on_the_routing_code():
            whole, _ = updates.run(mode)
        found[f"inside_{mode}"] = clock.seconds / whole
        print(f"  routing code of {mode}: {1000 * clock.seconds:.1f} ms of {whole:.3f} s")
    found["step_seconds"] = statistics.median(seconds["off"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="turns of off, r2 and r3")
    parser.add_argument("--threads", type=int, default=1, help="threads of the operators")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)

    from gspo_megatron.config import parse_config, resolve_parallel
    from gspo_megatron.platform.groups import (
        set_up_model_parallel,
        start_processes,
        stop_processes,
    )

    start_processes(timeout_minutes=5.0)
    config = parse_config({"data": {"tokenizer": "none"}})
    set_up_model_parallel(resolve_parallel(config, 1), seed=1)
    size = bytes_of_a_token()
    print(
        f"48 layers, top 8 of 128: {size:.0f} B/token, int16 {2 * size:.0f}, int32 {4 * size:.0f}"
    )
    print(f"one update, wall-clock (processor) time, load {os.getloadavg()[0]:.1f} before:")
    found = compare(arguments.rounds)
    print(f"load {os.getloadavg()[0]:.1f} after")
    stop_processes()
    numbers = {name: f"{value:.4f}" for name, value in found.items()}
    numbers |= {"bytes_a_token": f"{size:.0f}", "experts": str(WIDE["num_moe_experts"])}
    print(" ".join(f"{name}={value}" for name, value in numbers.items()))
    return int(max(found["overhead_r2_cpu"], found["overhead_r3_cpu"]) > MOST_OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
