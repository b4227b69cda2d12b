"""Replaces modules of a policy by faster ones while it decodes.

Megatron-Core's modules are made for training: many tokens, gradients, several ranks. When each
sequence has one new token, their Python code takes longer than the matrix products. In the context
`decoding`, they are replaced by plain modules, which have no code for gradients and for other
ranks. A module whose weights are sharded over several ranks is not replaced. The results do not
change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from gspo_megatron.models.attention import (
    CachedSelfAttention,
    KeyValueCache,
    rotate,
    window_and_sinks,
)
from gspo_megatron.models.experts import GroupedExperts
from gspo_megatron.models.norms import TorchNorm, rms_norm
from gspo_megatron.models.transformer_config import changed, without_fp8
from gspo_megatron.platform.cpu import products
from gspo_megatron.platform.devices import count_values

# Attributes of Megatron-Core's modules and configs that turn sequence parallelism on.
_SEQUENCE_PARALLEL_SWITCHES = (
    "sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)


# With any other moe_router_dtype, the router computes in the dtype of the hidden states.
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@contextlib.contextmanager
def decoding(models: Sequence[torch.nn.Module], cache: KeyValueCache) -> Generator[None]:
    """Prepare a policy's chunks for decoding while the context lasts. The attention layers use
    `cache`, and plain modules replace the modules of training. FP8 is off. Sequence parallelism is
    off, too, because TP ranks cannot share one token."""
    modules = [module for model in models for module in model.modules()]
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}.values()
    changes: list[tuple[Any, str, Any]] = [
        (owner, name, False)
        for owner in (*modules, *configs)
        for name in _SEQUENCE_PARALLEL_SWITCHES
        if getattr(owner, name, False)
    ]
    changes += [(m, "key_value_cache", cache) for m in modules if hasattr(m, "key_value_cache")]
    # Rotary angles come from the cache, one for each sequence's position. GPTModel would cut its
    # angles over the context-parallel ranks, which fails for one token.
    changes += [(model, "position_embedding_type", "none") for model in models]
    # whether a module of training can be replaced, and the class of the plain module
    replacements: list[tuple[Any, Any]] = [
        (_has_all_of, LocalLinear),
        (_has_all_experts, LocalExperts),
        (_is_plain, LocalLayer),
        (_is_plain_attention, LocalAttention),
    ]
    changes += [
        (owner, name, plain(child))
        for owner in modules
        for name, child in owner.named_children()
        for is_replaceable, plain in replacements
        if is_replaceable(child)
    ]
    # In inference mode all operations are cheaper. But a stock module of Megatron-Core may keep a
    # tensor for the next training step, and training cannot use a tensor from inference mode.
    layers = [module for module in modules if isinstance(module, TransformerLayer)]
    all_plain = all(map(_is_plain_throughout, layers))
    mode = torch.inference_mode() if all_plain else torch.no_grad()
    with changed(changes), without_fp8(models), mode, products.packed_weights():
        yield


def _has_all_of(module: Any) -> bool:
    """Whether the module is a stock linear layer whose whole weight is on this rank."""
    is_stock = type(module) in (ColumnParallelLinear, RowParallelLinear)
    return is_stock and module.weight is not None and module.tp_group.size() == 1


def _has_all_experts(module: Any) -> bool:
    """Whether the module is an MoE layer with all experts on this rank, so that no token is
    sent."""
    return (
        isinstance(module, MoELayer)
        and isinstance(module.experts, GroupedExperts)
        and module.attn_tp_group.size() == 1
        and module.experts.groups.ep.size() == 1
        and module.experts.groups.expt_tp.size() == 1
        and not module.shared_expert_overlap
        and not module.config.moe_latent_size
    )


def _is_plain(module: Any) -> bool:
    """Whether the module is a stock layer of norms, self-attention, MLP or experts, and two
    residual connections."""
    return (
        type(module) is TransformerLayer
        and isinstance(module.input_layernorm, TorchNorm)
        and isinstance(module.pre_mlp_layernorm, TorchNorm)
        and isinstance(module.cross_attention, IdentityOp)
        and not module.config.fp32_residual_connection
    )


def _is_plain_attention(module: Any) -> bool:
    """Whether the module is self-attention whose whole weights are on this rank, without an output
    gate. Queries and keys have either a norm for each single head, or no norms."""
    if type(module) is not CachedSelfAttention or not _has_all_of(module.linear_qkv):
        return False
    if module.config.attention_output_gate:
        return False
    norms = (module.q_layernorm, module.k_layernorm)
    has_norms = all(type(norm) is TorchNorm and not norm.centered for norm in norms)
    has_none = all(norm is None or isinstance(norm, IdentityOp) for norm in norms)
    return has_norms or has_none


def _is_plain_router(router: TopKRouter) -> bool:
    """Whether the router takes the top k of a softmax, and does nothing else."""
    config = router.config
    return (
        type(router) is TopKRouter
        and router.routing_type not in ("sinkhorn", "quantile_balancing")
        and router.score_function == "softmax"
        and router.expert_bias is None
        and not config.moe_router_topk_scaling_factor
        and not config.moe_router_group_topk
        and not config.moe_router_fusion
        and not config.moe_router_force_load_balancing
        and not getattr(config, "moe_router_force_biased", None)  # a field of newer versions
        and getattr(router, "lora", None) is None
        and config.moe_input_jitter_eps is None
        and config.moe_expert_capacity_factor is None
    )


def _is_plain_throughout(layer: TransformerLayer) -> bool:
    """Whether modules of this file replace everything in the layer."""
    mlp = layer.mlp
    is_mlp_plain = not isinstance(mlp, MoELayer) or (
        _has_all_experts(mlp) and _is_plain_router(mlp.router)
    )
    return _is_plain(layer) and _is_plain_attention(layer.self_attention) and is_mlp_plain


class LocalLayer(torch.nn.Module):
    """A TransformerLayer without dropout, recomputation and offloading."""

    def __init__(self, stock: TransformerLayer) -> None:
        super().__init__()
        self.stock = stock  # `decoding` also replaces the modules inside this layer

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[length, sequences, hidden] -> the same shape, and no context for cross-attention."""
        layer = self.stock
        hidden = _add(hidden_states, *layer.self_attention(layer.input_layernorm(hidden_states)))
        return _add(hidden, *layer.mlp(layer.pre_mlp_layernorm(hidden))), None


