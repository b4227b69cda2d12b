"""Tokens per second of rollouts with skewed lengths: this package, vLLM and transformers.

    python tools/bench_rollout.py [--vllm-python PATH] [--batch-size 32] [--steps 4]

The same random Qwen3-MoE weights, prompts and response lengths for all contenders, one after the
other, with one thread:

    refilled      rollout.engine megatron, `batch_size` rows; a free row takes the next response
    all_at_once   the same without a batch size
    transformers  its continuous batching, at most `batch_size` requests at a time
    vllm          a vLLM server with as many, if `--vllm-python` names a Python that has vLLM

Lengths are log-normal, and forced: transformers and vLLM get them as limits; in our engine an end
token takes the place of the last token drawn. The contenders take turns, step by step. Between two
steps the policy gets an optimizer update, because our engine decodes with the trained weights. The
first step is reported apart from the median of the later ones. Each ratio is the one of `refilled`
to another contender, by the clock or by processor time. On a busy machine processor time is more
reliable for transformers, which shares our process. A server has several processes, which compute
at the same time where there are cores for it: for vllm the clock counts. The target is 1.5 for
transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import aiohttp
import psutil
import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron import engine as megatron
from gspo_megatron.rollout.megatron.rows import Responses, Rows
from gspo_megatron.rollout.vllm import process
from gspo_megatron.rollout.vllm.client import Client
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import ModelFacts

if TYPE_CHECKING:
    from gspo_megatron.models.build import Policy
    from gspo_megatron.models.optimizer import Trainer

PAGE = 256  # tokens in a page of transformers; of 32, 64 and 256 the fastest here
VOCABULARY, PAD, END = 1024, 0, 1
# sizes that vLLM can load, too: channels of a head and hidden size are multiples of 32
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "eos_token_id": END,
}


@dataclass
class Workload:
    """The requests of one step."""

    prompts: list[list[int]]
    per_prompt: int
    lengths: list[int]  # [prompts * per_prompt]: tokens of the responses
    seed: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Contender(Protocol):
    """One way to roll out."""

    name: str

    def roll_out(self, work: Workload) -> list[int]:
        """Draw all responses. Returns their lengths in tokens."""
        ...

    def processor_seconds(self) -> float:
        """Processor time of all its processes so far."""
        ...


class ForcedRows(Rows):
    """Rows whose responses end at given lengths, and not before."""

    wanted: Tensor  # [responses + 1]; the spare one never ends

    def add(self, tokens: Tensor, logprobs: Tensor, end_ids: Tensor, responses: Responses) -> None:
        is_last = self.lengths + 1 == self.wanted[self.response]
        others = torch.where(tokens == END, END + 1, tokens)
        super().add(torch.where(is_last, END, others), logprobs, end_ids, responses)


@contextlib.contextmanager
def forced_lengths(lengths: Sequence[int]) -> Iterator[None]:
    """Our engine draws responses of these lengths."""
    ForcedRows.wanted = torch.tensor([*lengths, 0])
    megatron.Rows = ForcedRows
    try:
        yield
    finally:
        megatron.Rows = Rows


class Ours:
    """The engine of this package, in process."""

    def __init__(self, name: str, policy: Policy, batch_size: int | None) -> None:
        self.name = name
        self.engine = megatron.MegatronEngine(policy, pad_id=PAD, eos_id=END, batch_size=batch_size)

    def roll_out(self, work: Workload) -> list[int]:
        requests = Requests(work.prompts, range(len(work.prompts)), work.per_prompt)
        with forced_lengths(work.lengths):
            sampling = Sampling(max_tokens=max(work.lengths))
            batch = self.engine.generate(requests, sampling, work.seed)
        return batch.response_lengths.tolist()

    def processor_seconds(self) -> float:
        return time.process_time()


class Transformers:
    """Continuous batching by transformers. Its manager stays for all steps."""

    name = "transformers"

    def __init__(self, folder: str, batch_size: int, longest: int) -> None:
        """longest: tokens of a sequence, prompt included."""
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=batch_size * -(-longest // PAGE),
            max_batch_tokens=512,
            max_requests_per_batch=batch_size,
            return_logprobs=True,
            use_cuda_graph=False,
        )
        self.sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1)

    def roll_out(self, work: Workload) -> list[int]:
        requests = iter(work.lengths)
        lengths = {}
        with self.model.continuous_batching_context_manager(
            generation_config=self.sampling,
            continuous_batching_config=self.batching,
            persistent_manager=True,
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=next(requests), eos_token_id=-1)
                for prompt in work.prompts
                for _ in range(work.per_prompt)
            ]
            while len(lengths) < len(names):
                done = manager.get_result(timeout=1)
                if done is not None and done.is_finished():
                    lengths[done.request_id] = len(done.generated_tokens)
        return [lengths[name] for name in names]

    def processor_seconds(self) -> float:
        return time.process_time()


class Vllm:
    """A vLLM server of its own. All requests of a step are sent at once; the server queues them."""

    name = "vllm"

    def __init__(self, python: str, folder: str, batch_size: int, longest: int) -> None:
        """longest: tokens of a sequence, prompt included."""
        arguments = {
            **process.needed_arguments(folder, "float32", routes=False, on_cpu=True),
            "max_num_seqs": batch_size,
            "max_model_len": longest,
        }
        self.token = secrets.token_hex()
        environ = {**process.common_environment(self.token), **process.cpu_environment()}
        words = process.server_words(python, arguments)
        self.server = process.ServerProcess(words, environ, Path(folder) / "vllm.log")
        self.facts = ModelFacts(VOCABULARY, SHAPE["num_hidden_layers"], 0, 0, ())

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError if it ends instead."""

        async def why_not_healthy() -> str | None:
            async with aiohttp.ClientSession() as session:
                return await Client(self.server.url, session, self.token).why_not_healthy(seconds=5)

        while asyncio.run(why_not_healthy()) is not None:
            ended = self.server.has_ended()
            if ended is not None:
                raise RuntimeError(f"the vLLM server {ended}")
            time.sleep(0.5)

    def roll_out(self, work: Workload) -> list[int]:
        return asyncio.run(self._roll_out(work))

    async def _roll_out(self, work: Workload) -> list[int]:
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections) as session:
            client = Client(self.server.url, session, self.token)
            prompts = (prompt for prompt in work.prompts for _ in range(work.per_prompt))
            responses = await asyncio.gather(
                *(
                    client.generate(
                        prompt,
                        {"temperature": 1.0, "max_tokens": length, "ignore_eos": True},
                        self.facts,
                        seconds=600,
                        routes=False,
                    )
                    for prompt, length in zip(prompts, work.lengths, strict=True)
                )
            )
        return [len(response.token_ids) for response in responses]

    def processor_seconds(self) -> float:
        """The server's, and that of sending requests to it."""
        server = psutil.Process(self.server.pid)
        times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
        return time.process_time() + sum(t.user + t.system for t in times)


