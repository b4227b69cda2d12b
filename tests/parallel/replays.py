"""What the ranks do in test_replay: updates that watch the routers."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from gspo_megatron.routing import hooks
from gspo_megatron.routing.replay import Recording, Replaying
from gspo_megatron.routing.volatility import Observing
from gspo_megatron.verify.results import StepResult
from tests.parallel.updates import update_away_from_the_reference
from tests.unit.routing import mistakes


@dataclass
class Watched:
    """An update with counts over all ranks, on rank 0."""

    result: StepResult
    replayed: int  # tokens x layers whose forward pass had routes to follow
    wrong: int  # of these, tokens whose experts in Megatron-Core's routing map were others
    moved: int  # of these, tokens that the router would have sent elsewhere
    passes: dict[str, int]  # forward passes of routers, by what they were told


def watched_update(mistake: str | None = None, **arguments: Any) -> Watched:
    """An update, every routing map of Megatron-Core held against the routes of the pass. `mistake`:
    of tests.unit.routing.mistakes."""
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
            known = table.known if table.known is not None else torch.ones(len(maps)).bool()
            own = logits.detach().flatten(0, -2).topk(self.topk, dim=-1).indices
            natural = torch.zeros_like(chosen).scatter(1, own, True)
            counts["replayed"] += int(known.sum())
            counts["wrong"] += int(((maps != chosen).any(-1) & known).sum())
            counts["wrong"] += int(((natural != chosen).any(-1) & ~known).sum())
            counts["moved"] += int(((maps != natural).any(-1) & known).sum())
            # the weights of the experts are the live router's
            assert not (probs[~chosen] != 0).any()
        return probs, chosen

    wrong = getattr(mistakes, mistake)() if mistake else nullcontext()
    with wrong, mock.patch.object(TopKRouter, "routing", routing):
        result = update_away_from_the_reference(**arguments)
    values = torch.tensor([counts[name] for name in ("replayed", "wrong", "moved")])
    dist.all_reduce(values)
    return Watched(result, *values.tolist(), passes=dict(passes))