def _add(residual: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    return residual + (output if bias is None else output + bias)


class LocalAttention(torch.nn.Module):
    """A CachedSelfAttention that norms and rotates the heads of queries and keys together."""

    def __init__(self, stock: CachedSelfAttention) -> None:
        super().__init__()
        self.stock = stock  # `decoding` also replaces its linear layers
        self.groups = stock.num_query_groups_per_partition
        # Number of query heads in a group.
        self.queries = stock.num_attention_heads_per_partition // self.groups
        self.scale = stock.config.softmax_scale or stock.hidden_size_per_attention_head**-0.5
        self.window_and_sinks = window_and_sinks(stock)
        # The norms' weights [queries of a group + 1, dim]. The last weight is the key's.
        self.norm: Tensor | None = None
        if isinstance(stock.q_layernorm, TorchNorm):
            norms = [stock.q_layernorm] * self.queries + [stock.k_layernorm]
            weights = torch.stack([norm.weight for norm in norms])
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            self.norm = weights + stock.q_layernorm.zero_centered

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """See CachedSelfAttention."""
        stock, cache = self.stock, self.stock.key_value_cache
        assert cache is not None
        mixed, _ = stock.linear_qkv(hidden_states)
        # [length, sequences, groups, queries of a group + key + value, dim]
        mixed = mixed.unflatten(-1, (self.groups, self.queries + 2, -1))
        turned, value = mixed[:, :, :, :-1], mixed[:, :, :, -1]
        if self.norm is not None:
            turned = rms_norm(turned.to(self.norm.dtype), self.norm, stock.q_layernorm.eps)
            turned = turned.to(value.dtype)
        cos, sin = cache.cos.unsqueeze(2), cache.sin.unsqueeze(2)
        turned = rotate(turned, cos, sin, stock.config.rotary_interleaved)
        query, key = turned[:, :, :, :-1].flatten(2, 3), turned[:, :, :, -1]
        rest = self.scale, *self.window_and_sinks
        attended = cache.attend(stock.layer_number, query, key, value, *rest)
        return stock.linear_proj(attended)


class LocalLinear(torch.nn.Module):
    """A linear layer of Megatron-Core without its gradients and collectives."""

    def __init__(self, stock: ColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias = stock.weight, stock.bias
        self.skip_bias_add = stock.skip_bias_add
        self.lora = vars(stock).get("lora")

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """[..., in] -> [..., out], and the bias if the caller must add it."""
        output = products.linear(states, self.weight, None if self.skip_bias_add else self.bias)
        if self.lora is not None and self.lora.lora.enabled:
            output = self.lora(states, output)
        return output, self.bias if self.skip_bias_add else None


class LocalExperts(torch.nn.Module):
    """An MoELayer that neither sends tokens to other ranks nor has gradients."""

    def __init__(self, stock: MoELayer) -> None:
        super().__init__()
        self.router, self.experts = stock.router, stock.experts
        self.shared_experts = stock.shared_experts
        self.choose = _choose if _is_plain_router(stock.router) else _choose_by_stock_router

    def forward(self, states: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """[length, sequences, hidden] -> the same shape, and no bias."""
        tokens = states.flatten(0, 1)
        sources, weights, counts = self.choose(self.router, states)
        rows, _ = self.experts(tokens.index_select(0, sources), counts, weights)
        # summed in Megatron-Core's order, one expert after the other
        output = torch.zeros_like(tokens).index_add_(0, sources, rows).view_as(states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(states)
        return output, None


# The rows that experts compute, sorted by expert and then by token: the token of each row [rows],
# its weight [rows], and the number of rows of each expert [experts].
Dispatch = tuple[Tensor, Tensor, Tensor]


def _choose_by_stock_router(router: TopKRouter, states: Tensor) -> Dispatch:
    """The dispatch that the stock router chooses for states [length, sequences, hidden]."""
    probs, routing_map = router(states)  # [tokens, experts] each
    chosen, sources = routing_map.t().nonzero().unbind(1)
    return sources, probs[sources, chosen], routing_map.sum(0)


def _choose(router: TopKRouter, states: Tensor) -> Dispatch:
    """Choose as `_choose_by_stock_router` does, but without tables [tokens, experts] of weights and
    choices. If the router has a replay hook, the hook chooses."""
    hook, topk = router.router_replay, router.topk
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype, states.dtype)
    is_before = router.config.moe_router_pre_softmax
    # Megatron-Core 0.16 rounds such scores before the choice of experts, and 0.19 after it.
    if is_before and dtype.itemsize < 4:
        return _choose_by_stock_router(router, states)
    bias = None if router.bias is None else router.bias.to(dtype)
    scores = F.linear(states.flatten(0, 1).to(dtype), router.weight.to(dtype), bias)
    if is_before:
        scores = scores.softmax(-1, torch.float32).to(dtype)
    if hook is None:
        weights, experts = _best(scores, topk)  # [tokens, k] each
    else:
        weights, experts = hook.get_replay_topk(scores, topk, default_compute_topk=_best)
    if not is_before:
        weights = weights.softmax(-1, torch.float32).to(dtype)
    rows = experts.flatten()
    order = rows.argsort(stable=True)
    counts = count_values(rows, scores.shape[-1])
    return order // topk, weights.flatten().index_select(0, order), counts


def _best(scores: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    return scores.topk(topk, dim=1)
