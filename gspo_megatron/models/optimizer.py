"""Megatron's distributed optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.lora import sum_expert_gradients
from gspo_megatron.models.transformer_config import refusals_told
from gspo_megatron.platform.cpu import faster


@dataclass(frozen=True)
class Schedule:
    """A learning-rate curve over optimizer updates. It rises for `warmup` updates from peak /
    warmup to the peak, then decays to `floor` at update number `total` (counted from 0)."""

    peak: float
    floor: float
    warmup: int
    total: int
    decay: str  # constant | linear | cosine | wsd: constant, then down in the last `wsd_steps`
    wsd_steps: int | None = None
    wsd_decay: str | None = None  # linear | cosine | exponential | minus_sqrt

    @classmethod
    def of(cls, section: OptimizerSection, steps: int, updates_per_step: int = 1) -> Schedule:
        """The schedule of a run. The configuration counts steps, the schedule optimizer updates."""
        return cls(
            peak=section.learning_rate,
            floor=section.min_learning_rate,
            warmup=section.warmup_steps * updates_per_step,
            total=steps * updates_per_step,
            decay=section.decay,
            # Only pre-training and fine-tuning have these keys. Their steps have one update.
            wsd_steps=getattr(section, "wsd_steps", None),
            wsd_decay=getattr(section, "wsd_decay", None),
        )


class WarmUpFromFirstUpdate(OptimizerParamScheduler):
    """Megatron-Core's schedule with another warm-up. The stock schedule has a learning rate of 0 in
    the first update."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of update number `self.num_steps` (counted from 0)."""
        if self.num_steps < self.lr_warmup_steps:
            peak = param_group.get("max_lr", self.max_lr)
            return peak * (self.num_steps + 1) / self.lr_warmup_steps
        return super().get_lr(param_group)


@dataclass
class Trainer:
    """Optimizer and schedule of a policy."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def update(self) -> tuple[float, float]:
        """Apply the accumulated gradients. Returns the gradient norm before clipping, and the
        learning rate of the update. Raises FloatingPointError if the norm is not finite: the
        weights are then lost, and later errors would hide the cause."""
        used = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}; lower the learning rate?")
        self.scheduler.step(increment=1)
        faster.return_free_memory()
        return float(grad_norm), float(used)


def build_trainer(policy: Policy, section: OptimizerSection, schedule: Schedule) -> Trainer:
    """The distributed optimizer over a policy's chunks, and its schedule."""
    precision = policy.config.params_dtype
    ddp = policy.chunks[0].ddp_config
    with refusals_told("optimizer.megatron"):
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
    # The biases of experts have two or three axes here, so Megatron-Core takes them for matrices.
    biases = ParamKey(name=("*.experts.bias1", "*.experts.bias2"))
    overrides = get_standard_config_overrides(config=config)
    optimizer = get_megatron_optimizer(
        config=config,
        model_chunks=policy.chunks,
        config_overrides={**overrides, biases: ParamGroupOverride(wd_mult=0.0)},
        use_gloo_process_groups=False,
    )
    _fuse_on_cpu(optimizer)
    scheduler = WarmUpFromFirstUpdate(
        optimizer=optimizer,
        init_lr=0.0,
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
    policy.config.finalize_model_grads_func = _finalize_gradients
    if ddp.overlap_grad_reduce:
        # DDP reduces gradients during the backward pass of the last micro-batch. Without no_sync,
        # DDP would count the backward passes of the first update and expect the same number in
        # later updates. But the number of micro-batches differs between updates.
        silent = [chunk.no_sync for chunk in policy.chunks]
        policy.config.no_sync_func = silent if len(silent) > 1 else silent[0]
    return Trainer(optimizer, scheduler)


def _finalize_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Sum the gradients over the ranks. They are not divided by a number of tokens here: the loss
    has its denominators already."""
    finalize_model_grads(model, None, **options)
    sum_expert_gradients(model)


def _fuse_on_cpu(optimizer: MegatronOptimizer) -> None:
    """Let torch's Adam update all parameters by one fused operation. With torch's default, which
    Megatron-Core keeps, Adam loops over the parameters in Python on a CPU."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                if all(map(faster.applies_to, group["params"])):
                    group["fused"] = True  # False would turn off torch's default on a GPU


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Clear DDP's gradient buffers and the optimizer's."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
