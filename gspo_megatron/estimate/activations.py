"""The activations and collectives of one micro-batch, found by running it on meta."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder, run_chunk
from gspo_megatron.config import Config
from gspo_megatron.config.stages import PretrainingConfig
from gspo_megatron.estimate.model import RankModel
from gspo_megatron.models.build import unwrap
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.platform.megatron_meta import META, Collective, EqualLoad


@dataclass(frozen=True)
class ChunkPass:
    """A model chunk's forward and backward pass of one micro-batch on this rank."""

    saved_bytes: int  # kept for the backward pass, parameters apart
    input_bytes: int  # received from the stage before, and kept with the rest
    output_bytes: int  # sent to the next stage, and kept until the backward pass
    forward_peak_bytes: int  # without gradients; 0 without rollouts
    workspace_bytes: int  # the most beyond `saved_bytes` in forward and backward pass
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


def micro_batch(model: RankModel, lengths: Sequence[tuple[int, int]]) -> MicroBatch:
    """One micro-batch of sequences of (prompt, response) tokens as the trainer builds it, with its
    tensors on the meta device, except those that the host reads."""
    if isinstance(model.config, PretrainingConfig):
        built = _samples(len(lengths), sum(lengths[0]), model)
    else:
        built = _sequences(lengths, model)
    packed = built.packed
    mask = packed.padding_mask
    packed = replace(
        packed,
        input_ids=packed.input_ids.to(META),
        position_ids=packed.position_ids.to(META),
        padding_mask=None if mask is None else mask.to(META),
    )
    head = HeadInputs(built.head.rows.to(META), built.head.targets.to(META), built.head.temperature)
    return replace(built, packed=packed, head=head)


def _sequences(lengths: Sequence[tuple[int, int]], model: RankModel) -> MicroBatch:
    """As a rollout or a file of examples has them."""
    config = model.config
    temperature = config.rollout.temperature if isinstance(config, Config) else 1.0
    builder = MicroBatchBuilder(
        model.policy, pad_id=0, temperature=temperature, padded=not config.training.packing
    )
    builder.device = torch.device("cpu")
    tokens = [torch.zeros(prompt + response, dtype=torch.long) for prompt, response in lengths]
    responses = [response for _, response in lengths]
    offsets = [sum(responses[:number]) for number in range(len(responses))]
    return builder.build(range(len(tokens)), tokens, responses, offsets)


def _samples(count: int, length: int, model: RankModel) -> MicroBatch:
    """As a corpus has them."""
    from gspo_megatron.supervised.pretraining import rows_of_samples

    place = MicroBatchBuilder(model.policy, pad_id=0, temperature=1.0)
    tokens = torch.zeros((count, length), dtype=torch.long)
    packed = rows_of_samples(
        tokens,
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        context_parallel_size=place.cp_size,
        context_parallel_rank=place.cp_rank,
    )
    return MicroBatch(packed, None, HeadInputs(packed.token_rows, packed.targets))


def chunk_passes(model: RankModel, batch: MicroBatch, *, samples: bool = True) -> list[ChunkPass]:
    """Of each chunk of the rank. samples: the run has rollouts, which pass prompts without
    gradients."""
    config = model.policy.config
    share = 0.0
    if config.num_moe_experts:
        share = config.moe_router_topk / config.num_moe_experts
    with EqualLoad(share):
        chunks = range(len(model.policy.chunks))
        return [_chunk_pass(model, number, batch, samples=samples) for number in chunks]


def _chunk_pass(model: RankModel, number: int, batch: MicroBatch, *, samples: bool) -> ChunkPass:
    chunk, trace = model.policy.chunks[number], model.trace
    inner = unwrap(chunk)
    forward_peak = _forward_peak(model, number, batch) if samples else 0
    trace.collectives.clear()
    start = trace.live_bytes
    trace.start_peak()
    give_input(chunk, batch)
    with SavedTensors(inner) as saved:
        output = run_chunk(chunk, batch)
    saved_bytes = saved.num_bytes()
    forward = tuple(trace.collectives)
    trace.collectives.clear()
    output_bytes = output.nbytes
    torch.autograd.backward(output, torch.empty_like(output))
    del output
    return ChunkPass(
        saved_bytes=saved_bytes,
        input_bytes=0 if inner.pre_process else inner.decoder.input_tensor.nbytes,
        output_bytes=0 if inner.post_process else output_bytes,
        forward_peak_bytes=forward_peak,
        workspace_bytes=max(0, trace.peak_bytes - start - saved_bytes),
        forward=forward,
        backward=tuple(trace.collectives),
    )


def _forward_peak(model: RankModel, number: int, batch: MicroBatch) -> int:
    chunk, trace = model.policy.chunks[number], model.trace
    start = trace.live_bytes
    trace.start_peak()
    with torch.no_grad():
        give_input(chunk, batch)
        run_chunk(chunk, batch)
    return trace.peak_bytes - start


def give_input(chunk: torch.nn.Module, batch: MicroBatch) -> None:
    """Give a chunk without embedding an input like that of the previous stage."""
    model = unwrap(chunk)
    if model.pre_process:
        return
    config, ids = model.config, batch.packed.input_ids
    rows, tokens = ids.shape
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    size = (tokens, rows, config.hidden_size)
    hidden = torch.zeros(size, dtype=config.pipeline_dtype, device=ids.device)
    model.set_input_tensor(hidden.requires_grad_(torch.is_grad_enabled()))


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """The tensors that autograd keeps of the forward pass inside, on any device."""

    def __init__(self, module: torch.nn.Module) -> None:
        """The parameters of `module` are not counted."""
        self._parameters = {p.untyped_storage()._cdata for p in module.parameters()}
        self._kept: list[weakref.ref[Tensor]] = []
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        # a new tensor object, which lives as long as the graph
        kept = tensor.detach()
        self._kept.append(weakref.ref(kept))
        return kept

    def _alive(self) -> Iterator[Tensor]:
        for reference in self._kept:
            tensor = reference()
            if tensor is not None:
                yield tensor

    def num_bytes(self) -> int:
        """The bytes of the storages that the graph still keeps, each counted once."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._alive()}
        return sum(n for key, n in storages.items() if key not in self._parameters)
