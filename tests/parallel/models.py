"""The models of these tests. They are tiny. Where possible, their sizes differ from each other and
are not round, because equal or round sizes can hide mistakes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gspo_megatron.config import Config, check_config, parse_config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.platform.groups import set_up_model_parallel

VOCAB_SIZE = 45
NO_ROUTER_LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}

ODD_MOE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 16,  # heads * channels is 64 and differs from the hidden size
    "num_query_groups": 2,
    "ffn_hidden_size": 72,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    # Larger than usual, so that mistakes are visible. With weights of the usual size, a mistake
    # hardly changes the routes, log-probs and gradients of an untrained model.
    "init_method_std": 0.15,
}


def odd_moe(
    layout: str,
    objective: dict[str, Any] | None = None,
    *,
    tie_embeddings: bool = False,
    sequence_parallel: bool | None = None,
    training: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **megatron: Any,
) -> Config:
    """The configuration of the tiny MoE on a layout such as "tp=2,ep=2". It is in fp32 unless
    `training` sets another precision. Further arguments are fields of TransformerConfig."""
    config = parse_config(
        {
            "model": {"megatron": {**ODD_MOE, **megatron}, "tie_embeddings": tie_embeddings},
            "parallel": {
                "layout": layout,
                "sequence_parallel": sequence_parallel,
                "ddp": ddp or {},
            },
            "data": {"tokenizer": "none"},
            "objective": objective or {},
            "optimizer": {"learning_rate": 1e-3},
            "routing": routing or {},
            # By chance, random prompts have equal first tokens.
            "training": {"precision": "fp32", "share_prompts": False} | (training or {}),
        }
    )
    check_config(config, config.world_size_hint())
    return config


def build_on_ranks(config: Config, vocab_size: int = VOCAB_SIZE) -> Policy:
    """Build process groups and the policy in processes that are already running."""
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    return build_policy(config, parallel, vocab_size)
