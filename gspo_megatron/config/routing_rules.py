"""What the section `routing` asks of the model and of the objective."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_megatron.config.problems import problem
from gspo_megatron.config.schema import Config
from gspo_megatron.config.shape import ModelShape

# What has a say in the routers' choice of experts, with the value that has none.
_IDLE = {"replay": "off", "reference_replay": "off", "volatility": False, "rollout_noise": 0.0}
_BALANCING = "model.megatron.moe_router_load_balancing_type"


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
            continue
        for reason in _ways_past_the_hooks(shape):
            yield problem(f"routing.{key}", value, reason)
        if key.endswith("replay"):
            for reason in _ways_to_drop(shape):
                yield problem(f"routing.{key}", value, reason)
    if routing.store_on_host and not routing.modes:
        yield problem(
            "routing.store_on_host",
            True,
            "nothing reads it with replay = off and reference_replay = off; legal: false",
        )
    if routing.reference_replay != "off" and config.objective.kl == "none":
        yield problem(
            "routing.reference_replay",
            routing.reference_replay,
            "there is no reference with objective.kl = none; legal: off",
        )


def _ways_past_the_hooks(shape: ModelShape) -> Iterator[str]:
    """Settings with which a router takes its experts without asking its hook."""
    megatron = shape.megatron
    if megatron.get("moe_router_fusion"):
        yield (
            "a fused router never asks which experts to take; "
            "legal with it: model.megatron.moe_router_fusion = false"
        )
    balancing = str(megatron.get("moe_router_load_balancing_type"))
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in balancing:
            words = kind.replace("_", " ")
            yield f"{words} never asks which experts to take; legal with it: another {_BALANCING}"
    graphs = [name for name in ("enable_cuda_graph", "external_cuda_graph") if megatron.get(name)]
    if megatron.get("cuda_graph_impl", "none") != "none":
        graphs.append("cuda_graph_impl")
    for name in graphs:
        yield (
            "a captured CUDA graph asks for the experts once and never again; "
            f"legal with it: no model.megatron.{name}"
        )
    if megatron.get("overlap_moe_expert_parallel_comm"):
        yield (
            "layers of two micro-batches run by turns, past their own routes; "
            "legal with it: model.megatron.overlap_moe_expert_parallel_comm = false"
        )


def _ways_to_drop(shape: ModelShape) -> Iterator[str]:
    """Settings that take tokens away from the experts that were replayed."""
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if shape.megatron.get(name) is not None:
            yield (
                "full experts drop tokens after the choice: the replayed experts would not be "
                f"those that are used; legal with it: model.megatron.{name} = null"
            )
