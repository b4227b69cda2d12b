"""Measures RL steps of a model with layers of Qwen3-30B-A3B, against the ceilings of this GPU.

    python tools/gpu_visit/throughput.py [--layers 2] [--backend auto] [--rehearse]

The model has two layers and the vocabulary of Qwen3-30B-A3B: 1.9 B random parameters, of which
0.42 B are active for a token. The ceilings are measured: a copy of 1 GiB on the device, and a
product of two bf16 matrices of 8,192 x 8,192. Each of three steps has 64 responses of 512 tokens to
prompts of 256 tokens, and two updates, in bf16. The second step is profiled, the third is measured.
FLOPs are counted by formula: 2 for each active parameter and token of a pass, plus causal
attention. A pass with gradients counts as three passes. Decoding reads all weights once for each
token, so its ceiling is the bandwidth of the copy. --rehearse takes a tiny model, for a machine
without a GPU. The last line has all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench" / "peers"))

from workload import Workload, sections_of

ROOT = Path(__file__).resolve().parents[2]
WORK = Workload(prompts=16, group=4, longest=512, prompt_tokens=256, mini_batches=2)
VOCABULARY, MICRO_BATCH_TOKENS = 151_936, 12_288
TINY_WORK = Workload(prompts=4, group=2, longest=8, prompt_tokens=8, mini_batches=2)
TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 16, "num_moe_experts": 8, "moe_router_topk": 2, "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32}  # fmt: skip
TINY_VOCABULARY = 512
PROFILED, MEASURED = 2, 3  # the numbers of the steps that are profiled and measured
# CUPTI's names of the calls that start a kernel. WAITS names the calls that wait for the device,
# and NO_KERNEL the operators that start no kernel.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
NO_KERNEL = {
    *("as_strided", "view", "_unsafe_view", "_reshape_alias", "detach", "alias", "resolve_conj"),
    *("empty", "empty_strided", "empty_like", "_local_scalar_dense", "item", "result_type"),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def values_of(arguments: argparse.Namespace, work: Workload, folder: str) -> dict[str, Any]:
    """Return the configuration of a run in `folder`."""
    longest = work.prompt_tokens + work.longest
    return {
        **sections_of(work),
        "model": {
            "preset": "qwen3-30b-a3b",
            "backend": arguments.backend,
            "vocab_size": TINY_VOCABULARY if arguments.rehearse else VOCABULARY,
            "max_sequence_length": longest,
            "megatron": TINY if arguments.rehearse else {"num_layers": arguments.layers},
        },
        "optimizer": {"learning_rate": 1e-6},
        "training": {
            "steps": MEASURED,
            "precision": "bf16",
            "micro_batch_tokens": max(longest, 0 if arguments.rehearse else MICRO_BATCH_TOKENS),
        },
        "logging": {"dir": folder, "samples_per_step": 0, "plots": False},
    }


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of a call, the mean of ten. The timer waits for the device."""
    from torch.utils.benchmark import Timer

    return Timer("work()", globals={"work": work}).timeit(10).mean


def ceilings() -> dict[str, float]:
    """Return the GB/s that a copy reads and writes, and the TFLOP/s of a large product."""
    import torch

    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    size = 8192
    left, right = torch.randn(2, size, size, device="cuda").bfloat16()
    product = 2 * size**3 / seconds_of(lambda: left @ right)
    return {"copy_gb_per_second": copy / 1e9, "matmul_tflops": product / 1e12}


def forward_flops(shape: Any, work: Workload, vocab_size: int) -> tuple[float, float]:
    """Return the FLOPs of one forward pass over all sequences of a step: (all layers, the head).
    The head sees only the response tokens."""
    queries = shape.num_attention_heads * shape.kv_channels
    keys = shape.num_query_groups * shape.kv_channels
    attention = shape.hidden_size * (2 * queries + 2 * keys)
    experts = 3 * shape.hidden_size * shape.moe_ffn_hidden_size * shape.moe_router_topk
    router = shape.hidden_size * shape.num_moe_experts
    length = work.prompt_tokens + work.longest
    tokens = work.responses * length
    products = 2.0 * (attention + experts + router) * tokens
    scores = 2.0 * queries * length * tokens  # two products over half of the pairs
    head = 2.0 * shape.hidden_size * vocab_size * work.responses * work.longest
    return shape.num_layers * (products + scores), head