def save_weights(folder: str, seed: int) -> None:
    """A random Qwen3-MoE in a Hugging Face folder."""
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).save_pretrained(folder)


def load_policy(folder: str) -> tuple[Policy, Trainer]:
    """The policy with the folder's weights on one rank, and its optimizer."""
    from gspo_megatron.config import check_config, parse_config, resolve_parallel
    from gspo_megatron.hf.load import load_hf
    from gspo_megatron.models.build import build_policy
    from gspo_megatron.models.optimizer import Schedule, build_trainer
    from gspo_megatron.platform.groups import set_up_model_parallel, start_processes

    config = parse_config(
        {
            "model": {"hf_path": folder, "backend": "torch_native"},
            "data": {"tokenizer": "none"},
            "training": {"precision": "fp32"},
        }
    )
    check_config(config, start_processes().world_size)
    parallel = resolve_parallel(config, 1)
    set_up_model_parallel(parallel, seed=1)
    policy = build_policy(config, parallel, VOCABULARY)
    load_hf(folder, policy)
    schedule = Schedule(1e-6, 1e-6, 0, 1, "constant")
    return policy, build_trainer(policy, config.optimizer, schedule)


def update(policy: Policy, trainer: Trainer, seed: int) -> None:
    """One optimizer update on random sequences, by the trainer's own forward and backward pass."""
    from gspo_megatron.batching.micro_batches import MicroBatchBuilder, forward_backward
    from gspo_megatron.models.optimizer import zero_gradients

    tokens = torch.randint(VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(seed))
    builder = MicroBatchBuilder(policy, PAD, 1.0)
    micro_batch = builder.build(range(8), list(tokens), [32] * 8, [32 * n for n in range(8)])
    zero_gradients(policy.chunks, trainer.optimizer)
    forward_backward(policy, [micro_batch], lambda _, logprobs, __: (-logprobs.mean(), None), 1)
    trainer.update()


