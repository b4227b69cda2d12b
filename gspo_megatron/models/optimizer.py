"""Megatron's distributed optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.models.build import Policy


@dataclass(frozen=True)
class Schedule:
    """A learning-rate curve over optimizer updates."""

    peak: float
    floor: float
    warmup: int
    total: int
    decay: str  # constant | linear | cosine | wsd: constant, then down in the last `wsd_steps`
    wsd_steps: int | None = None
    wsd_decay: str | None = None  # linear | cosine | exponential | minus_sqrt


@dataclass
class Trainer:
    """Optimizer and schedule of a policy, and what Megatron's schedules must know of them."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def update(self) -> tuple[float, float]:
        """Apply the accumulated gradients. Returns the gradient norm before clipping, and the
        learning rate that was used. Raises FloatingPointError where the norm is not finite: the
        weights are lost then, and going on would only bury the cause."""
        used = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; lower the learning rate?")
        self.scheduler.step(increment=1)
        return float(grad_norm), float(used)


def build_trainer(policy: Policy, section: OptimizerSection, schedule: Schedule) -> Trainer:
    """The distributed optimizer over a policy's chunks, with DDP's view of how it is sharded."""
    precision = policy.config.params_dtype
    ddp = policy.chunks[0].ddp_config
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": schedule.peak,
            "min_lr": schedule.floor,
            "weight_decay": section.weight_decay,
            "adam_beta1": section.beta1,
            "adam_beta2": section.beta2,
            "adam_eps": section.epsilon,
            "clip_grad": section.clip_grad,
            "bf16": precision is torch.bfloat16,
            "params_dtype": precision,
            "use_distributed_optimizer": ddp.use_distributed_optimizer,
            "overlap_param_gather": ddp.overlap_param_gather,
            **section.megatron,
        }
    )
    optimizer = get_megatron_optimizer(
        config=config, model_chunks=policy.chunks, use_gloo_process_groups=False
    )
    scheduler = OptimizerParamScheduler(
        optimizer=optimizer,
        init_lr=0.0 if schedule.warmup else schedule.peak,
        max_lr=schedule.peak,
        min_lr=min(schedule.floor, schedule.peak),
        lr_warmup_steps=schedule.warmup,
        lr_decay_steps=max(schedule.total, schedule.warmup + 1),
        lr_decay_style="WSD" if schedule.decay == "wsd" else schedule.decay,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_steps,
        lr_wsd_decay_style=schedule.wsd_decay,
    )
    policy.config.grad_scale_func = optimizer.scale_loss
    policy.config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        # Gradients go on their way in the last micro-batch's backward pass. Without this, DDP would
        # wait for as many passes as the first update had, and updates differ in their number.
        silent = [chunk.no_sync for chunk in policy.chunks]
        policy.config.no_sync_func = silent if len(silent) > 1 else silent[0]
    return Trainer(optimizer, scheduler)


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Clear DDP's gradient buffers and the optimizer's."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
