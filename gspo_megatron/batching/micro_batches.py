"""Builds micro-batches for this rank's layout, and runs Megatron's pipeline schedules on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gspo_megatron.batching.packing import BatchShape, Branches, PackedBatch, PackSpec, pack
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import Sequences, StepIndex
from gspo_megatron.models.build import Policy, unwrap
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.models.shared_prompts import packed_params
from gspo_megatron.models.top_k_head import with_rest
from gspo_megatron.models.transformer_config import changed
from gspo_megatron.routing.hooks import Routes, routed
from gspo_megatron.routing.replay import MicroBatchRoutes


@dataclass
class MicroBatch:
    """A micro-batch on the device, with everything that the passes of a step need or record.

    It is built once and serves the log-prob pass and the training pass. All log-probs are
    [response tokens] float32: this rank's response tokens in the order of `packed`. Only the last
    pipeline stage has `old_logprobs` and `reference_logprobs`.
    """

    packed: PackedBatch
    packed_seq_params: PackedSeqParams | None  # None if each branch has a row of its own
    head: Any  # HeadInputs, or ScoreInputs for a preference model
    rollout_logprobs: Tensor | None = None  # from the rollout engine
    old_logprobs: Tensor | None = None  # None: use the log-probs of the training pass itself
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # from the teacher, in distillation
    # The k most probable tokens of the teacher, and the log-prob of each in a bucket. The last
    # bucket is the log-prob of all other tokens together.
    teacher_tokens: Tensor | None = None  # [response tokens, k] int64
    teacher_buckets: Tensor | None = None  # [response tokens, k + 1]
    # [response tokens] int64: the number of the teacher, if there are several; -1: no teacher
    teacher_numbers: Tensor | None = None
    token_advantages: Tensor | None = None
    mask: Tensor | None = None  # [response tokens] float32, 1 on tokens to learn from; None: on all
    # [sequences]: number of tokens to learn from in the whole sequence, not only in this rank's
    # shard; None: all tokens
    masked_lengths: Tensor | None = None
    rollout_routes: list[Tensor] | None = None  # [length, layers of this rank, k] for each branch
    recorded_routes: MicroBatchRoutes = field(init=False, repr=False)  # set by Routing Replay
    # Chooses the experts of the next forward pass. None: the routers choose.
    routes: Routes | None = None


# micro-batch, logprobs [rows], entropies [rows] -> loss (scalar), outputs. If `head` has
# candidates, the function gets their log-probs as a fourth argument. For a preference model, it
# gets scores [sequences] in place of log-probs and entropies.
LossFunction = Callable[..., tuple[Tensor, Any]]


class MicroBatchBuilder:
    """Packs or pads sequences for this rank's layout."""

    def __init__(
        self,
        policy: Policy,
        pad_id: int,
        temperature: float,
        *,
        padded: bool = False,
        share_prompts: bool = False,
    ) -> None:
        """padded, share_prompts: see PackSpec."""
        config = policy.config
        self.temperature = temperature
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if config.fp8:
            # The FP8 products for the weight gradients sum over the tokens of a rank's shard, so
            # their number must be aligned.
            multiple *= get_fp8_align_size(config.fp8_recipe)
        self.spec = PackSpec(
            pad_id,
            padded,
            config.context_parallel_size,
            parallel_state.get_context_parallel_rank(),
            multiple,
            share_prompts,
            policy.shape.scores,
        )
        self.shapes_vary = config.variable_seq_lengths
        self.device = torch.device(torch.cuda.current_device())

    @property
    def padded(self) -> bool:
        """Whether each branch has a row of its own."""
        return self.spec.padded

    @property
    def shares_prompts(self) -> bool:
        """Whether a micro-batch holds a shared prompt once."""
        return self.spec.share_prompts

    def build_step(
        self, plans: Sequence[MiniBatch], sequences: Sequences, index: StepIndex
    ) -> list[list[MicroBatch]]:
        """Build the micro-batches of this data-parallel rank, one list for each mini-batch."""
        of_branches = index.branch_lengths()
        shape = self.common_shape(plans, of_branches)
        rank = parallel_state.get_data_parallel_rank()
        columns = sequences.tokens, index.response_lengths, sequences.offsets
        mini_batches = [
            [
                self.build(numbers, *columns, shape, index.branches)
                for numbers in plan.micro_batches[rank]
            ]
            for plan in plans
        ]
        for batch in chain.from_iterable(mini_batches):
            rows = batch.packed.response_index
            batch.rollout_logprobs = sequences.rollout_logprobs[rows]
            if sequences.token_advantages is not None:
                batch.token_advantages = sequences.token_advantages[rows]
            if sequences.teacher_logprobs is not None:
                batch.teacher_logprobs = sequences.teacher_logprobs[rows]
            if sequences.teacher_tokens is not None:
                batch.teacher_tokens = sequences.teacher_tokens[rows].long()
            if sequences.teacher_top_logprobs is not None:
                batch.teacher_buckets = with_rest(sequences.teacher_top_logprobs[rows])
            if index.teachers is not None:
                numbers = torch.tensor([index.teachers[n] for n in batch.packed.members])
                batch.teacher_numbers = numbers.to(self.device)[batch.packed.sequence_index]
            if sequences.mask is not None:
                batch.mask = sequences.mask[rows]
                lengths = [index.masked_lengths[n] for n in batch.packed.members]
                batch.masked_lengths = torch.tensor(lengths, device=self.device)
            if sequences.routes is not None:
                batch.rollout_routes = [
                    routes
                    for n in batch.packed.members
                    for routes in sequences.routes[n].split(of_branches[n])
                ]
        return mini_batches

    def common_shape(
        self, plans: Sequence[MiniBatch], lengths: Sequence[Sequence[int]]
    ) -> BatchShape | None:
        """Return one shape that fits every micro-batch of every rank.

        Megatron-Core's allgather dispatcher needs equal shapes. Returns None if the shapes may
        differ. lengths: for each sequence, the number of tokens of each branch.
        """
        if self.shapes_vary:
            return None
        shapes = [
            self.spec.smallest_shape(list(chain.from_iterable(lengths[n] for n in numbers)))
            for plan in plans
            for rank in plan.micro_batches
            for numbers in rank
        ]
        return BatchShape(max(s.rows for s in shapes), max(s.tokens for s in shapes))

    def build(
        self,
        members: Sequence[int],
        tokens: Sequence[Tensor] | Mapping[int, Tensor],
        response_lengths: Sequence[int],
        response_offsets: Sequence[int] | Mapping[int, int],
        shape: BatchShape | None = None,
        branches: Branches | None = None,
    ) -> MicroBatch:
        """Pack `members` into one micro-batch on the device. See batching.packing.pack."""
        columns = tokens, response_lengths, response_offsets
        packed = pack(self.spec, *columns, members, shape=shape, branches=branches).to(self.device)
        head = HeadInputs(packed.token_rows, packed.targets, self.temperature)
        bounds = None
        if not self.padded:
            bounds = packed_params(packed.boundaries, packed.longest, packed.shared)
        return MicroBatch(packed, bounds, head)


