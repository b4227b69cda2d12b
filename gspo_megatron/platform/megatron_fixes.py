"""Fixes of the defects of stock Megatron-Core that affect training here.

Each fix has a test that fails when an upgrade makes the fix superfluous.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.moe.router import TopKRouter


def install() -> None:
    """Apply all fixes. Called once, before a model is built."""
    _count_tokens_of_aux_losses()
    TopKRouter.apply_z_loss = _apply_z_loss
    _carry_context_into_recompute()
    _count_real_tokens_of_experts()
    _count_tokens_of_experts_exactly()
    _split_empty_extra_state()
    _build_delta_nets_without_kernels()
    # If Transformer Engine is missing, Megatron-Core 0.16 imports mocks and takes Transformer
    # Engine for installed. Then Megatron-Core fails, because it uses a mock in isinstance().
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # With moe_router_dtype, Megatron-Core 0.16 reads a name that it defines only with Transformer
    # Engine. None means that Transformer Engine is not installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _count_tokens_of_aux_losses() -> None:
    """Count at least one token by which aux losses divide: a micro-batch with only padding has 0
    tokens by the padding mask. The aux loss divides by the square of the number of tokens, and
    0 / 0 would make every gradient NaN. Data-parallel ranks with fewer sequences than micro-batches
    run such micro-batches to take part in the collectives."""
    native = router.get_tokens_per_expert_and_token_count

    @functools.wraps(native)
    def counted(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        per_expert, local, total = native(*args, **kwargs)
        return per_expert, local, total.clamp(min=1) if torch.is_tensor(total) else total

    router.get_tokens_per_expert_and_token_count = counted


def _apply_z_loss(
    self: TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the z loss as its mean over all real tokens. Stock Megatron-Core takes the mean over the
    real tokens of each shard (TP under sequence parallelism, CP), and then the mean of these means.
    With padding the shards have different numbers of real tokens, so that is not the mean over all
    tokens."""
    coefficient = self.config.moe_z_loss_coeff
    if coefficient is None or not self.training or not torch.is_grad_enabled():
        return logits
    assert not self.calculate_per_token_loss, "micro-batches are counted, not tokens"
    # bfloat16 holds whole numbers up to 256 only, and `total` below counts tokens
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    squares = torch.logsumexp(wide, dim=-1).square()  # [tokens of this shard]
    real = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares)
    total = real.sum()
    torch.distributed.all_reduce(total, group=self.tp_cp_group)
    loss = coefficient * (squares * real).sum() / total.clamp(min=1)
    return moe_utils.MoEAuxLossAutoScaler.apply(logits, loss)


def _carry_context_into_recompute() -> None:
    """Run recomputation with the context variables of the forward pass.

    A checkpointed function runs again in the backward pass, between the passes of other
    micro-batches, and for GPUs in another thread. In stock Megatron-Core, the second run does not
    have the context variables of the forward pass, and routing.hooks would not know which
    micro-batch's experts to replay. (Megatron-Core's own RouterReplay relies on the order of
    micro-batches.) In FP8, Megatron-Core lets Transformer Engine recompute, which has the same
    defect."""
    native = CheckpointFunction.forward

    @functools.wraps(native)
    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        outputs = native(ctx, run_function, *args)
        ctx.run_function = _in_present_context(run_function)
        return outputs

    CheckpointFunction.forward = staticmethod(forward)
    try:
        # Megatron-Core imports the function from this module at each call.
        from transformer_engine.pytorch import distributed
    except ImportError:
        return
    te_native = distributed.checkpoint

    @functools.wraps(te_native)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return te_native(_in_present_context(function), *args, **kwargs)

    distributed.checkpoint = checkpoint


def _in_present_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with the context variables of this moment."""
    return functools.partial(contextvars.copy_context().run, function)


def _count_real_tokens_of_experts() -> None:
    """Let a router with expert biases count the real tokens of each expert. Stock Megatron-Core
    combines the padding mask [tokens] with the routing map [tokens, experts]. These shapes do not
    broadcast."""
    native = TopKRouter._apply_expert_bias

    @functools.wraps(native)
    def counted(
        self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if padding_mask is not None and padding_mask.dim() < routing_map.dim():
            padding_mask = padding_mask.unsqueeze(-1)
        native(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = counted


def _count_tokens_of_experts_exactly() -> None:
    """Let a router's buffers keep their precision, whatever dtype the weights get. A router stores
    its counts (tokens of each expert, steps) and its bias in float32. Float16Module turns them into
    bfloat16, in which 256 + 1 is 256, so counts stop growing. Then biases move the wrong way."""
    native_init, native_apply = TopKRouter.__init__, TopKRouter._apply

    @functools.wraps(native_init)
    def init(self: TopKRouter, *args: Any, **kwargs: Any) -> None:
        native_init(self, *args, **kwargs)
        if self.local_tokens_per_expert is not None:  # float32 is exact up to 2^24 only
            self.local_tokens_per_expert = self.local_tokens_per_expert.double()

    @functools.wraps(native_apply)
    def apply(self: TopKRouter, *args: Any, **kwargs: Any) -> TopKRouter:
        before = dict(self._buffers)
        native_apply(self, *args, **kwargs)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after.element_size() < buffer.element_size():
                self._buffers[name] = buffer.to(after.device)
        return self

    TopKRouter.__init__, TopKRouter._apply = init, apply


def _split_empty_extra_state() -> None:
    """Let grouped linear layers split an empty extra state. Since Transformer Engine 2.16, recipes
    without state (blockwise, MXFP8) have an empty extra state. sharded_state_dict of Megatron-Core
    0.16 looks for each expert's part in this state, and fails."""
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


def forget_router_losses() -> None:
    """Empty the process-wide record of the routers' losses. It has as many entries as the first
    model had layers, so a second model with more layers would not fit."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # since 0.19
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def _delta_nets() -> Any:
    """Return the module whose names GatedDeltaNet reads. Since 0.19 this module is inside a
    package."""
    importlib.import_module("megatron.core.ssm.gated_delta_net")
    package = "megatron.core.ssm.gated_delta_net"
    return sys.modules.get(f"{package}.common", sys.modules[package])


def _build_delta_nets_without_kernels() -> None:
    """Let GatedDeltaNet be built without the package fla. Stock Megatron-Core refuses that,
    although the parameters do not need fla. models.delta_net computes without fla."""
    _delta_nets().HAVE_FLA = True


def has_delta_rule_kernels(states: torch.Tensor, config: Any) -> bool:
    """Whether stock GatedDeltaNet can compute packed sequences of `states` by itself. That needs
    fla's kernels, which run on GPUs, and Megatron-Core 0.19."""
    module = _delta_nets()
    packs = module.__name__.endswith(".common")
    has_kernels = module.chunk_gated_delta_rule is not None and states.is_cuda
    return packs and has_kernels and not config.deterministic_mode
