"""A softmax router with a bias that changes only the choice of experts, not their weights, as in
ERNIE 4.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

# A lower bound of the sum by which the weights of a token's experts are divided.
SMALLEST_SUM = 1e-12


class BiasedSoftmaxRouter(TopKRouter):
    """Megatron-Core's router, which chooses experts by softmax scores and a bias. The stock router
    has a bias only with sigmoid scores.

    The scores are a softmax over all experts. The experts with the largest sum of score and bias
    are chosen. Their weights are their scores, divided by the sum of these scores. The stock
    router gets replayed experts from an object. This class replaces the object, and nothing else.
    """

    def routing(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See TopKRouter: logits [length, sequences, experts] -> weights and chosen experts,
        [tokens, experts] each."""
        hook = self.router_replay
        self.router_replay = BiasedChoice(self.expert_bias, hook)
        try:
            return super().routing(*args, **kwargs)
        finally:
            self.router_replay = hook


@dataclass(frozen=True)
class BiasedChoice:
    """Replaces the stock router's RouterReplay, and calls the hook that replays experts
    (routing/hooks.py), if there is one."""

    bias: Tensor  # [experts]
    hook: Any

    def get_replay_topk(self, scores: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
        """scores: [tokens, experts] after the softmax -> weights and experts, [tokens, k] each."""
        if self.hook is None:
            weights, experts = self._best(scores, topk)
        else:
            best = self._best
            weights, experts = self.hook.get_replay_topk(scores, topk, default_compute_topk=best)
        total = weights.sum(dim=-1, keepdim=True)
        return weights / total.clamp(min=SMALLEST_SUM), experts

    def _best(self, scores: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
        """The choice without replayed experts; the weights do not sum up to 1 yet."""
        experts = (scores + self.bias).topk(topk, dim=-1).indices
        return scores.gather(1, experts), experts
