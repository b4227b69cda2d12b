"""The objective of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gspo_megatron.config.objectives import resolve_objective
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives.advantages import build_advantages
from gspo_megatron.objectives.custom import custom_objective
from gspo_megatron.objectives.surrogate import Surrogate
from gspo_megatron.types import LossInputs, LossOutputs


@dataclass(frozen=True)
class Objective:
    """What the trainer calls with each micro-batch, and what it has to provide for it."""

    name: str
    function: Callable[[LossInputs], LossOutputs]
    advantages: Callable[[Tensor, Tensor], Tensor]  # rewards, group_index [num_sequences] each
    complete: Callable[[dict[str, float]], dict[str, float]]  # of a step's reduced metrics
    needs_reference: bool
    needs_entropy_gradient: bool

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return self.function(inputs)


def build_objective(section: ObjectiveSection, max_response_tokens: int) -> Objective:
    """The objective of a checked configuration; a UserError where an own one cannot be loaded."""
    advantages = build_advantages(section)
    if section.import_path is not None:
        function, checked = custom_objective(section.import_path, section.options)
        return Objective(
            name=section.import_path,
            function=checked,
            advantages=advantages,
            complete=dict,
            # a divergence in the reward needs one whatever the function says of itself
            needs_reference=section.kl != "none" or getattr(function, "needs_reference", False),
            needs_entropy_gradient=getattr(function, "needs_entropy_gradient", False),
        )
    surrogate = Surrogate(
        recipe=resolve_objective(section),
        max_response_tokens=max_response_tokens,
        off_policy_mask=section.off_policy_mask,
        kl=section.kl if section.kl_in == "loss" else "none",
        kl_coefficient=section.kl_coefficient or 0.0,
        entropy_coefficient=section.entropy_coefficient,
    )
    return Objective(
        name=section.name,
        function=surrogate,
        advantages=advantages,
        complete=surrogate.complete,
        needs_reference=section.kl != "none",
        needs_entropy_gradient=section.entropy_coefficient > 0,
    )
