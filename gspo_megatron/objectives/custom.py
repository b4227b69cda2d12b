"""Objectives that the user writes as a function: `objective.import_path`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.plugins import load_function, option_problems, without_exit
from gspo_megatron.types import LossInputs, LossOutputs


def custom_objective(
    import_path: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Callable[[LossInputs], LossOutputs]]:
    """Return the custom function itself, and an objective that calls it with its options and checks
    its results."""
    key = "objective.import_path"
    function = load_function(key, import_path)
    problems = option_problems("objective", import_path, function, options)
    if problems:
        raise ConfigError(problems)

    def objective(inputs: LossInputs) -> LossOutputs:
        with without_exit(f"{key} = {import_path}"):
            outputs = function(inputs, **options)
        if not isinstance(outputs, LossOutputs):
            raise UserError(
                f"{key} = {import_path}: returned {type(outputs).__name__}, not LossOutputs"
            )
        if outputs.loss.dim() != 0:
            shape = tuple(outputs.loss.shape)
            raise UserError(f"{key} = {import_path}: the loss has shape {shape}; allowed: a scalar")
        return outputs

    return function, objective
