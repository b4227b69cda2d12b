"""Measures the activations and collectives of one micro-batch by running it on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder, run_chunk
from gspo_megatron.config import Config
from gspo_megatron.config.stages import PretrainingConfig
from gspo_megatron.estimate.model import RankModel
from gspo_megatron.models.build import unwrap
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.models.score_head import ScoreInputs
from gspo_megatron.platform.megatron_meta import META, Collective, EqualLoad


@dataclass(frozen=True)
class ChunkPass:
    """The figures of one micro-batch's forward and backward pass through a chunk on this rank."""

    saved_bytes: int  # saved for the backward pass, without parameters
    input_bytes: int  # received from the previous stage, and saved, too
    output_bytes: int  # sent to the next stage, and held until the backward pass
    forward_peak_bytes: int  # peak of a pass without gradients; 0 without rollouts
    workspace_bytes: int  # peak of both passes, minus `saved_bytes`
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    head_bytes: int  # part of the workspace that the log-prob head needs


def micro_batch(model: RankModel, lengths: Sequence[tuple[int, int]]) -> MicroBatch:
    """Build a micro-batch like the trainer's, on the meta device.

    `lengths` are (prompt, response) tokens of the sequences. Tensors that the host reads stay on
    the CPU."""
    from gspo_megatron.supervised.pretraining import rows_of_samples

    config: Any = model.config
    pretraining = isinstance(config, PretrainingConfig)
    builder = MicroBatchBuilder(
        model.policy,
        pad_id=0,
        temperature=config.rollout.temperature if isinstance(config, Config) else 1.0,
        padded=not pretraining and not config.training.packing,
    )
    builder.device = torch.device("cpu")
    if pretraining:
        tokens = torch.zeros((len(lengths), sum(lengths[0])), dtype=torch.long)
        packed = rows_of_samples(
            tokens,
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            context_parallel_size=builder.spec.context_parallel_size,
            context_parallel_rank=builder.spec.context_parallel_rank,
        )
        built = MicroBatch(packed, None, HeadInputs(packed.token_rows, packed.targets))
    else:
        sequences = [torch.zeros(sum(pair), dtype=torch.long) for pair in lengths]
        responses = [response for _, response in lengths]
        offsets = [sum(responses[:number]) for number in range(len(responses))]
        built = builder.build(range(len(lengths)), sequences, responses, offsets)
    packed, mask = built.packed, built.packed.padding_mask
    packed = replace(
        packed,
        input_ids=packed.input_ids.to(META),
        position_ids=packed.position_ids.to(META),
        padding_mask=None if mask is None else mask.to(META),
    )
    if config.resolved_model().scores:
        rows = torch.zeros(len(lengths), dtype=torch.long, device=META)
        return replace(built, packed=packed, head=ScoreInputs(rows))
    head = HeadInputs(built.head.rows.to(META), built.head.targets.to(META), built.head.temperature)
    return replace(built, packed=packed, head=head)


def chunk_passes(model: RankModel, batch: MicroBatch, *, samples: bool = True) -> list[ChunkPass]:
    """Run the passes of each chunk. `samples`: also a pass without gradients, as in rollouts."""
    config = model.policy.config
    share = config.moe_router_topk / config.num_moe_experts if config.num_moe_experts else 0.0
    with EqualLoad(share):
        return [_chunk_pass(model, chunk, batch, samples) for chunk in model.policy.chunks]


def _chunk_pass(
    model: RankModel, chunk: torch.nn.Module, batch: MicroBatch, samples: bool
) -> ChunkPass:
    trace, inner = model.trace, unwrap(chunk)
    forward_peak = 0
    if samples:
        start = trace.start_peak()
        with torch.no_grad():
            give_input(chunk, batch)
            run_chunk(chunk, batch)
        forward_peak = trace.peak_bytes - start
    trace.collectives.clear()
    start = trace.start_peak()
    give_input(chunk, batch)
    with SavedTensors(inner) as saved:
        output = run_chunk(chunk, batch)
    saved_bytes, output_bytes = saved.num_bytes(), output.nbytes
    forward = tuple(trace.collectives)
    trace.collectives.clear()
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
        head_bytes=_head_bytes(model, batch) if inner.post_process else 0,
    )


def _head_bytes(model: RankModel, batch: MicroBatch) -> int:
    """Measure the bytes of the log-prob head alone, forward and backward."""
    if isinstance(batch.head, ScoreInputs):
        return 0  # a score head needs almost no memory
    config, trace, rows = model.policy.config, model.trace, len(batch.head.targets)
    size = (rows, 1, config.hidden_size)
    hidden = torch.empty(size, dtype=config.params_dtype, device=META, requires_grad=True)
    index = torch.empty(rows, dtype=torch.long, device=META)
    start = trace.start_peak()
    head = model.policy.models[-1].compute_language_model_loss(HeadInputs(index, index), hidden)
    torch.autograd.backward(head, torch.empty_like(head))
    return trace.peak_bytes - start


def give_input(chunk: torch.nn.Module, batch: MicroBatch) -> None:
    """Set the input of a chunk without embedding: a tensor like the output of the previous
    stage."""
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


class SavedTensors:
    """A context that records the tensors that autograd saves for the backward pass."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Prepare the context. It does not count the parameters of `module`."""
        self._parameters = {p.untyped_storage()._cdata for p in module.parameters()}
        self._references: list[weakref.ref[Tensor]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        # detach() makes a new tensor object that only the graph holds, so the weak reference shows
        # whether the graph still holds the data.
        alias = tensor.detach()
        self._references.append(weakref.ref(alias))
        return alias

    def num_bytes(self) -> int:
        """Return the bytes of the storages that the graph still holds, each counted once."""
        tensors = (reference() for reference in self._references)
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(n for key, n in sizes.items() if key not in self._parameters)
