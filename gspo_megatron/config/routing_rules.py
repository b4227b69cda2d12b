"""What the section `routing` asks of the model and of the objective."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_megatron.config.problems import problem
from gspo_megatron.config.schema import Config
from gspo_megatron.config.shape import ModelShape

# What has a say in the routers' choice of experts, with the value that has none.
_IDLE = {"replay": "off", "volatility": False, "rollout_noise": 0.0}


def routing_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """What is wrong with replay, volatility and noise on a model of this shape."""
    routing = config.routing
    for key, idle in _IDLE.items():
        value = getattr(routing, key)
        if value == idle:
            continue
        if shape.num_moe_experts is None:
            legal = str(idle).lower()
            yield problem(f"routing.{key}", value, f"the model has no experts; legal: {legal}")
        elif shape.megatron.get("moe_router_fusion"):
            yield problem(
                f"routing.{key}",
                value,
                "a fused router never asks which experts to take; "
                "legal with it: model.megatron.moe_router_fusion = false",
            )
        elif "sinkhorn" in str(shape.megatron.get("moe_router_load_balancing_type")):
            yield problem(
                f"routing.{key}", value, "sinkhorn routing never asks which experts to take"
            )
    unread = {"reference_replay": routing.reference_replay, "store_on_host": routing.store_on_host}
    for key, on in unread.items():
        if on and routing.replay == "off":
            yield problem(f"routing.{key}", on, "nothing reads it with replay = off; legal: false")
    if routing.reference_replay and config.objective.kl == "none":
        yield problem(
            "routing.reference_replay",
            True,
            "there is no reference with objective.kl = none; legal: false",
        )
