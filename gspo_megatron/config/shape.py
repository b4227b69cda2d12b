"""The model's sizes once preset and configuration are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gspo_megatron.config.families import experts_in_layers, preset_of_folder
from gspo_megatron.config.presets import PRESETS, ModelPreset

if TYPE_CHECKING:
    from gspo_megatron.config.schema import ModelSection


@dataclass(frozen=True)
class ModelShape:
    """What the model will be; every MoE size is None in a model without experts.

    `vocab_size` None means the tokenizer's. `megatron` holds all keyword arguments of
    TransformerConfig that preset and configuration give (the layout and precision are not in it),
    with `activation_func` and `attention_backend` as strings. `joint_qk_norm`: queries and keys are
    normalised over all heads together instead of each head by itself.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    num_moe_experts: int | None
    moe_router_topk: int | None
    moe_ffn_hidden_size: int | None
    moe_shared_expert_intermediate_size: int | None
    vocab_size: int | None
    max_sequence_length: int
    rotary_base: float
    tie_embeddings: bool
    megatron: dict[str, Any]
    joint_qk_norm: bool = False

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has an MLP of `ffn_hidden_size` instead of experts."""
        return self.num_moe_experts is None or self.megatron.get("moe_layer_freq", 1) != 1


def resolve_shape(model: ModelSection) -> ModelShape:
    """Merge the preset, or the model that `hf_path` describes, with the `model` section; a value of
    the section wins.

    Sizes that both leave open get TransformerConfig's own defaults. Raises ConfigError for an
    `hf_path` whose config.json cannot be read or names what we cannot do.
    """
    preset = start_of_shape(model)
    own = {
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.max_sequence_length,
        "rotary_base": model.rotary_base,
        "tie_embeddings": model.tie_embeddings,
    }
    given = {name: value for name, value in own.items() if value is not None}
    return shape_of(replace(preset, **given), model.megatron)


def start_of_shape(model: ModelSection) -> ModelPreset:
    """What the `model` section starts from."""
    return PRESETS[model.preset] if model.hf_path is None else preset_of_folder(model.hf_path)


def shape_of(
    preset: ModelPreset, overrides: Mapping[str, Any] = MappingProxyType({})
) -> ModelShape:
    """The model of a preset, with `overrides` of its TransformerConfig."""
    megatron: dict[str, Any] = {**preset.megatron, **overrides}
    num_experts = megatron.get("num_moe_experts")
    if num_experts is None:
        # `num_moe_experts: null` on an MoE preset asks for the dense model of the same shape, and
        # TransformerConfig refuses expert sizes there. What the user wrote stays, to be refused.
        megatron = {
            name: value
            for name, value in megatron.items()
            if not name.startswith("moe_") or name in overrides
        }
    heads = megatron["num_attention_heads"]
    sizes = {
        "num_query_groups": megatron.get("num_query_groups") or heads,
        "kv_channels": megatron.get("kv_channels") or megatron["hidden_size"] // heads,
        "ffn_hidden_size": megatron.get("ffn_hidden_size") or 4 * megatron["hidden_size"],
    }
    if num_experts is not None:
        sizes["moe_ffn_hidden_size"] = (
            megatron.get("moe_ffn_hidden_size") or sizes["ffn_hidden_size"]
        )
        sizes["moe_router_topk"] = megatron.get("moe_router_topk", 2)
    megatron.update(sizes)
    return ModelShape(
        num_layers=megatron["num_layers"],
        hidden_size=megatron["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=sizes["num_query_groups"],
        kv_channels=sizes["kv_channels"],
        ffn_hidden_size=sizes["ffn_hidden_size"],
        num_moe_experts=num_experts,
        moe_router_topk=sizes.get("moe_router_topk"),
        moe_ffn_hidden_size=sizes.get("moe_ffn_hidden_size"),
        moe_shared_expert_intermediate_size=megatron.get("moe_shared_expert_intermediate_size"),
        vocab_size=preset.vocab_size,
        max_sequence_length=preset.max_sequence_length,
        rotary_base=preset.rotary_base,
        tie_embeddings=preset.tie_embeddings,
        megatron=megatron,
        joint_qk_norm=preset.joint_qk_norm,
    )


def shape_conflicts(shape: ModelShape, preset: ModelPreset) -> Iterator[tuple[str, Any, Any]]:
    """Keys of the `model` section that make a model's tensors other than those of `preset`, with
    the value of each: weights of the one are none for the other."""
    theirs = shape_of(preset)
    for key, is_own in _TENSOR_KEYS.items():
        ours, its = (
            getattr(each, key) if is_own else each.megatron.get(key) for each in (shape, theirs)
        )
        if (ours or None) != (its or None):
            yield key if is_own else f"megatron.{key}", ours, its
    patterns = [experts_in_layers(each) for each in (shape, theirs)]
    if shape.num_layers == theirs.num_layers and patterns[0] != patterns[1]:
        frequencies = [each.megatron.get("moe_layer_freq", 1) for each in (shape, theirs)]
        yield "megatron.moe_layer_freq", *frequencies


# Whether each is a field of ModelShape of that name alone, or one of TransformerConfig.
_TENSOR_KEYS = {
    "vocab_size": True,
    "tie_embeddings": True,
    "joint_qk_norm": True,
    "num_layers": False,
    "hidden_size": False,
    "num_attention_heads": False,
    "num_query_groups": False,
    "kv_channels": False,
    "num_moe_experts": False,
    "moe_ffn_hidden_size": False,
    "moe_shared_expert_intermediate_size": False,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
    "qk_layernorm": False,
    "add_qkv_bias": False,
    "add_bias_linear": False,
    "gated_linear_unit": False,
    "multi_latent_attention": False,
    "q_lora_rank": False,
    "kv_lora_rank": False,
    "qk_head_dim": False,
    "qk_pos_emb_head_dim": False,
    "v_head_dim": False,
}
