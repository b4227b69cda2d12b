"""The modules of a transformer layer, for each of the two layer backends."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from gspo_megatron.errors import UserError
from gspo_megatron.families.model_shape import delta_net_pattern
from gspo_megatron.models.attention import CachedSelfAttention
from gspo_megatron.models.core_attention import TorchCoreAttention
from gspo_megatron.models.delta_net import CachedDeltaNet
from gspo_megatron.models.experts import GroupedExperts
from gspo_megatron.models.latent_attention import (
    LATENT_EPSILON,
    CachedLatentAttention,
    LatentNorm,
)
from gspo_megatron.models.norms import KeyNorm, PlainNorm, QueryNorm, TorchNorm
from gspo_megatron.models.router import BiasedSoftmaxRouter
from gspo_megatron.models.shared_prompts import with_shared_prompts
from gspo_megatron.models.transformer_config import has_biased_softmax


class TorchSpecProvider(LocalSpecProvider):
    """Megatron-Core's local modules, with norms, attention and experts of our own in torch."""

    def layer_norm(self, *_args: Any, **_kwargs: Any) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchCoreAttention

    def grouped_mlp_modules(self, *_args: Any, **_kwargs: Any) -> Any:
        # Megatron-Core 0.16 needs (module, submodules), and 0.19 needs a callable
        wants_pair = (
            "moe_use_legacy_grouped_gemm"
            in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters
        )
        return (GroupedExperts, None) if wants_pair else GroupedExperts


def choose_backend(
    backend: str, precision: str, fields: Mapping[str, Any] | None = None, *, packing: bool = False
) -> str:
    """The layer backend to use. `auto` is Transformer Engine if it is installed and there is a GPU,
    except in fp32 and fp64, for which Transformer Engine has few kernels or none, and for latent
    attention that it cannot compute. fields: the model's fields of TransformerConfig; packing:
    micro-batches are packed sequences."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and torch.cuda.is_available()
    if backend == "transformer_engine" and not usable:
        missing = "the package transformer-engine" if torch.cuda.is_available() else "a CUDA device"
        raise UserError(
            f"model.backend = transformer_engine: {missing} is missing; use torch_native or auto"
        )
    if backend == "auto":
        fits, fields = usable and precision not in ("fp32", "fp64"), fields or {}
        fits = fits and (not packing or _softmax_fault(fields) is None)
        if fields.get("multi_latent_attention") and precision == "bf16":  # no other layers have FP8
            of_queries = fields.get("q_lora_rank", MLATransformerConfig.q_lora_rank)
            epsilon = fields.get("layernorm_epsilon", MLATransformerConfig.layernorm_epsilon)
            fits &= _latent_fault(of_queries, epsilon) is None
        return "transformer_engine" if fits else "torch_native"
    return backend


def block_spec(
    config: TransformerConfig,
    backend: str,
    experts: Sequence[bool],
    vp_stage: int | None,
    *,
    joint_qk_norm: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual stage).

    experts: for each layer of the model, whether it is MoE; joint_qk_norm: queries and keys are
    normalised over all heads together. Raises UserError if the layout does not fit the attention.
    """
    _check_attention(config, backend)
    delta_nets = delta_net_pattern(config.linear_attention_freq, config.num_layers)
    layout = config.pipeline_model_parallel_layout
    numbers: Sequence[int]
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config=config, vp_stage=vp_stage)
        count = get_num_layers_to_build(config=config, vp_stage=vp_stage)
        numbers = range(first, first + count)
    if backend == "transformer_engine":
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config=config, use_transformer_engine=True, vp_stage=vp_stage
        )
        # layers of one kind share one object, so each layer gets a copy that can be changed
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        for number, layer in zip(numbers, spec.layer_specs, strict=True):
            _set_router(layer.submodules.mlp, config)
            attention = layer.submodules.self_attention
            if delta_nets[number]:
                parts = attention.submodules
                # In Transformer Engine's spec, linear_qkv contains the input norm of the layer.
                layer.submodules.self_attention = _delta_net(parts.linear_qkv, parts.linear_proj)
                continue
            parts = attention.submodules
            parts.core_attention = with_shared_prompts(parts.core_attention)
            latent = config.multi_latent_attention
            attention.module = CachedLatentAttention if latent else CachedSelfAttention
            if joint_qk_norm:
                parts.q_layernorm = QueryNorm
                parts.k_layernorm = KeyNorm
        return spec
    kinds = zip(experts, delta_nets, strict=True)
    layers = [_torch_layer(config, is_moe, joint_qk_norm, is_delta) for is_moe, is_delta in kinds]
    return TransformerBlockSubmodules(
        layer_specs=[layers[number] for number in numbers], layer_norm=TorchNorm
    )


