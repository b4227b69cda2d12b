"""The model's sizes once preset and configuration are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_megatron.config.presets import PRESETS

if TYPE_CHECKING:
    from gspo_megatron.config.schema import ModelSection


@dataclass(frozen=True)
class ModelShape:
    """What the model will be; every MoE size is None in a model without experts.

    `vocab_size` None means the tokenizer's. `megatron` holds all keyword arguments of
    TransformerConfig that preset and configuration give (the layout and precision are not in it),
    with `activation_func` and `attention_backend` as strings.
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

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has an MLP of `ffn_hidden_size` instead of experts."""
        return self.num_moe_experts is None or self.megatron.get("moe_layer_freq", 1) != 1


def resolve_shape(model: ModelSection) -> ModelShape:
    """Merge the preset with the `model` section; a value of the section wins.

    Sizes that both leave open get TransformerConfig's own defaults.
    """
    preset = PRESETS[model.preset]
    megatron: dict[str, Any] = {**preset.megatron, **model.megatron}
    num_experts = megatron.get("num_moe_experts")
    if num_experts is None:
        # `num_moe_experts: null` on an MoE preset asks for the dense model of the same shape, and
        # TransformerConfig refuses expert sizes there. What the user wrote stays, to be refused.
        megatron = {
            name: value
            for name, value in megatron.items()
            if not name.startswith("moe_") or name in model.megatron
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

    def own(value: Any, default: Any) -> Any:
        return default if value is None else value

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
        vocab_size=own(model.vocab_size, preset.vocab_size),
        max_sequence_length=own(model.max_sequence_length, preset.max_sequence_length),
        rotary_base=own(model.rotary_base, preset.rotary_base),
        tie_embeddings=own(model.tie_embeddings, preset.tie_embeddings),
        megatron=megatron,
    )
