"""Phases of a run. From its first step on, a phase uses other values of some keys. Weights,
optimizer state and step count continue unchanged.

A phase keeps the values of the phase before it. So if a run changes its prompts and then its
response length, the configuration names each change only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from gspo_megatron.config.hub import with_folders
from gspo_megatron.config.objectives import may_have_reference
from gspo_megatron.config.renamed import RENAMED
from gspo_megatron.config.section import Positive, Section, harmless, shapes, value_below

PHASES = (
    "phases of the run: each has until_step, reference (keep or renew) and sections with the keys "
    "that it changes; other keys keep the value of the phase before; docs/campaigns.md"
)
# Keys of changeable sections that no phase may change.
FIXED_KEYS = frozenset(
    ("data.tokenizer", "rollout.engine", "rollout.kv_after_update", "optimizer.megatron")
)


class Phase(Section):
    """One phase: its end, and the values that it changes, by section."""

    until_step: Positive | None = shapes(
        None, "the last step of the phase; null, only for the last phase: training.steps"
    )
    reference: Literal["keep", "renew"] = shapes(
        "keep",
        "reference policy of objective.kl: that of the phase before (keep), or the weights with "
        "which this phase begins (renew)",
    )
    data: dict[str, Any] = harmless({}, "changed keys of the section data")
    rollout: dict[str, Any] = harmless({}, "changed keys of the section rollout")
    environment: dict[str, Any] = harmless({}, "changed keys of the section environment")
    reward: dict[str, Any] = harmless({}, "changed keys of the section reward")
    objective: dict[str, Any] = harmless({}, "changed keys of the section objective")
    optimizer: dict[str, Any] = harmless({}, "changed keys of the section optimizer")
    evaluation: dict[str, Any] = harmless({}, "changed keys of the section evaluation")

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the changed keys and values, by section."""
        return {name: value for name in SECTIONS if (value := getattr(self, name))}


SECTIONS = ("data", "rollout", "environment", "reward", "objective", "optimizer", "evaluation")


def may_change(key: str) -> bool:
    """Whether a phase, or `--change`, may set a key to another value."""
    is_fixed = any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED_KEYS)
    return key.partition(".")[0] in SECTIONS and not is_fixed


def phases_of(config: Any) -> list[Phase]:
    """Return the phases of a run of any stage. Only RL runs can have phases."""
    return getattr(config.training, "phases", None) or []


def phase_number(config: Any, step: int) -> int:
    """Return the index of the phase that a step belongs to."""
    ends = [phase.until_step for phase in phases_of(config)]
    return next((i for i, end in enumerate(ends) if end is None or step <= end), len(ends) - 1)


def phase_end(config: Any, step: int) -> int:
    """Return the last step of the phase that `step` belongs to."""
    phases = phases_of(config)
    end = phases[phase_number(config, step)].until_step if phases else None
    return config.training.steps if end is None else min(end, config.training.steps)


def is_border(config: Any, step: int) -> bool:
    """Whether another phase begins after a step."""
    number = phase_number(config, step)
    return step > 0 and number < phase_number(config, step + 1)


def values_of_phase(values: Mapping[str, Any], phases: list[Phase]) -> dict[str, Any]:
    """Return the values of a run in the last of `phases`, as plain data. values: the values of the
    run's configuration, which the phases change one after the other."""
    result = {**values}
    for phase in phases:
        for section, changed in phase.values().items():
            result[section] = _merged(result.get(section) or {}, changed)
    return result


def at_step(config: Any, step: int) -> Any:
    """Return the configuration with the values of the phase that a step belongs to. The phases must
    have been checked before, because in this function a value that is not allowed raises an error
    without advice."""
    phases = phases_of(config)
    if not phases:
        return config
    current = phases[: phase_number(config, step) + 1]
    if not any(phase.values() for phase in current):
        return config
    # plain data has names of the Hub in place of folders, and a phase may name more of them
    values, _ = with_folders(values_of_phase(config.model_dump(), current), "")
    return type(config).model_validate(values)


