"""One measurement of the log-prob head benchmark, in a process of its own; prints one JSON line.

    python tools/bench_peers/measure_head.py time   --sides ours straightforward …
    python tools/bench_peers/measure_head.py memory --sides ours
    python tools/bench_peers/measure_head.py error  --sides ours straightforward …

`time`: seconds of forward and backward of every side, in turn, round after round, wall-clock and
processor time of the first rank. `memory`: peak bytes of one side above inputs, weight and their
gradients. `error`: relative distance from float64 of log-probabilities, entropies and both
gradients. A side is ours, straightforward, shared_softmax, or ours:MIB or ours:MIB:ROWS, that is,
ours with tiles of another size. With --tp N each of N ranks holds a part of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gspo_megatron.process.launcher import launch
from gspo_megatron.process.ranks import join_launcher

WARM_UP_ROWS, WARM_UP_VOCAB = 64, 256


class Case:
    """Random inputs of this rank, on its device."""

    def __init__(self, rows: int, vocab: int, hidden: int, dtype: str) -> None:
        import torch
        import torch.distributed as dist

        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.group = dist.group.WORLD if ranks > 1 else None
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else None
        part = -(-vocab // ranks)
        self.start = rank * part
        precision = getattr(torch, dtype)

        def normal(seed: int, *shape: int) -> torch.Tensor:
            generator = torch.Generator(self.device or "cpu").manual_seed(seed)
            tensor = torch.empty(*shape, dtype=precision, device=self.device)
            return tensor.normal_(generator=generator)

        # logits of a standard deviation of 3: neither flat nor a single peak
        self.hidden = normal(0, rows, hidden).mul_(3 / hidden**0.5).requires_grad_()
        rows_of_weight = min(part, vocab - self.start)
        self.weight = normal(1 + rank, rows_of_weight, hidden).requires_grad_()
        generator = torch.Generator().manual_seed(99)
        self.targets = torch.randint(vocab, (rows,), generator=generator).to(self.device)
        self.upstream = normal(98, rows).float() / rows

    def forward(self, head: Callable[..., Any]) -> tuple[Any, Any]:
        self.hidden.grad = self.weight.grad = None
        return head(self.hidden, self.weight, self.targets, self.group, self.start)

    def run(self, head: Callable[..., Any]) -> tuple[Any, Any]:
        """Forward and backward; the gradients are stored in the inputs."""
        logprob, entropy = self.forward(head)
        logprob.backward(self.upstream)
        if self.device is not None:
            import torch

            torch.cuda.synchronize()
        return logprob.detach(), entropy


def head_of(side: str) -> Callable[..., Any]:
    """The function of a side. All have the arguments of logprob_heads."""
    import logprob_heads

    from gspo_megatron.models import logprob_head

    name, *sizes = side.split(":")
    if name != "ours":
        return getattr(logprob_heads, name)
    names = ("TILE_BYTES", "GPU_TILE_BYTES", "TILE_ROWS")
    constants = {constant: getattr(logprob_head, constant) for constant in names}
    if sizes:
        constants["TILE_BYTES"] = constants["GPU_TILE_BYTES"] = int(float(sizes[0]) * 2**20)
    if len(sizes) > 1:
        constants["TILE_ROWS"] = int(sizes[1])

    def ours(hidden: Any, weight: Any, targets: Any, group: Any, start: int) -> Any:
        for constant, value in constants.items():
            setattr(logprob_head, constant, value)
        return logprob_head.logprob_and_entropy(
            hidden, weight, targets, process_group=group, vocab_start=start
        )

    return ours


def measure_time(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Wall-clock and processor seconds of every round, by side."""
    case = make_case(arguments, arguments.rows)
    heads = {side: head_of(side) for side in arguments.sides}
    warm_up(arguments, heads)
    seconds: dict[str, dict[str, list[float]]] = {
        side: {"clock": [], "processor": []} for side in heads
    }
    for number in range(arguments.rounds):
        # the first side of a round changes, so no side always follows the same other side
        order = list(heads)[number % len(heads) :] + list(heads)[: number % len(heads)]
        for side in order:
            barrier(case)
            clock, processor = time.perf_counter(), time.process_time()
            case.run(heads[side])
            seconds[side]["processor"].append(time.process_time() - processor)
            barrier(case)
            seconds[side]["clock"].append(time.perf_counter() - clock)
    return seconds