def micro_batch_multiple(policy: Policy) -> int:
    """Return the number that must divide the number of micro-batches.

    It is the pipeline size for interleaved pipeline schedules, else 1.
    """
    config = policy.config
    if config.virtual_pipeline_model_parallel_size is None:
        return 1
    return config.pipeline_model_parallel_size


def forward_backward(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    total_micro_batches: int,
) -> list[Any]:
    """Accumulate the gradients of the sum of `loss_function` over all ranks and micro-batches.

    `loss_function` returns this rank's part of the mini-batch loss. The mini-batch loss is the sum
    of all parts; if it is a mean, the parts are already divided by the global count. Megatron adds
    the routers' aux and z losses of each micro-batch and scales them like the loss. These router
    losses must be averaged over the micro-batches. So the scale is 1 over the number of
    micro-batches, and each part is multiplied by that number.

    `total_micro_batches` counts the micro-batches of all ranks without the empty ones. Returns the
    outputs of each micro-batch on the last pipeline stage, an empty list elsewhere.
    """
    config = policy.config
    native = config.grad_scale_func or (lambda value: value)

    def loss(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        beyond = [output[2:]] if len(output) > 2 else []
        value, outputs = loss_function(micro_batch, *output[:2], *beyond)
        # Megatron expects a number of tokens here, but does not divide by it.
        no_tokens = torch.zeros((), dtype=torch.int, device=output.device)
        return value * total_micro_batches, no_tokens, outputs

    def scale(value: Tensor) -> Tensor:
        return native(value) / max(total_micro_batches, 1)  # 0 if there is nothing to learn from

    with changed([(config, "grad_scale_func", scale)]):
        return _run(policy, micro_batches, loss, forward_only=False)


def response_logprobs(
    policy: Policy, micro_batches: Sequence[MicroBatch]
) -> list[tuple[Tensor, Tensor]]:
    """Compute the log-probs and entropies of the response tokens without gradients.

    Returns one pair of tensors, [rows] each, for each micro-batch on the last pipeline stage.
    Returns an empty list on the other stages.
    """
    return [(output[0], output[1]) for output in head_outputs(policy, micro_batches)]


@torch.no_grad()
def head_outputs(policy: Policy, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Run the forward pass without gradients and return the outputs of the head.

    Returns one tensor [2 or more, rows] for each micro-batch on the last pipeline stage. Returns an
    empty list on the other stages.
    """

    def collect(_: MicroBatch, output: Tensor, non_loss_data: bool = True) -> Any:
        return output

    policy.eval()
    collected = _run(policy, micro_batches, collect, forward_only=True)
    policy.train()
    return collected


def _run(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    callback: Callable[..., Any],
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro_batch = next(iterator)
        return run_chunk(model, micro_batch), partial(callback, micro_batch)

    chunks = policy.chunks
    iterators = [iter(micro_batches) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # If shapes vary, stages send the shape with the activations. Then seq_length is an upper
        # bound.
        seq_length=max(m.packed.input_ids.shape[1] for m in micro_batches)
        * policy.config.context_parallel_size,
        micro_batch_size=max(m.packed.input_ids.shape[0] for m in micro_batches),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    for micro_batch in micro_batches:  # a layer that was recomputed has taken them again
        micro_batch.packed.forget_angles()
    return outputs


def run_chunk(model: torch.nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Run the forward pass of one model chunk.

    Returns the hidden states for the next chunk. The last chunk returns log-probs and entropies,
    [2, rows]. The last chunk of a preference model returns scores, [1, sequences].
    """
    packed = micro_batch.packed
    with routed(micro_batch.routes):
        output = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            labels=micro_batch.head,
            packed_seq_params=micro_batch.packed_seq_params,
            padding_mask=_local_padding_mask(model, packed.padding_mask),
        )
    packed.forget_angles()
    return output


def _local_padding_mask(model: torch.nn.Module, mask: Tensor | None) -> Tensor | None:
    """Return the padding mask to pass to the model. With a mask, routers leave padding out of their
    losses.

    On the stage that embeds tokens, GPTModel itself cuts the mask for sequence parallelism. The
    other stages need a mask that is already cut.
    """
    policy = unwrap(model)
    if mask is None or policy.pre_process or not policy.config.sequence_parallel:
        return mask
    group = policy.pg_collection.tp
    return mask.chunk(group.size(), dim=1)[group.rank()]
