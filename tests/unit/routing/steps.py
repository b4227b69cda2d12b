"""Policy updates on one rank, with a record of what every router did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.redistribute import Sequences, StepIndex
from gspo_megatron.config.schema import ObjectiveSection, OptimizerSection, RoutingSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.objectives import build_objective
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.routing import hooks
from gspo_megatron.routing.hooks import Routes
from tests.unit.models.one_rank import PAD, micro_batch, random_sequences, tiny_policy

LENGTHS = [(3, 5), (1, 9), (6, 2), (4, 11), (2, 3), (5, 6)]
LAYERS, EXPERTS, TOP_K = 2, 8, 2
RATE = 0.02  # a high rate, because routes must change within a step
RECOMPUTES = ("none", "selective", "full")


def moe_policy(recompute: str = "none", **megatron: Any) -> Policy:
    """A policy with two MoE layers, each with 8 experts and top 2. The policy's routers are far
    from uniform. Selective recomputation covers whole MoE layers, routers included."""
    if recompute == "selective":
        megatron["recompute_modules"] = ["moe"]
    return tiny_policy(
        model={"megatron": {"init_method_std": 0.15, **megatron}},
        training={"recompute": recompute},
    )


def builder_for(policy: Policy, *, padded: bool = False) -> MicroBatchBuilder:
    return MicroBatchBuilder(policy, PAD, 1.0, padded=padded)


def micro_batches(policy: Policy, *, padded: bool = False) -> list[MicroBatch]:
    """Three micro-batches of two sequences each."""
    sequences = random_sequences(1, LENGTHS)
    builder = builder_for(policy, padded=padded)
    return [micro_batch(builder, sequences[start : start + 2]) for start in (0, 2, 4)]


@dataclass
class Seen:
    """One forward pass of one router."""

    layer: int
    routes: Routes | None
    with_gradients: bool
    logits: Tensor  # [tokens, experts]
    weights: Tensor  # [tokens, experts]
    chosen: Tensor  # [tokens, experts] bool

    @property
    def natural(self) -> Tensor:
        """The router's own choice [tokens, experts] bool, by a plain top k of the logits."""
        own = self.logits.topk(TOP_K, dim=-1).indices
        return torch.zeros_like(self.chosen).scatter(1, own, True)


@contextlib.contextmanager
def watched() -> Iterator[list[Seen]]:
    """A context in which the work of every router is recorded."""
    seen: list[Seen] = []
    native = TopKRouter.routing

    def routing(self: TopKRouter, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        weights, chosen = native(self, logits, *args, **kwargs)
        flat = logits.detach().flatten(0, -2).clone()
        routes, with_gradients = hooks._current.get(), torch.is_grad_enabled()
        seen.append(Seen(self.layer_number, routes, with_gradients, flat, weights.detach(), chosen))
        return weights, chosen

    with mock.patch.object(TopKRouter, "routing", routing):
        yield seen


def map_of(experts: Tensor) -> Tensor:
    """From [tokens, k] to [tokens, experts] bool."""
    empty = torch.zeros((len(experts), EXPERTS), dtype=torch.bool)
    return empty.scatter(1, experts.long(), True)


@dataclass
class Step:
    """The data of one RL step: six sequences, and three mini-batches of two micro-batches."""

    sequences: Sequences
    index: StepIndex
    plans: list[MiniBatch]


def a_step(*, routes: bool = False, together: bool = False) -> Step:
    """`routes`: random experts for every token, which no router would choose. `together`: a
    mini-batch is one micro-batch of two sequences."""
    tokens = [torch.tensor(p + r) for p, r in random_sequences(1, LENGTHS)]
    prompts, responses = zip(*LENGTHS)
    generator = torch.Generator().manual_seed(5)
    starts = [sum(responses[:n]) for n in range(len(LENGTHS))]
    chosen = [
        torch.rand((len(t), LAYERS, EXPERTS), generator=generator).topk(TOP_K).indices
        for t in tokens
    ]
    sequences = Sequences(
        tokens=dict(enumerate(tokens)),
        rollout_logprobs=-torch.rand(sum(responses), generator=generator),
        offsets=dict(enumerate(starts)),
        routes={n: c.to(torch.uint8) for n, c in enumerate(chosen)} if routes else None,
    )
    index = StepIndex(
        source=(0,) * len(LENGTHS),
        prompt_lengths=prompts,
        response_lengths=responses,
        masked_lengths=responses,
        groups=tuple(n // 2 for n in range(len(LENGTHS))),
        rewards=torch.tensor([1.0, 0.0] * (len(LENGTHS) // 2), dtype=torch.float64),
    )
    plans = [
        MiniBatch(
            (((n, n + 1),) if together else ((n,), (n + 1,)),), 2, responses[n] + responses[n + 1]
        )
        for n in range(0, len(LENGTHS), 2)
    ]
    return Step(sequences, index, plans)


def updater_for(
    policy: Policy,
    routing: dict[str, Any],
    objective: dict[str, Any] | None = None,
    *,
    padded: bool = False,
) -> PolicyUpdater:
    section = ObjectiveSection(**{"name": "grpo", **(objective or {})})
    trainer = build_trainer(policy, OptimizerSection(), Schedule(RATE, RATE, 0, 1, "constant"))
    return PolicyUpdater(
        policy,
        trainer,
        builder_for(policy, padded=padded),
        build_objective(section, max(response for _, response in LENGTHS)),
        section,
        RoutingSection(**routing),
    )


def update(
    updater: PolicyUpdater, *, routes: bool = False, together: bool = False
) -> dict[str, float]:
    """Run one step. Returns its metrics."""
    step = a_step(routes=routes, together=together)
    advantages = updater.objective.advantages.of_sequences(
        step.index.rewards, torch.tensor(step.index.groups)
    )
    return update_policy(updater, step.sequences, step.index, step.plans, advantages)


def parameters_after(
    routing: dict[str, Any], *, recompute: str = "none", objective: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """The parameters of a new policy after one step."""
    policy = moe_policy(recompute)
    updater = updater_for(policy, routing, objective)
    update(updater, routes=routing.get("replay") == "r3")
    return {name: p.detach().clone() for name, p in policy.models[0].named_parameters()}
