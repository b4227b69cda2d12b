"""What decoding changes in a policy's modules.

Megatron-Core's modules are made for training: many tokens, gradients, several ranks. With a token
per sequence their Python code takes longer than the matrix products. While `decoding` lasts, the
parts that only serve gradients or other ranks are replaced by the plain computation; where other
ranks do hold a share, Megatron-Core's own parts stay. The results are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from gspo_megatron.models.attention import KeyValueCache
from gspo_megatron.models.experts import GroupedExperts
from gspo_megatron.models.norms import TorchNorm
from gspo_megatron.models.transformer_config import changed, without_fp8

# Attributes of Megatron-Core's modules and configs that turn sequence parallelism on.
_SEQUENCE_PARALLEL_SWITCHES = (
    "sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)


@contextlib.contextmanager
def decoding(models: Sequence[torch.nn.Module], cache: KeyValueCache) -> Iterator[None]:
    """Let the attention layers of a policy's chunks use `cache`, and plain parts stand in for those
    of training; without sequence parallelism (one token cannot be divided by TP) and FP8."""
    modules = [module for model in models for module in model.modules()]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}.values()
    changes = [
        (owner, name, False)
        for owner in (*modules, *configs)
        for name in _SEQUENCE_PARALLEL_SWITCHES
        if getattr(owner, name, False)
    ]
    changes += [(m, "key_value_cache", cache) for m in modules if hasattr(m, "key_value_cache")]
    # The cache has the angles of each sequence's position. GPTModel cannot cut the angles of one
    # token for context parallelism.
    changes += [(model, "position_embedding_type", "none") for model in models]
    changes += [
        (owner, name, plain(child))
        for owner in modules
        for name, child in owner.named_children()
        for is_replaceable, plain in (
            (_has_all_of, LocalLinear),
            (_has_all_experts, LocalExperts),
            (_is_plain, LocalLayer),
        )
        if is_replaceable(child)
    ]
    with changed(changes), without_fp8(models):
        yield


def _has_all_of(module: torch.nn.Module) -> bool:
    """A stock linear layer with its whole weight on this rank."""
    is_stock = type(module) in (ColumnParallelLinear, RowParallelLinear)
    return is_stock and module.weight is not None and module.tp_group.size() == 1


def _has_all_experts(module: torch.nn.Module) -> bool:
    """A layer with all experts on this rank, whole, that sends no tokens to other ranks."""
    return (
        isinstance(module, MoELayer)
        and isinstance(module.experts, GroupedExperts)
        and module.attn_tp_group.size() == 1
        and module.experts.groups.ep.size() == 1
        and module.experts.groups.expt_tp.size() == 1
        and not module.shared_expert_overlap
        and not module.config.moe_latent_size
    )


def _is_plain(module: torch.nn.Module) -> bool:
    """A stock layer of norms, self-attention, MLP or experts, and two residual connections."""
    return (
        type(module) is TransformerLayer
        and isinstance(module.input_layernorm, TorchNorm)
        and isinstance(module.pre_mlp_layernorm, TorchNorm)
        and isinstance(module.cross_attention, IdentityOp)
        and not module.config.fp32_residual_connection
    )


class LocalLayer(torch.nn.Module):
    """A TransformerLayer without dropout, recomputation and offloading."""

    def __init__(self, stock: TransformerLayer) -> None:
        super().__init__()
        self.stock = stock  # its parts are replaced in it

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[length, sequences, hidden] -> the same shape, and no context for cross-attention."""
        layer = self.stock
        hidden = _add(hidden_states, *layer.self_attention(layer.input_layernorm(hidden_states)))
        return _add(hidden, *layer.mlp(layer.pre_mlp_layernorm(hidden))), None


def _add(residual: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    return residual + (output if bias is None else output + bias)


class LocalLinear(torch.nn.Module):
    """A linear layer of Megatron-Core without its gradients and collectives."""

    def __init__(self, stock: ColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias = stock.weight, stock.bias
        self.skip_bias_add = stock.skip_bias_add

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], and the bias if others are to add it."""
        if self.skip_bias_add:
            return F.linear(states, self.weight), self.bias
        return F.linear(states, self.weight, self.bias), None


class LocalExperts(torch.nn.Module):
    """An MoELayer that neither sends tokens to other ranks nor has gradients."""

    def __init__(self, stock: MoELayer) -> None:
        super().__init__()
        self.router, self.experts = stock.router, stock.experts
        self.shared_experts = stock.shared_experts

    def forward(self, states: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """[length, sequences, hidden] -> the same shape, and no bias."""
        probs, routing_map = self.router(states)  # [tokens, experts] each
        tokens = states.flatten(0, 1)
        # [rows] each: sorted by expert, and by token for each of them
        chosen, sources = routing_map.t().nonzero().unbind(1)
        rows, _ = self.experts(tokens[sources], routing_map.sum(0), probs[sources, chosen])
        # added up as Megatron-Core does, one expert after the other
        output = torch.zeros_like(tokens).index_add_(0, sources, rows).view_as(states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(states)
        return output, None
