"""Renamed keys. The old name of such a key still works, and warns once.

A key is a contract: configuration files outside of the repository use it. So a renamed key keeps
its old name as an alias, in files, in overrides and in the phases of a run. A checkpoint or run
folder that an earlier version wrote may also have the old name; reading it does not warn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_megatron.config.beside import tell_once
from gspo_megatron.config.section import value_below
from gspo_megatron.errors import problem

RENAMED = {
    "training.dump_batches": "training.keep_step_inputs",
    "training.idle_restarts": "training.max_restarts_without_progress",
    "rollout.vllm.update_seconds": "rollout.vllm.weight_update_timeout_seconds",
    "rollout.vllm.silence_seconds": "rollout.vllm.stall_timeout_seconds",
}


def with_new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a configuration with the new names of keys, also in its phases.

    Also returns an error line for each key that is set by its old and by its new name. The caller's
    values do not change.
    """
    result, problems = _renamed_in(values, "")
    phases = value_below(result, ("training", "phases"))
    if isinstance(phases, list):
        renamed = []
        for number, phase in enumerate(phases):
            if isinstance(phase, Mapping):
                phase, wrong = _renamed_in(phase, f"training.phases[{number}].")
                problems += wrong
            renamed.append(phase)
        result["training"] = {**result["training"], "phases": renamed}
    return result, problems


def _renamed_in(values: Mapping[str, Any], above: str) -> tuple[dict[str, Any], list[str]]:
    result, problems = dict(values), []
    for old, new in RENAMED.items():
        *path, old_name = old.split(".")
        if not _has(value_below(result, path), old_name):
            continue
        node = result
        for part in path:  # copies, because the caller's values must not change
            node[part] = dict(node[part])
            node = node[part]
        value, new_name = node.pop(old_name), new.rpartition(".")[2]
        if new_name in node:
            problems.append(
                problem(f"{above}{old}", value, f"its new name {new} is set, too; keep that")
            )
        node.setdefault(new_name, value)
    return result, problems


def _has(section: Any, name: str) -> bool:
    return isinstance(section, Mapping) and name in section


def warn_of_old_names(values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Print, once in a run, a line for each old name in a user's file or overrides."""
    phases = value_below(values, ("training", "phases"))
    places = [values, *(phases if isinstance(phases, list) else ())]
    overridden = {override.partition("=")[0].strip() for override in overrides}
    for old, new in RENAMED.items():
        *path, name = old.split(".")
        if old in overridden or any(_has(value_below(place, path), name) for place in places):
            tell_once(f"{old} is now called {new}; the old name still works")