def hidden_overrides(config: Any, overrides: Sequence[str], step: int) -> list[str]:
    """Return a line for each override ("section.key=value") that has no effect at a step, because a
    phase sets the same key to another value."""
    own, of_phase = config.model_dump(), at_step(config, step).model_dump()
    lines = []
    for override in overrides:
        name = override.partition("=")[0].strip()
        key = RENAMED.get(name, name)
        if value_below(own, key.split(".")) != value_below(of_phase, key.split(".")):
            lines.append(
                f"{key}: training.phases sets another value for step {step}; change it there, or "
                "add training.phases=[]"
            )
    return lines


def phase_configs(config: Any) -> list[Any]:
    """Return one configuration for each phase, with the values of this phase. For a run without
    phases, the list has only the configuration itself."""
    ends = [phase.until_step for phase in phases_of(config)[:-1]]
    return [at_step(config, (end or 0) + 1) for end in (0, *ends)]


def reference_step(config: Any, step: int) -> int:
    """Return the step after which the policy was copied as the reference policy of `step`. The
    phases up to `step` may contain some with `reference: renew`. The result is the last step before
    the newest such phase, or 0 if there is no such phase."""
    phases = phases_of(config)
    number = phase_number(config, step)
    renewed = [i for i in range(1, number + 1) if phases[i].reference == "renew"]
    return phases[renewed[-1] - 1].until_step or 0 if renewed else 0


def later_phases_need_reference(config: Any, step: int) -> bool:
    """Return whether a phase after the phase of `step` may need the reference policy of `step`."""
    since, number = reference_step(config, step), phase_number(config, step)
    ends = [phase.until_step for phase in phases_of(config)[number:]]
    begins = [end + 1 for end in ends if end is not None and end < config.training.steps]
    return any(
        may_have_reference(at_step(config, first).objective)
        for first in begins
        if reference_step(config, first) == since
    )


def phase_problems(config: Any) -> Iterator[str]:
    """Yield a line for each mistake in the order of phases and in the names of their keys."""
    phases, steps, before = phases_of(config), config.training.steps, 0
    for i, phase in enumerate(phases):
        key, is_last = f"training.phases[{i}].until_step", i == len(phases) - 1
        end = phase.until_step
        if end is None and not is_last:
            yield f"{key} = null: another phase follows; allowed: the last step of this phase"
        elif end is not None and end <= before:
            yield f"{key} = {end}: not after step {before}, where the phase before it ends"
        elif end is not None and is_last and end != steps:
            wrong = f"the run ends at training.steps = {steps}; allowed: {steps}, or leave it out"
            yield f"{key} = {end}: {wrong}"
        elif end is not None and not is_last and end >= steps:
            yield f"{key} = {end}: nothing is left of training.steps = {steps} for the next phase"
        before = before if end is None else max(end, before)
        for section, changed in phase.values().items():
            for name in changed:
                if not may_change(f"{section}.{name}"):
                    place = f"training.phases[{i}].{section}.{name}"
                    yield f"{place}: stays the same for a whole run; set {section}.{name}"
    if len(phases) > 1 and config.checkpoint.interval == 0:
        yield "checkpoint.interval = 0: a phase begins with a checkpoint; allowed: from 1"
    if phases and config.model.lora.rank and any(phase.reference == "renew" for phase in phases):
        yield (
            "training.phases: reference = 'renew': with model.lora the reference is the model "
            "without its adapters; allowed: keep"
        )
    if phases and phases[0].reference == "renew":
        yield (
            "training.phases[0].reference = 'renew': the first phase begins with the run's own "
            "reference; allowed: keep"
        )


def _merged(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `before` with the changed values. Sections inside a section are merged, too."""
    result = {**before}
    for key, value in changed.items():
        inner = result.get(key)
        is_section = isinstance(value, Mapping) and isinstance(inner, Mapping)
        if is_section and not key.endswith("options"):
            result[key] = _merged(inner, value)
        else:
            result[key] = value
    return result
