"""Which modules a transformer layer is made of, on each of the two layer backends."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from gspo_megatron.errors import UserError
from gspo_megatron.models.attention import CachedSelfAttention
from gspo_megatron.models.core_attention import TorchCoreAttention
from gspo_megatron.models.experts import GroupedExperts
from gspo_megatron.models.norms import TorchNorm


class TorchSpecProvider(LocalSpecProvider):
    """Megatron-Core's local modules, with norms, attention and experts of our own in torch."""

    def layer_norm(self, *_args: Any, **_kwargs: Any) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchCoreAttention

    def grouped_mlp_modules(self, *_args: Any, **_kwargs: Any) -> Any:
        # 0.16 wants (module, submodules), 0.19 something to call.
        wants_pair = (
            "moe_use_legacy_grouped_gemm"
            in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters
        )
        return (GroupedExperts, None) if wants_pair else GroupedExperts


def choose_backend(wanted: str) -> str:
    """`auto` is Transformer Engine where it is installed and there is a GPU for it."""
    import torch

    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and torch.cuda.is_available()
    if wanted == "transformer_engine" and not usable:
        missing = "a CUDA device" if installed else "the package transformer-engine"
        raise UserError(
            f"model.backend = transformer_engine: {missing} is missing; use torch_native or auto"
        )
    if wanted == "auto":
        return "transformer_engine" if usable else "torch_native"
    return wanted


def block_spec(
    config: TransformerConfig, backend: str, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual stage), MoE and dense by moe_layer_freq."""
    if backend == "transformer_engine":
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config=config, use_transformer_engine=True, vp_stage=vp_stage
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = CachedSelfAttention
        return spec
    layers = [_torch_layer(config, is_moe) for is_moe in _moe_pattern(config)]
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config=config, vp_stage=vp_stage)
        count = get_num_layers_to_build(config=config, vp_stage=vp_stage)
        numbers = range(first, first + count)
    return TransformerBlockSubmodules(
        layer_specs=[layers[number] for number in numbers], layer_norm=TorchNorm
    )


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def _torch_layer(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    provider = TorchSpecProvider()
    qk_norm = TorchNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=CachedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=is_moe,
    )
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
