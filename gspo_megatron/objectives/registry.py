"""Names of objectives, with the parameters of each and their defaults."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gspo_megatron.errors import ConfigError
from gspo_megatron.types import LossInputs, LossOutputs

RatioLevel = Literal["sequence", "token"]

_OBJECTIVES: dict[str, Objective] = {}


@dataclass(frozen=True)
class Objective:
    """A registered objective: call it with a LossInputs and, by name, what differs from its preset.

    `ratio_level` says what its clip range applies to, and so of which magnitude it has to be: a
    "sequence" ratio is a geometric mean over the tokens and stays within 1e-3 or so of 1.
    """

    name: str
    function: Callable[..., LossOutputs]
    ratio_level: RatioLevel
    defaults: Mapping[str, float]  # every parameter that the function takes

    def parameters(self, **overrides: float | None) -> dict[str, float]:
        """The defaults with `overrides` on top, where None stands for the default.

        Raises ConfigError for an override, other than None, that this objective would not read.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        problems = [
            f"objective.{name} = {value}: {self.name} does not use it; it takes "
            f"{', '.join(self.defaults)}"
            for name, value in given.items()
            if name not in self.defaults
        ]
        if problems:
            raise ConfigError(problems)
        return {**self.defaults, **given}

    def __call__(self, inputs: LossInputs, **overrides: float | None) -> LossOutputs:
        return self.function(inputs, **self.parameters(**overrides))


def register(
    name: str, *, ratio_level: RatioLevel, **defaults: float
) -> Callable[[Callable[..., LossOutputs]], Callable[..., LossOutputs]]:
    """Decorator: register `function(inputs, *, **defaults)` under `name`."""

    def decorate(function: Callable[..., LossOutputs]) -> Callable[..., LossOutputs]:
        assert name not in _OBJECTIVES, f"two objectives are named {name}"
        _OBJECTIVES[name] = Objective(name, function, ratio_level, MappingProxyType(defaults))
        return function

    return decorate


def objective_names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_OBJECTIVES)


def get_objective(name: str) -> Objective:
    """The objective registered under `name`; ConfigError, naming the nearest, if there is none."""
    if name not in _OBJECTIVES:
        nearest = difflib.get_close_matches(name, _OBJECTIVES)
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        legal = ", ".join(objective_names())
        raise ConfigError([f"objective.name = {name}: no such objective; {hint}one of {legal}"])
    return _OBJECTIVES[name]