def measure_memory(arguments: argparse.Namespace) -> dict[str, int]:
    """Peak bytes of the forward or the backward pass, the larger one, over all ranks: above the
    memory in use before, and in the backward pass also above the gradients that it makes."""
    import torch
    import torch.distributed as dist

    (side,) = arguments.sides
    head = head_of(side)
    warm_up(arguments, {side: head})
    case = make_case(arguments, arguments.rows)
    if case.device is not None:
        torch.cuda.reset_peak_memory_stats()
    before = resident_peak() if case.device is None else torch.cuda.memory_allocated()
    logprob, _ = case.forward(head)
    forward = peak(case) - before
    logprob.backward(case.upstream)
    gradients = sum(t.grad.nbytes for t in (case.hidden, case.weight))
    extra = torch.tensor(max(forward, peak(case) - before - gradients))
    if case.group is not None:
        dist.all_reduce(extra, dist.ReduceOp.MAX)
    return {"bytes": int(extra)}


def peak(case: Case) -> int:
    """Largest memory so far, in bytes: of the GPU, or resident memory on a CPU."""
    import torch

    return resident_peak() if case.device is None else torch.cuda.max_memory_allocated()


def measure_error(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """|result - exact| / |exact| in the Euclidean norm, by side and result, over all ranks."""
    import logprob_heads
    import torch
    import torch.distributed as dist

    case = make_case(arguments, min(arguments.rows, 128))
    expected = logprob_heads.exact(
        case.hidden.detach(), case.weight.detach(), case.targets, case.group, case.start,
        case.upstream,
    )  # fmt: skip
    errors: dict[str, dict[str, float]] = {}
    names = ("logprob", "entropy", "hidden_grad", "weight_grad")
    for side in arguments.sides:
        figures = (*case.run(head_of(side)), case.hidden.grad, case.weight.grad)
        errors[side] = {}
        for name, actual, exact in zip(names, figures, expected, strict=True):
            squares = torch.stack([((actual - exact) ** 2).sum(), (exact**2).sum()]).cpu()
            if case.group is not None:
                dist.all_reduce(squares)
            errors[side][name] = float((squares[0] / squares[1]) ** 0.5)
    return errors


def make_case(arguments: argparse.Namespace, rows: int) -> Case:
    return Case(rows, arguments.vocab, arguments.hidden, arguments.dtype)


def warm_up(arguments: argparse.Namespace, heads: dict[str, Callable[..., Any]]) -> None:
    """Load kernels and start threads, with small tensors."""
    small = Case(WARM_UP_ROWS, WARM_UP_VOCAB, arguments.hidden, arguments.dtype)
    for head in heads.values():
        small.run(head)


def barrier(case: Case) -> None:
    import torch.distributed as dist

    if case.group is not None:
        dist.barrier()


def resident_peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # of this program alone; ru_maxrss includes its parent's peak
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


TASKS = {"time": measure_time, "memory": measure_memory, "error": measure_error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--sides", nargs="+", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--matmul", choices=("highest", "high", "medium"), default="highest")
    arguments = parser.parse_args()
    if arguments.tp > 1 and "RANK" not in os.environ:
        raise SystemExit(launch([sys.executable, *sys.argv], arguments.tp))
    join_launcher()
    import torch
    import torch.distributed as dist

    torch.set_float32_matmul_precision(arguments.matmul)
    if arguments.tp > 1:
        from gspo_megatron.platform.rendezvous import join_store

        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=join_store(dist.default_pg_timeout),
            rank=int(os.environ["RANK"]),
            world_size=arguments.tp,
        )
    result = TASKS[arguments.task](arguments)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
    if arguments.tp > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
