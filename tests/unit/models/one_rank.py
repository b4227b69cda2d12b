"""The real model in one process: its process groups, and small policies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder
from gspo_megatron.config import Config, parse_config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.platform.groups import (
    set_up_model_parallel,
    start_processes,
    stop_processes,
)

VOCABULARY = 37  # The vocabulary is padded to 48. The padding must never influence a result.
PAD = 0


def tiny_config(**sections: Any) -> Config:
    """The tiny preset in fp32 with two layers. `sections` (`model`, `training`, ...) override
    it."""
    model = {"megatron": {"num_layers": 2, "moe_aux_loss_coeff": 0.0}}
    model = _merged(model, sections.pop("model", {}))
    training = {"precision": "fp32"} | sections.pop("training", {})
    values = {"data": {"tokenizer": "unused"}, "model": model, "training": training}
    return parse_config(values | sections)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    megatron = below["megatron"] | above.get("megatron", {})
    return below | above | {"megatron": megatron}


def tiny_policy(vocab_size: int = VOCABULARY, **sections: Any) -> Policy:
    config = tiny_config(**sections)
    return build_policy(config, resolve_parallel(config, 1), vocab_size)


def random_sequences(
    seed: int, lengths: Sequence[tuple[int, int]], vocab_size: int = VOCABULARY
) -> list[tuple[list[int], list[int]]]:
    """Pairs (prompt, response) of token ids, for pairs of lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(vocab_size, (n,), generator=generator).tolist() for n in pair)
        for pair in lengths
    ]


def micro_batch(
    builder: MicroBatchBuilder, sequences: Sequence[tuple[list[int], list[int]]]
) -> MicroBatch:
    """One micro-batch of all sequences. Their responses are joined in one vector."""
    tokens = [torch.tensor(prompt + response) for prompt, response in sequences]
    lengths = [len(response) for _, response in sequences]
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    return builder.build(range(len(tokens)), tokens, lengths, offsets)


def hidden_states(policy: Policy, ids: Sequence[int]) -> Tensor:
    """The hidden states [length, hidden] of one unpacked sequence, by the stock forward pass."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    return policy.models[0](input_ids=tokens, position_ids=positions, attention_mask=None)[0]


@contextlib.contextmanager
def one_rank_groups() -> Iterator[None]:
    """The process groups of torch.distributed and Megatron for a single process. They are destroyed
    afterwards."""
    try:
        start_processes(timeout_minutes=1.0)
        set_up_model_parallel(resolve_parallel(tiny_config(), 1), seed=1)
        yield
    finally:
        stop_processes()