def draw_work(arguments: argparse.Namespace, seed: int) -> Workload:
    """Random prompts, and log-normal lengths up to the maximum."""
    source = random.Random(seed)
    prompts = [
        [source.randrange(2, VOCABULARY) for _ in range(arguments.prompt_tokens)]
        for _ in range(arguments.prompts)
    ]
    lengths = [
        min(
            max(round(source.lognormvariate(math.log(arguments.median), arguments.sigma)), 1),
            arguments.longest,
        )
        for _ in range(arguments.prompts * arguments.group)
    ]
    return Workload(prompts, arguments.group, lengths, seed)


@dataclass
class Rates:
    """Tokens per second of each step."""

    by_clock: list[float] = field(default_factory=list)
    by_processor: list[float] = field(default_factory=list)

    def measure(self, contender: Contender, work: Workload) -> None:
        """One step of a contender."""
        clock, processor = time.perf_counter(), contender.processor_seconds()
        lengths = contender.roll_out(work)
        self.by_clock.append(work.tokens / (time.perf_counter() - clock))
        self.by_processor.append(work.tokens / (contender.processor_seconds() - processor))
        assert lengths == work.lengths, f"{contender.name}: other lengths than asked for"


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Rates]:
    """The rates of each contender. Prints every step."""
    longest = arguments.prompt_tokens + arguments.longest
    with contextlib.ExitStack() as stack:
        contenders: list[Contender] = []
        if arguments.vllm_python:
            vllm = Vllm(arguments.vllm_python, folder, arguments.batch_size, longest)
            stack.callback(vllm.server.kill)
            vllm.wait()
            contenders.append(vllm)
        else:
            print("vllm: left out; --vllm-python names the Python of an environment that has it")
        policy, trainer = load_policy(folder)
        contenders += [
            Ours("refilled", policy, arguments.batch_size),
            Ours("all_at_once", policy, None),
            Transformers(folder, arguments.batch_size, longest),
        ]
        rates = {contender.name: Rates() for contender in contenders}
        for step in range(1, arguments.steps + 1):
            work = draw_work(arguments, seed=step)
            for contender in contenders:
                rates[contender.name].measure(contender, work)
            print(
                f"step {step}: {work.tokens} tokens, longest {max(work.lengths)};",
                "tokens/s by clock (processor):",
                *(f"{n} {r.by_clock[-1]:.0f} ({r.by_processor[-1]:.0f})" for n, r in rates.items()),
                flush=True,
            )
            update(policy, trainer, seed=step)
    return rates


def summary(rates: dict[str, Rates]) -> str:
    """Rates of the first step and of the later ones, and their ratios, as name=value pairs."""
    words = []
    for when, steps in (("first", slice(0, 1)), ("later", slice(1, None))):
        clock = {n: statistics.median(r.by_clock[steps]) for n, r in rates.items()}
        processor = {n: statistics.median(r.by_processor[steps]) for n, r in rates.items()}
        words += [f"{name}_{when}={rate:.0f}" for name, rate in clock.items()]
        words += [
            f"{name}_{when}={each['refilled'] / each[other]:.2f}"
            for name, each, other in (
                ("ratio", clock, "transformers"),
                ("processor_ratio", processor, "transformers"),
                ("vllm_ratio", clock, "vllm"),
            )
            if other in each
        ]
    return " ".join(words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="in a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--batch-size", type=int, default=32, help="rows decoded together")
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--median", type=float, default=64.0, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of log length")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--vllm-python", metavar="PATH", help="of an environment that has vLLM")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the first step is reported apart")
    return arguments


def main() -> None:
    from gspo_megatron.platform.groups import stop_processes

    arguments = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_weights(folder, seed=1)
        try:
            rates = measure(arguments, folder)
        finally:
            stop_processes()
    print(summary(rates))


if __name__ == "__main__":
    main()