def has_kernels() -> bool:
    """Return whether there is a real GPU, not a device that a test simulates."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


@dataclass
class Calls:
    """The host's calls to the device in a part of a step. Without a real GPU, operators that call
    no other operator count as launches, and the simulated device counts the waits."""

    launches: float = 0.0
    waits: float = 0.0

    def each(self, kind: str, count: int) -> dict[str, float]:
        return {
            f"launches_per_{kind}": self.launches / count,
            f"waits_per_{kind}": self.waits / count,
        }


@contextlib.contextmanager
def profiled(title: str) -> Iterator[Calls]:
    """Profile the `with` block, then print where the time goes. Without a GPU, print the most
    frequent operators, and the lines of code that wait."""
    import torch

    calls, rehearsal = Calls(), sys.modules.get("tests.cuda_rehearsal.runtime")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if has_kernels():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    waiting = rehearsal.counted_waits() if rehearsal else contextlib.nullcontext(Counter())
    with waiting as waits, torch.profiler.profile(activities=activities) as profile:
        yield calls
    averages = profile.key_averages()
    print(f"{title}:")
    if has_kernels():
        calls.launches = sum(event.count for event in averages if event.key in LAUNCHES)
        calls.waits = sum(event.count for event in averages if event.key in WAITS)
        order = "self_device_time_total"
    else:
        names = (e.name.removeprefix("aten::") for e in profile.events() if _is_leaf(e))
        calls.launches = sum(1 for name in names if name not in NO_KERNEL)
        calls.waits = sum(waits.values())
        order = "count"
        for place, count in waits.most_common(10):
            print(f"{count:>6} waits: {place}")
    print(averages.table(sort_by=order, row_limit=25, max_name_column_width=70))


def _is_leaf(event: Any) -> bool:
    return event.name.startswith("aten::") and not event.cpu_children


def profiled_step(loop: Any) -> dict[str, float]:
    """Run a step whose first training pass is profiled."""
    native, figures = loop.updater.train, {}

    def train(mini_batch: Any, micro_batches: Any, advantages: Any) -> None:
        if figures:
            native(mini_batch, micro_batches, advantages)
            return
        with profiled(f"an update of {len(micro_batches)} micro-batches") as calls:
            native(mini_batch, micro_batches, advantages)
        figures.update(calls.each("micro_batch", len(micro_batches)))

    with mock.patch.object(loop.updater, "train", train):
        loop.step(PROFILED)
    return figures


def profiled_decoding(loop: Any) -> dict[str, float]:
    """Profile a short rollout of 64 responses."""
    from gspo_megatron.rollout.engine import Requests, Sampling

    tokens, engine = 32, loop.collector.source.engine
    requests = Requests([(1, 2, 3, 4)] * 16, list(range(16)), responses_per_prompt=4)
    engine.generate(requests, Sampling(max_tokens=tokens), seed=1)
    with profiled(f"{tokens} tokens of 64 responses") as calls:
        engine.generate(requests, Sampling(max_tokens=tokens), seed=1)
    return calls.each("decoded_token", tokens)


def measure(config: Any, work: Workload) -> dict[str, float]:
    """Return the figures of a step. If there is a GPU, they include shares of the ceilings."""
    import torch
    from our_step import loop_of

    on_gpu = has_kernels()
    limits = ceilings() if on_gpu else {"copy_gb_per_second": 0.0, "matmul_tflops": 0.0}
    loop = loop_of(config, work, config.model.vocab_size)
    parameters = sum(p.numel() for p in loop.run_components.policy.models[0].parameters())
    loop.step(1)
    found: dict[str, float] = {"parameters": parameters, **limits}
    found |= profiled_step(loop)
    found |= profiled_decoding(loop)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    record = loop.step(MEASURED)
    shape = config.resolved_model()
    generated = work.responses * work.longest
    total = generated + work.responses * work.prompt_tokens
    seconds = {p: record[f"perf/{p}_seconds"] for p in ("step", "rollout", "logprob", "train")}
    layers, head = forward_flops(shape, work, config.model.vocab_size)
    recomputed = 1 - 1 / work.mini_batches  # the first mini-batch needs no pass for old log-probs
    trained = 3 * (layers + head)
    figures = {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "generated_per_second": generated / seconds["rollout"],
        "trained_tokens_per_second": total / seconds["train"],
        "scored_tokens_per_second": recomputed * total / seconds["logprob"],
        "train_tflops": trained / seconds["train"] / 1e12,
        "logprob_tflops": recomputed * (layers + head) / seconds["logprob"] / 1e12,
        "peak_memory_gb": record["perf/peak_memory_bytes"] / 1e9,
        "mismatch": record["mismatch/abs_mean"],
    }
    if on_gpu:
        weights = 2.0 * parameters  # the bytes of the weights in bf16
        least = weights * work.longest / (limits["copy_gb_per_second"] * 1e9)
        figures["train_share_of_matmul"] = figures["train_tflops"] / limits["matmul_tflops"]
        figures["logprob_share_of_matmul"] = figures["logprob_tflops"] / limits["matmul_tflops"]
        figures["rollout_share_of_copy"] = least / seconds["rollout"]
    return found | figures


def estimated_gb(path: Path) -> float:
    """Return the peak memory that `gspo-megatron check` estimates, in GB."""
    command = [sys.executable, "-m", "gspo_megatron", "check", str(path), "--memory", "--no-files"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=60,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        return float("nan")
    for word in reversed(done.stdout.split()):
        if word.startswith("worst_rank_bytes="):
            return float(word.split("=")[1]) / 1e9
    print(f"check: {done.stderr[-300:]}", file=sys.stderr)
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2, help="of the cut model")
    parser.add_argument("--backend", default="torch_native", help="model.backend")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from gspo_megatron.config import parse_config
    from gspo_megatron.config.load import to_yaml
    from gspo_megatron.platform.groups import stop_processes

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = TINY_WORK if arguments.rehearse else WORK
        config = parse_config(values_of(arguments, work, folder))
        path = Path(folder, "config.yaml")
        path.write_text(to_yaml(config))
        try:
            figures = measure(config, work)
        finally:
            stop_processes()  # a process group that is left behind hides the error by a warning
        print(line_of(figures), flush=True)  # print now, because the estimate may take too long
        figures["estimated_memory_gb"] = estimated_gb(path)
    figures["seconds"] = time.perf_counter() - started
    print(line_of(figures))


def line_of(figures: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in figures.items())


if __name__ == "__main__":
    main()
