"""The work that both sides of the RL-step benchmark do: the shapes of models, and the sizes of
steps.

Only the standard library is imported, because our side and TRL's run in different environments.
"""

from __future__ import annotations

import math
import random
import resource
import statistics
from dataclasses import dataclass, replace
from typing import Any

SEED = 1
THREADS = 2  # threads of each side: one process with two threads, or two ranks with one thread each

# The coefficient of the routers' auxiliary loss, the same on both sides. By default TRL would use
# the model's own coefficient, 1e-3. Without the loss TRL is faster.
ROUTER_AUX_LOSS_COEF = 0.0

# Fields of Megatron-Core's TransformerConfig, and the size of the vocabulary.
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "moe_ffn_hidden_size": 64,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "vocab_size": 1024,
    },
}
SHAPES["mid"] = SHAPES["small"] | {"num_layers": 8, "hidden_size": 256}
# All experts together take 100 MB. As in a real model, this is far more than the caches of the CPU.
SHAPES["long"] = SHAPES["mid"] | {
    "num_moe_experts": 64,
    "moe_router_topk": 8,
    "vocab_size": 32_768,
}
# The sizes of examples/smollm2_moe: 374 million parameters, of which a token uses 214 million.
SHAPES["smollm2"] = {
    "num_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_query_groups": 3,
    "kv_channels": 64,
    "moe_ffn_hidden_size": 1536,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "vocab_size": 49_152,
}


@dataclass(frozen=True)
class Workload:
    """The responses of an RL step. If `median` is set, their lengths are log-normal."""

    prompts: int  # number of prompts of a step
    group: int  # number of responses to a prompt
    longest: int  # most tokens of a response; without a median, every response has this number
    median: float | None = None
    sigma: float = 1.0  # standard deviation of the logarithm of the length
    prompt_tokens: int = 8
    mini_batches: int = 4
    warmup_steps: int = 3
    shape: str = ""  # the key in SHAPES; empty: the workload's own name
    precision: str = "fp32"  # "fp32" or "bf16"
    ranks: int = THREADS  # number of ranks on our side; each gets an equal share of the threads

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    def lengths(self, step: int) -> list[int]:
        """Return the tokens of each response of a step, prompt by prompt: [responses]. Both sides
        force responses of these lengths. Otherwise one side might have shorter responses."""
        if self.median is None:
            return [self.longest] * self.responses
        source = random.Random(SEED * 1_000_003 + step)
        drawn = (
            source.lognormvariate(math.log(self.median), self.sigma) for _ in range(self.responses)
        )
        return [min(max(round(length), 1), self.longest) for length in drawn]

    def rate(self, seconds: list[float]) -> float:
        """Return the median tokens per second of the steps after the warm-up."""
        first = self.warmup_steps + 1
        return statistics.median(
            sum(self.lengths(first + number)) / took for number, took in enumerate(seconds)
        )


# This workload has one rank. In a second rank, copies of the weights and gradients would need 3 GB.
_SMOLLM2 = Workload(
    8, 8, 64, prompt_tokens=32, mini_batches=2, warmup_steps=1, shape="smollm2", ranks=1
)
WORKLOADS = {
    "small": Workload(prompts=16, group=8, longest=32),
    "mid": Workload(prompts=16, group=8, longest=32),
    "long": Workload(prompts=8, group=8, longest=512, median=96.0, warmup_steps=0),
    "smollm2": _SMOLLM2,
    "smollm2_bf16": replace(_SMOLLM2, precision="bf16"),
}


def shape_of(size: str) -> dict[str, int]:
    """Return the shape of the model in the workload `size`."""
    return SHAPES[WORKLOADS[size].shape or size]


def sections_of(work: Workload) -> dict[str, dict[str, Any]]:
    """Return the sections of our configuration that the workload decides."""
    return {
        "data": {"prompts": "made here", "tokenizer": "made here"},
        "rollout": {
            "group_size": work.group,
            "prompts_per_step": work.prompts,
            "max_response_tokens": work.longest,
        },
        "objective": {"name": "gspo", "mini_batches": work.mini_batches},
    }


def peak_memory_gb() -> float:
    """Return the largest resident memory of this process so far, in 10^9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