def _check_attention(config: TransformerConfig, backend: str) -> None:
    """Raise UserError if the layers of this backend cannot compute the attention. What no backend
    can is refused by config/model_rules.py."""
    cp, is_engine = config.context_parallel_size, backend == "transformer_engine"
    has_sinks = config.softmax_type == "learnable"
    if is_engine and cp > 1 and (has_sinks or config.window_size is not None):
        raise UserError(
            f"parallel.context_parallel_size = {cp}: attention of Transformer Engine with a window "
            "or sinks is not exact on parts of a sequence; allowed: 1, or model.backend = "
            "torch_native"
        )
    if is_engine and cp > 1 and not config.bf16:
        raise UserError(
            f"parallel.context_parallel_size = {cp}: attention of Transformer Engine has no fp32 "
            "under context parallelism; allowed: training.precision = bf16, or model.backend = "
            "torch_native"
        )
    if config.multi_latent_attention and is_engine:
        wrong = _latent_fault(config.q_lora_rank, config.layernorm_epsilon)
        if wrong is not None:
            raise UserError(f"model.backend = transformer_engine: {wrong}; allowed: torch_native")


def _softmax_fault(fields: Mapping[str, Any]) -> str | None:
    """Return why the installed Transformer Engine cannot compute the attention of packed sequences,
    or None."""
    if fields.get("softmax_type", "vanilla") == "vanilla":
        return None
    version = importlib.metadata.version("transformer-engine")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (2, 12):
        return None
    return f"version {version} has no sinks for packed sequences; from 2.12 on it has"


def _latent_fault(q_lora_rank: int | None, epsilon: float) -> str | None:
    """Return why Transformer Engine's layers cannot compute this latent attention, or None."""
    resolves = hasattr(MLASelfAttention, "_resolve_qk_norm_config")  # from Megatron-Core 0.19 on
    if resolves and q_lora_rank is None:
        return (
            "the installed megatron-core normalises queries that have no latent (q_lora_rank = "
            "null)"
        )
    if epsilon != LATENT_EPSILON:
        return (
            f"it has one epsilon for all norms, and those of the latents have {LATENT_EPSILON}, "
            f"the others {epsilon}"
        )
    return None


def _torch_attention(config: TransformerConfig, joint_qk_norm: bool) -> ModuleSpec:
    provider = TorchSpecProvider()
    causal = {"attn_mask_type": AttnMaskType.causal}
    if config.multi_latent_attention:
        column = provider.column_parallel_linear()
        return ModuleSpec(
            module=CachedLatentAttention,
            params=causal,
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=column,
                linear_q_down_proj=column,
                linear_q_up_proj=column,
                linear_kv_down_proj=column,
                linear_kv_up_proj=column,
                core_attention=provider.core_attention(),
                linear_proj=provider.row_parallel_linear(),
                q_layernorm=LatentNorm if config.q_lora_rank is not None else IdentityOp,
                kv_layernorm=LatentNorm,
            ),
        )
    norms = (QueryNorm, KeyNorm) if joint_qk_norm else (TorchNorm, TorchNorm)
    q_norm, k_norm = norms if config.qk_layernorm else (IdentityOp, IdentityOp)
    return ModuleSpec(
        module=CachedSelfAttention,
        params=causal,
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def _delta_net(in_proj: Any, out_proj: Any) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=PlainNorm, out_proj=out_proj)
    return ModuleSpec(module=CachedDeltaNet, submodules=submodules)


def _torch_layer(
    config: TransformerConfig, is_moe: bool, joint_qk_norm: bool, is_delta_net: int
) -> ModuleSpec:
    provider = TorchSpecProvider()
    attention = (
        _delta_net(provider.column_parallel_linear(), provider.row_parallel_linear())
        if is_delta_net
        else _torch_attention(config, joint_qk_norm)
    )
    mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=is_moe,
    )
    _set_router(mlp, config)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=TorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=TorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _set_router(mlp: Any, config: TransformerConfig) -> None:
    """Give a layer of experts the router that its model has. Megatron-Core 0.16 describes the
    layer by a ModuleSpec, 0.19 by a partial function."""
    submodules = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords.get("submodules")
    if isinstance(submodules, MoESubmodules) and has_biased_softmax(config):
        submodules.router = BiasedSoftmaxRouter
