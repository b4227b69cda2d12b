"""What the ranks do in test_replay: updates that look at what the routers really used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.rl import policy_update as step
from gspo_megatron.routing import hooks
from gspo_megatron.routing.replay import Recording, Replaying
from gspo_megatron.routing.volatility import Observing
from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult


@dataclass
class Watched:
    """An update with counts over all ranks, on rank 0."""

    result: StepResult
    replayed: int  # tokens x layers whose forward pass had routes to follow
    wrong: int  # of these, tokens whose experts in Megatron-Core's routing map were others
    moved: int  # of these, tokens that the router would have sent elsewhere
    passes: dict[str, int]  # forward passes of routers, by what they were told


class DistantReference(ReferencePolicy):
    """Far from the policy, by the same amount whatever the layout: a function of the weight."""

    @torch.no_grad()
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for weight in self._weights:
            weight.add_(0.1 * torch.sin(37.0 * weight))


def watched_update_away_from_the_reference(**arguments: Any) -> Watched:
    """`watched_update` with a reference policy that would choose other experts."""
    with mock.patch.object(step, "ReferencePolicy", DistantReference):
        return watched_update(**arguments)


def watched_update(**arguments: Any) -> Watched:
    """`run_update`, every routing map of Megatron-Core held against the routes of the pass."""
    counts, passes = defaultdict(int), defaultdict(int)
    native = TopKRouter.routing

    def routing(self: TopKRouter, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        routes = hooks._current.get()
        passes[type(routes).__name__] += 1
        # a checkpointed training pass, to be repeated when gradients are wanted
        passes["checkpointed"] += isinstance(routes, Observing) and not torch.is_grad_enabled()
        probs, chosen = native(self, logits, *args, **kwargs)
        inner = routes.inner if isinstance(routes, (Observing, Recording)) else routes
        if isinstance(inner, Replaying):
            table = inner._table
            wanted = table.experts[table.layers.index(self.layer_number)].long()
            maps = torch.zeros_like(chosen).scatter(1, wanted, True)
            known = table.known
            known = torch.ones(len(maps), dtype=torch.bool) if known is None else known
            own = logits.detach().flatten(0, -2).topk(self.topk, dim=-1).indices
            natural = torch.zeros_like(chosen).scatter(1, own, True)
            counts["replayed"] += int(known.sum())
            counts["wrong"] += int(((maps != chosen).any(-1) & known).sum())
            counts["wrong"] += int(((natural != chosen).any(-1) & ~known).sum())
            counts["moved"] += int(((maps != natural).any(-1) & known).sum())
            # the weights of the experts are the live router's
            assert not (probs[~chosen] != 0).any()
        return probs, chosen

    with mock.patch.object(TopKRouter, "routing", routing):
        result = run_update(**arguments)
    values = torch.tensor([counts[name] for name in ("replayed", "wrong", "moved")])
    dist.all_reduce(values)
    return Watched(result, *values.tolist(), passes=dict(passes))
