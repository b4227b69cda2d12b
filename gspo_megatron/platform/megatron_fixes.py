"""Defects of stock Megatron-Core that training here would meet, mended in one place.

Each has a test that fails when an upgrade makes the mending superfluous.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Apply all of them; once, before a model is built."""
    _count_no_tokens_as_one()
    _average_z_loss_over_tokens()
    _carry_context_into_recompute()
    _latent_attention_without_transformer_engine()
    _count_real_tokens_of_experts()
    _route_without_transformer_engine()
    _split_empty_extra_state()


def _count_no_tokens_as_one() -> None:
    """A micro-batch of padding alone has no token by the padding mask, and the aux loss divides by
    their number squared: 0 / 0 would make every gradient NaN. Data-parallel ranks with fewer
    sequences than micro-batches run such micro-batches to take part in the collectives."""
    from megatron.core.transformer.moe import router

    native = router.get_tokens_per_expert_and_token_count

    @functools.wraps(native)
    def counted(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        per_expert, local, total = native(*args, **kwargs)
        return per_expert, local, total.clamp(min=1) if torch.is_tensor(total) else total

    router.get_tokens_per_expert_and_token_count = counted


def _average_z_loss_over_tokens() -> None:
    """Stock takes the mean of the z loss over each shard's real tokens, and of these means the mean
    over the shards (TP under sequence parallelism, CP): another number, with another gradient, as
    soon as padding makes the shards hold different numbers of tokens."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    def apply_z_loss(
        self: TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        assert not self.calculate_per_token_loss, "micro-batches are counted, not tokens"
        squares = torch.logsumexp(logits, dim=-1).square()  # [tokens of this shard]
        real = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares)
        total = real.sum()
        torch.distributed.all_reduce(total, group=self.tp_cp_group)
        loss = coefficient * (squares * real).sum() / total.clamp(min=1)
        return MoEAuxLossAutoScaler.apply(logits, loss)

    TopKRouter.apply_z_loss = apply_z_loss


def _carry_context_into_recompute() -> None:
    """A checkpointed function runs again in the backward pass, between other micro-batches and on a
    device in another thread: its context variables are then not those of its forward pass, and
    routing.hooks would not know whose experts to replay. (Megatron-Core's own RouterReplay relies
    on the order of micro-batches instead.) In FP8 Megatron-Core recomputes by Transformer Engine,
    which keeps the function as it is too."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    native = CheckpointFunction.forward

    @functools.wraps(native)
    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        outputs = native(ctx, run_function, *args)
        ctx.run_function = in_present_context(run_function)
        return outputs

    CheckpointFunction.forward = staticmethod(forward)
    try:
        # Megatron-Core imports the function from there at each call.
        from transformer_engine.pytorch import distributed as transformer_engine
    except ImportError:
        return
    te_native = transformer_engine.checkpoint

    @functools.wraps(te_native)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return te_native(in_present_context(function), *args, **kwargs)

    transformer_engine.checkpoint = checkpoint


def _latent_attention_without_transformer_engine() -> None:
    """0.16 takes Transformer Engine for installed, because what it imports is there either way, as
    mocks, and then asks whether a layer is an instance of one."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _count_real_tokens_of_experts() -> None:
    """A router with a bias for each expert counts the tokens of each, padding left out, by a mask
    of one flag a token against a map of one flag a token and expert: tokens do not broadcast."""
    from megatron.core.transformer.moe.router import TopKRouter

    native = TopKRouter._apply_expert_bias

    @functools.wraps(native)
    def counted(
        self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if padding_mask is not None and padding_mask.dim() < routing_map.dim():
            padding_mask = padding_mask.unsqueeze(-1)
        native(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = counted


def _route_without_transformer_engine() -> None:
    """0.16 reads the name where moe_router_dtype is set, and binds it only where Transformer Engine
    is installed; None says that it is not."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _split_empty_extra_state() -> None:
    """Recipes that keep nothing (blockwise, MXFP8) have an empty extra state since Transformer
    Engine 2.16; 0.16 looks for the parts of each expert in it, whenever a checkpoint asks where
    the weights lie."""
    from megatron.core.extensions import transformer_engine

    grouped = getattr(transformer_engine, "TEGroupedLinear", None)
    if not hasattr(grouped, "_split_extra_state"):
        return
    native = grouped._split_extra_state

    @functools.wraps(native)
    def split(self: Any, state: torch.Tensor | None) -> list[torch.Tensor | None]:
        if state is None or not state.numel():
            return [state] * self.num_gemms
        return native(self, state)

    grouped._split_extra_state = split


def in_present_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the context variables of this moment, whenever it is called."""
    context = contextvars.copy_context()
    return lambda *args, **kwargs: context.run(function, *args, **kwargs)
