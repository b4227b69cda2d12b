"""What real ranks hold: bytes of weights, gradients and optimizer, and of what autograd keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, run_chunk
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.estimate.activations import SavedTensors, give_input
from gspo_megatron.models.build import build_policy
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.platform.groups import set_up_model_parallel, tear_down_model_parallel


def measured_state(config: Config, vocab_size: int) -> list[dict[str, int]]:
    """Of each rank after an optimizer step, in the order of the ranks."""
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, seed=1)
    policy = build_policy(config, parallel, vocab_size)
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-3, 1e-3, 0, 1, "constant"))
    for model in policy.models:
        for parameter in model.parameters():
            parameter.main_grad.normal_(std=1e-3)
    trainer.update()
    parameters = [p for model in policy.models for p in model.parameters()]
    weights = _storages(parameters)
    gradients = _storages(p.main_grad for p in parameters)
    optimizer: dict[int, int] = {}
    for part in trainer.optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:
            continue
        for group in inner.param_groups:
            optimizer |= _storages(group["params"])
        for states in inner.state.values():
            optimizer |= _storages(s for s in states.values() if isinstance(s, Tensor))
    optimizer = {key: size for key, size in optimizer.items() if key not in weights}
    found = {
        "parameters": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer": sum(optimizer.values()),
    }
    tear_down_model_parallel()
    return _of_all(found)


def measured_activations(
    config: Config, vocab_size: int, lengths: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Bytes that each rank's chunks keep for the backward pass of one micro-batch of sequences of
    (prompt, response) tokens."""
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, seed=1)
    policy = build_policy(config, parallel, vocab_size)
    builder = MicroBatchBuilder(policy, 0, 1.0, padded=not config.training.packing)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(vocab_size, (p + r,), generator=generator) for p, r in lengths]
    responses = [response for _, response in lengths]
    offsets = [sum(responses[:n]) for n in range(len(lengths))]
    batch = builder.build(range(len(lengths)), tokens, responses, offsets)
    kept = []
    for chunk in policy.chunks:
        give_input(chunk, batch)
        with SavedTensors(chunk) as saved:
            output = run_chunk(chunk, batch)
        kept.append(saved.num_bytes())
        del output
    tear_down_model_parallel()
    return _of_all(kept)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes; an empty storage has no address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}


def _of_all(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
