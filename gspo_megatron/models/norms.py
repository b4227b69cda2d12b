"""RMSNorm and LayerNorm of the torch_native backend, and RMSNorm of all heads together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_megatron.platform.cpu import faster


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as `config.normalization` says.

    Megatron-Core's own torch norm refuses sequence parallelism, which experts with tensor
    parallelism need. Under sequence parallelism each tensor-parallel rank computes the gradient of
    its own tokens only. `finalize_model_grads` sums the gradients of parameters with the attribute
    `sequence_parallel` over the ranks, so the norm only sets this attribute. The norm is computed
    in fp32, as in Transformer Engine.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        assert config.normalization in ("RMSNorm", "LayerNorm")
        self.eps = eps
        self.centered = config.normalization == "LayerNorm"
        # The scale is 1 + weight: weight decay pulls it to 1, not to 0. A checkpoint stores
        # `weight`.
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        start = 0.0 if self.zero_centered else 1.0
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), start, **kind))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **kind)) if self.centered else None
        sum_gradients_over_tp([self.weight, self.bias], config)

    def forward(self, hidden: Tensor) -> Tensor:
        weight, shape = self.weight, (hidden.shape[-1],)
        if self.zero_centered:  # bf16 cannot hold 1 + weight
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0
        wide = hidden.to(weight.dtype) if self.zero_centered else hidden
        if self.centered:
            bias = None if self.bias is None else self.bias.to(wide.dtype)
            normed = torch.nn.functional.layer_norm(wide, shape, weight, bias, self.eps)
            return normed.to(hidden.dtype)
        # Passes with and without gradients use the same function, so that they agree bit for bit.
        # Decoding (inference mode) need not agree. Memory is estimated on the meta device, where
        # this function stands for a GPU's norm: both keep the same tensors for the backward pass.
        is_ours = hidden.is_meta or faster.applies_to(hidden)
        is_ours |= self.zero_centered and hidden.dtype.itemsize < 4  # it keeps no copy in fp32
        if is_ours and hidden.dtype == self.weight.dtype and not torch.is_inference_mode_enabled():
            is_wide = hidden.dtype.itemsize >= 4
            function = CpuRmsNorm if is_wide else LowPrecisionRmsNorm
            return function.apply(hidden, weight, self.eps)
        return rms_norm(wide, weight, self.eps).to(hidden.dtype)


class PlainNorm(TorchNorm):
    """A norm that multiplies by its weight, even in a model whose other norms multiply by 1 +
    weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(config, hidden_size, eps)
        self.zero_centered = False
        self.weight.data.fill_(1.0)


def sum_gradients_over_tp(
    parameters: Sequence[torch.nn.Parameter | None], config: TransformerConfig
) -> None:
    """Let `finalize_model_grads` sum the gradients of these parameters over the tensor-parallel
    ranks. Each rank has the whole parameter, but applies it to its own tokens only."""
    for parameter in parameters:
        if parameter is not None:
            vars(parameter)["sequence_parallel"] = config.sequence_parallel


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm [..., dim] without gradients; weight: [..., dim]. On a CPU, torch's own RMSNorm in
    float32 takes twice as long for the few rows of a decoding pass: it calls more operators."""
    if hidden.dtype is torch.float32 and faster.applies_to(hidden):
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        start = _constant(eps, hidden.dtype)
        scale = torch.addcmul(start, lengths, lengths, value=1 / hidden.shape[-1]).rsqrt_()
        return (hidden * scale).mul_(weight)
    if weight.dim() == 1:
        return torch.nn.functional.rms_norm(hidden, weight.shape, weight, eps)
    return torch.nn.functional.rms_norm(hidden, weight.shape[-1:], None, eps).mul_(weight)


@functools.cache
@torch.inference_mode(False)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device="cpu")


class CpuRmsNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, with a backward pass of a few operations. On a CPU, torch's
    own RMSNorm takes three times as long."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = hidden.shape[-1]
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale = lengths.square_().div_(dim).add_(eps).rsqrt_()
        normed = hidden * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        dim = normed.shape[-1]
        products = gradient * normed
        weight_grad = products.reshape(-1, dim).sum(0)
        # The scale depends on the row itself, so the part of the gradient along the row cancels.
        along = products @ weight.unsqueeze(-1)
        hidden_grad = (gradient * weight).addcmul_(normed, along, value=-1 / dim).mul_(scale)
        return hidden_grad, weight_grad, None


class LowPrecisionRmsNorm(torch.autograd.Function):
    """RMSNorm of bf16 or fp16 over the last dimension, computed in fp32. It keeps its input for the
    backward pass. On a CPU, torch's own RMSNorm keeps several tensors in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])  # [rows, dim]
        scale = rows.new_empty((len(rows), 1), dtype=torch.float32)
        output = torch.empty_like(rows)
        wide_weight = weight.float()
        for narrow, factors, out in faster.strips(rows, scale, output):
            wide = narrow.float()
            torch.mean(wide.square(), dim=-1, keepdim=True, out=factors)
            factors.add_(eps).rsqrt_()
            out.copy_(wide.mul_(factors).mul_(wide_weight))
        ctx.save_for_backward(hidden, scale, weight)
        return output.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, scale, weight = ctx.saved_tensors
        dim = hidden.shape[-1]
        rows = hidden.reshape(-1, dim)
        hidden_grad = torch.empty_like(rows)
        wide_weight = weight.float()
        weight_grad = torch.zeros_like(wide_weight)
        for narrow, factors, narrow_grad, out in faster.strips(
            rows, scale, gradient.reshape(-1, dim), hidden_grad
        ):
            normed, wide_grad = narrow.float().mul_(factors), narrow_grad.float()
            products = wide_grad * normed
            weight_grad += products.sum(0)
            along = products @ wide_weight.unsqueeze(-1)
            wide_grad.mul_(wide_weight).addcmul_(normed, along, value=-1 / dim).mul_(factors)
            out.copy_(wide_grad)
        return hidden_grad.view(hidden.shape), weight_grad.to(weight.dtype), None


class QKNorm(torch.nn.Module):
    """RMSNorm of queries or keys [..., heads / TP, dim] over all heads together, as in OLMoE.
    (Megatron-Core normalises each head alone.)

    The heads are cut over the tensor-parallel ranks, which exchange one sum of squares per token.
    Every rank holds the whole weight [heads * dim] and computes the gradient of its own heads;
    Megatron-Core adds up the gradients of parameters called q_layernorm or k_layernorm over these
    ranks. The norm is computed in fp32, like the other norms.
    """

    heads_field = ""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.heads = getattr(config, self.heads_field)  # the heads of all ranks together
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.ones(self.heads * hidden_size, **kind))

    def forward(self, states: Tensor) -> Tensor:
        wide = states if states.dtype == torch.float64 else states.float()
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        weight = self.weight.view(self.heads, -1)
        if self.tp_group.size() > 1:
            # The forward pass sums the squares over the ranks (reduce). The backward pass sums the
            # gradient of the squares over the ranks (copy).
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
            weight = weight.chunk(self.tp_group.size())[self.tp_group.rank()]
        scale = torch.rsqrt(squares / self.weight.numel() + self.eps)
        return weight * (wide * scale).to(states.dtype)


class QueryNorm(QKNorm):
    heads_field = "num_attention_heads"


class KeyNorm(QKNorm):
    heads_field = "num_query_groups"
