"""Worker processes that call a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError
from gspo_megatron.process.worker_process import Function, Job
from gspo_megatron.process.workers import Workers
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rewards.values import shorten


def reward_workers(reward: Reward, section: RewardSection, count: int, slots: int) -> Workers:
    """Return `count` workers for a configured reward; for `slots` see Workers."""
    job = Job(
        name=f"reward {section.import_path or section.name!r}",
        load=_load,
        arguments=(section.name, section.import_path, dict(section.options)),
        is_async=reward.is_async,
        timeout_seconds=section.timeout_seconds,
        memory_bytes=section.memory_mb << 20,
        timed_out=f"took longer than reward.timeout_seconds = {section.timeout_seconds:g}",
        memory_limit=f"reward.memory_mb = {section.memory_mb}",
        error=RewardError,
    )
    return Workers(job, count, slots)


def _load(name: str, import_path: str | None, options: Mapping[str, Any]) -> Function:
    """Load the reward. Runs in each worker."""
    reward = get_reward(name, import_path, options)

    def unsendable(value: Any) -> RewardError:
        returned = f"{shorten(value)} of type {type(value).__name__}; a number is wanted"
        return RewardError(f"reward {reward.name!r} returned {returned}")

    return Function(reward, unsendable)
