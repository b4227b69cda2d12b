"""All experts of a rank as one module: the torch_native backend's grouped matmul."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.models.shared_prompts import repeat_rows
from gspo_megatron.platform.cpu import faster, products

BLOCK_ROWS = 64  # see `has_costly_shapes`


class GroupedExperts(MegatronModule):
    """Gated or plain two-layer experts over tokens that the dispatcher has sorted by expert.

    Stock SequentialMLP loops over small modules in Python; Transformer Engine's grouped linear
    layers need CUDA. Here the weights are stacked by expert, with gate and up projection on an axis
    of their own, so every shard (experts over EP, rows over ETP) is a slice of one tensor:

        weight1  [local experts, 2 (gate, up) or 1, ffn / ETP, hidden]
        weight2  [local experts, hidden, ffn / ETP]

    and with `add_bias_linear`, for which Megatron-Core asks for ETP = 1:

        bias1    [local experts, 2 or 1, ffn]
        bias2    [local experts, hidden]
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert not config.moe_apply_probs_on_input
        self.num_local_experts = num_local_experts
        self.groups = pg_collection
        self.register_module("lora", None)  # adapters: models/lora.py
        self.activation = config.activation_func
        self._is_swiglu = (
            config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and not config.glu_linear_offset
        )
        etp = pg_collection.expt_tp.size()
        ffn = config.moe_ffn_hidden_size // etp
        parts = 2 if config.gated_linear_unit else 1
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        shape = (num_local_experts, parts, ffn, config.hidden_size)
        self.weight1 = torch.nn.Parameter(torch.empty(shape, **kind))
        shape = (num_local_experts, config.hidden_size, ffn)
        self.weight2 = torch.nn.Parameter(torch.empty(shape, **kind))
        for weight, dimension in ((self.weight1, 2), (self.weight2, 2)):
            set_tensor_model_parallel_attributes(
                tensor=weight, is_parallel=True, dim=dimension, stride=1
            )
        self.bias1 = self.bias2 = None
        if config.add_bias_linear:
            shape = (num_local_experts, parts, ffn)
            self.bias1 = torch.nn.Parameter(torch.zeros(shape, **kind))
            shape = (num_local_experts, config.hidden_size)
            self.bias2 = torch.nn.Parameter(torch.zeros(shape, **kind))

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """tokens [rows, hidden] sorted by expert, probs [rows] -> ([rows, hidden], no bias)."""
        if not has_costly_shapes(tokens, tokens_per_expert):
            return self._compute(tokens, tokens_per_expert, probs), None
        rows, places, counts = pad_to_blocks(tokens_per_expert)
        output = self._compute(tokens.index_select(0, rows), counts, probs.index_select(0, rows))
        return output.index_select(0, places), None

    def _compute(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Tensor:
        """Return the output [rows, hidden] of `forward`."""
        gate_up = self.weight1.flatten(1, 2)  # [local experts, 2 * ffn, hidden]
        # The counts are on the host, where the alltoall dispatcher needs them. Copying them to the
        # device does not synchronise.
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(tokens.device, non_blocking=True)
        states = grouped_linear(tokens, gate_up, tokens_per_expert, ends)
        probs = probs.unsqueeze(-1)
        if self.bias1 is not None:
            # [rows]: the expert of each row
            counts = tokens_per_expert.to(tokens.device, non_blocking=True)
            experts = torch.repeat_interleave(counts, output_size=len(tokens))
            states = states + repeat_rows(self.bias1.flatten(1), experts)
        if self.lora is not None:
            states = self.lora.add("1", states, tokens, tokens_per_expert, ends)
        # The stock experts also multiply by the router's weight before the second projection.
        # On the meta device this module stands for Transformer Engine's experts on a GPU, which
        # keep all tensors of the plain expression.
        if self._is_swiglu and faster.applies_to(states):
            compute = WeightedSwiGlu.apply if torch.is_grad_enabled() else weighted_swiglu
            states = compute(states, probs)
        else:
            states = self._activate(states)
            states = (states * probs).to(tokens.dtype)
        output = grouped_linear(states, self.weight2, tokens_per_expert, ends)
        if self.bias2 is not None:
            output = output + (repeat_rows(self.bias2, experts) * probs).to(output.dtype)
        if self.lora is not None:
            output = self.lora.add("2", output, states, tokens_per_expert, ends)
        return output

    def _activate(self, states: Tensor) -> Tensor:
        """[rows, 2 * ffn or ffn] -> [rows, ffn]"""
        if not self.config.gated_linear_unit:
            return self.activation(states)
        gate, up = states.chunk(2, dim=-1)
        limit = self.config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        if self.config.glu_linear_offset:
            up = up + self.config.glu_linear_offset
        return self.activation(gate) * up

    def backward_dw(self) -> None:
        """Weight gradients are not delayed here, but the pipeline schedules call this."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Each weight as a slice of the global stack of experts, for dist_checkpointing."""
        ep, etp, expert_dp = self.groups.ep, self.groups.expt_tp, self.groups.expt_dp
        axis = len(sharded_offsets)
        result = {}
        for name, weight in self.named_parameters(recurse=False):
            key = f"{prefix}{name}"
            cut = [] if name == "bias2" else [(axis + 2, etp.rank(), etp.size())]
            result[key] = ShardedTensor.from_rank_offsets(
                key,
                weight,
                *sharded_offsets,
                (axis, ep.rank(), ep.size()),
                *cut,
                replica_id=(0, 0, expert_dp.rank()),
                prepend_axis_num=axis,
            )
        if self.lora is not None:
            result |= self.lora.sharded_state_dict(f"{prefix}lora.", sharded_offsets, metadata)
        return result


def weighted_swiglu(states: Tensor, weights: Tensor) -> Tensor:
    """states [rows, 2 * ffn] (gate, up), weights [rows, 1] -> [rows, ffn] of states' dtype"""
    result = states.new_empty((len(states), states.shape[1] // 2))
    for strip, factors, out in faster.strips(states, weights, result):
        gate, up = strip.chunk(2, dim=-1)
        torch.mul(F.silu(gate).mul_(up), factors, out=out)
    return result


class WeightedSwiGlu(torch.autograd.Function):
    """`weighted_swiglu` with gradients, on a CPU. Megatron-Core's own function needs a compiler
    (WeightedSwiGLUFunction in fusions/fused_bias_swiglu.py). The backward pass computes silu(gate)
    and the product again, so these two are not kept: a quarter of what a layer of SmolLM2's sizes
    would keep for each token."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(states, weights)
        return weighted_swiglu(states, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        states, weights = ctx.saved_tensors
        states_grad, weights_grad = torch.empty_like(states), torch.empty_like(weights)
        for strip in faster.strips(states, weights, gradient, states_grad, weights_grad):
            _swiglu_gradients(*strip)
        return states_grad, weights_grad


def _swiglu_gradients(
    states: Tensor, weights: Tensor, gradient: Tensor, states_grad: Tensor, weights_grad: Tensor
) -> None:
    """Write the gradients of `states` and `weights` to the last two arguments. gradient:
    [rows, ffn] of the output; the others as in `weighted_swiglu`."""
    gate, up = states.chunk(2, dim=-1)
    activated = F.silu(gate)
    # the router's weights have a wider dtype than bf16 states
    gradient = gradient.to(torch.promote_types(states.dtype, weights.dtype))
    weights_grad.copy_((gradient * (activated * up)).sum(-1, keepdim=True))
    product_grad = (gradient * weights).to(states.dtype)
    gate_grad, up_grad = states_grad.chunk(2, dim=-1)
    torch.mul(product_grad, activated, out=up_grad)
    torch.ops.aten.silu_backward(product_grad.mul_(up), gate, grad_input=gate_grad)


def has_costly_shapes(tokens: Tensor, tokens_per_expert: Tensor) -> bool:
    """Return True if padding the experts' rows saves time.

    On a CPU, oneDNN compiles a kernel for each shape of a product in BF16. Compiling takes longer
    than the product, and nearly every layer gives an expert a number of rows that is new. In
    decoding an expert has few rows, so the same numbers soon occur again.
    """
    many = len(tokens) >= 2 * BLOCK_ROWS * len(tokens_per_expert)
    return many and tokens.dtype == torch.bfloat16 and faster.applies_to(tokens)


def pad_to_blocks(tokens_per_expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the rows of each expert to a multiple of BLOCK_ROWS. tokens_per_expert: [experts]

    Returns, all int64: for each padded row the row that it copies [padded rows], for each row its
    padded row [rows], and for each expert the number of its padded rows [experts]. A row of padding
    copies row 0. The results of padding are never read, so padding adds nothing to the gradient of
    row 0.
    """
    counts = (tokens_per_expert + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    # The number of padding rows before each expert's rows.
    added = (counts - tokens_per_expert).cumsum(0).roll(1)
    added[0] = 0
    places = torch.repeat_interleave(added, tokens_per_expert)
    places += torch.arange(len(places))
    rows = torch.zeros(int(counts.sum()), dtype=torch.int64)
    rows[places] = torch.arange(len(places))
    return rows, places, counts


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows with its matrix: rows [rows, in], weight [experts, out, in] ->
    [rows, out]. The first `counts[0]` rows belong to expert 0, the next `counts[1]` rows to expert
    1, and so on.

    ends: [experts] int32 on the device of `rows`, for each expert the index of the first row behind
    its rows."""
    # torch's grouped matmul needs rows of a multiple of 16 bytes, and has no float64
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    has_grouped = aligned and rows.dtype != torch.float64 and hasattr(F, "grouped_mm")
    if has_grouped and not products.takes_onednn(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    runs = rows.split(counts.tolist())
    outputs = [products.linear(run, w) for run, w in zip(runs, weight.unbind(0), strict=True)]
    return torch.cat(outputs)
