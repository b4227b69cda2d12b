"""Custom objectives and advantages: loaded, and their results checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.plugins import load_function, option_problems
from gspo_megatron.types import LossInputs, LossOutputs


def custom_objective(
    import_path: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Callable[[LossInputs], LossOutputs]]:
    """The custom function itself, and the same with its options, whose results are checked."""
    key = "objective.import_path"
    function = load_function(key, import_path)
    problems = option_problems("objective", import_path, function, options)
    if problems:
        raise ConfigError(problems)

    def objective(inputs: LossInputs) -> LossOutputs:
        outputs = function(inputs, **options)
        if not isinstance(outputs, LossOutputs):
            raise UserError(
                f"{key} = {import_path}: returned {type(outputs).__name__}, not LossOutputs"
            )
        if outputs.loss.dim() != 0:
            shape = tuple(outputs.loss.shape)
            raise UserError(f"{key} = {import_path}: the loss has shape {shape}; legal: a scalar")
        return outputs

    return function, objective


def custom_advantages(import_path: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The custom function of (rewards, group_index), whose results are checked."""
    name = f"objective.advantage_import_path = {import_path}"
    function = load_function("objective.advantage_import_path", import_path)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ConfigError(
            [f"{name}: it has to take two arguments, rewards and group_index"]
        ) from None
    except ValueError:  # written in C: nothing to check against
        pass

    def advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
        found = function(rewards, group_index)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != tuple(rewards.shape):
            raise UserError(
                f"{name}: returned {shape}, not a tensor of shape {tuple(rewards.shape)}"
            )
        if not found.isfinite().all():
            raise UserError(f"{name}: returned numbers that are not finite")
        return found.detach().float()

    return advantages
