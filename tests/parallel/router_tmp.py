"""The routers' auxiliary losses as exact means over a micro-batch, however its tokens are sharded.

Padding makes the shards of a micro-batch (TP under sequence parallelism, CP) hold different numbers
of real tokens, or none at all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class ExactLossRouter(TopKRouter):
    """Megatron-Core's router, with two of its losses corrected.

    `calculate_per_token_loss` would make the router multiply its losses by the tokens of its own
    shard, to cancel a division by all tokens of the step. Our loss callback counts micro-batches
    instead of tokens (train.schedule), so the losses come out as their mean over micro-batches.
    """

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Mean of logsumexp(logits)^2 over the micro-batch's real tokens. Stock takes the mean of
        the shards' means, which is another number where they hold different numbers of tokens."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits, dim=-1).square()  # [tokens of this shard]
        real = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares)
        total = real.sum()
        dist.all_reduce(total, group=self.tp_cp_group)
        loss = coefficient * (squares * real).sum() / total.clamp(min=1)
        return MoEAuxLossAutoScaler.apply(logits, loss)

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Stock divides by the square of the number of real tokens: 0 / 0, and NaN in every
        gradient, in the micro-batch of padding that a data rank without sequences runs."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        per_expert, _, total = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=with_padding_mask,
        )
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=total.clamp(min=1) if with_padding_mask else total,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss)
