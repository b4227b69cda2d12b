"""Compares a configuration with the configuration of the run that it resumes.

Every key has a resume class (config/section.py), which says whether it may change. A change that
would make the second half of the run another experiment is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from gspo_megatron.config.phases import may_change
from gspo_megatron.config.renamed import with_new_names
from gspo_megatron.config.schema import Config
from gspo_megatron.config.section import key_above, keys_of, resume_of
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import format_value, problem

# Fields of `model.megatron` that change only where and how fast something is computed; results
# differ at most by rounding.
_HARMLESS_FIELDS = """
    moe_token_dispatcher_type moe_permute_fusion recompute_granularity recompute_method
    recompute_num_layers recompute_modules distribute_saved_activations cpu_offloading
    cpu_offloading_num_layers tp_comm_overlap overlap_p2p_comm batch_p2p_comm
    deallocate_pipeline_outputs barrier_with_L1_time num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""


@dataclass
class Changes:
    """The differences from a checkpoint's configuration, one line for each key."""

    refused: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)  # without effect on what is learned
    warned: list[str] = field(default_factory=list)  # allowed, but may change results
    asked: list[str] = field(default_factory=list)  # refused without `--change`


def find_changes(
    before: Mapping[str, Any],
    config: AnyConfig,
    same_contents: Mapping[str, bool],
    *,
    change: bool = False,
) -> Changes:
    """Compare a configuration with the one that a run was started with. change: do not refuse
    changes of keys that a phase may change.

    before: config.yaml of a checkpoint as plain data. same_contents: for each key that names an
    input file or a function in both configurations, whether its contents are still the same as at
    the start of the run.
    """
    before, _ = with_new_names(before)
    then, now = dict(_leaves(before)), dict(_leaves(config.model_dump()))
    keys, changes = keys_of(type(config)), Changes()
    for key in sorted({*then, *now, *same_contents}):
        if key.startswith(_GONE):
            continue
        top = key_above(key, keys)
        if top is None:
            changes.refused.append(f"{key}: was {format_value(then.get(key))} and is no key now")
            continue
        # Versions of this package without this key behaved as if the key had its default.
        fallback = keys[top].default if key == top else None
        old, new = then.get(key, fallback), now.get(key, fallback)
        resume = _class_of(key, keys[top], (old, new), config)
        same = same_contents.get(key)
        changed = old != new and (key, old, new) != _RENAMED_PRESET
        if changed or (same is False and resume in ("contents", "shown", "code")):
            decay = config.optimizer.decay
            where, line = _compare(key, resume, old, new, same, decay)
            if where == "refused" and change and may_change(key):
                value = f"{format_value(old)} -> {format_value(new)}"
                where, line = "asked", f"{key}: {'its contents' if old == new else value}"
            getattr(changes, where).append(line)
    return changes


def differences(before: AnyConfig, now: AnyConfig) -> list[str]:
    """Return a line for each key whose values differ."""
    then, values = dict(_leaves(before.model_dump())), dict(_leaves(now.model_dump()))
    return [
        f"{key}: {format_value(then.get(key))} -> {format_value(values.get(key))}"
        for key in sorted({*then, *values})
        if then.get(key) != values.get(key)
    ]


def decides_rollouts(config: Config) -> dict[str, Any]:
    """Return, by dotted key, the values that decide the responses and rewards of all steps. The
    objective and the optimizer decide the weights that generate the responses.

    The contents of input files decide too, but are not included. The answers of a teacher or a
    reward model behind a URL are stored with the rewards, so the result also says whether there are
    such answers.
    """
    keys = keys_of(type(config))
    values: dict[str, Any] = {
        key: value
        for key, value in _leaves(config.model_dump(mode="json"))
        if (top := key_above(key, keys)) is not None
        and resume_of(keys[top]) in ("shapes", "code")
        and not _ADDRESS.fullmatch(key)
        and not _is_harmless_field(key)
    }
    teachers = config.objective.distillation.named.items()
    values["objective.distillation"] = {name: each.url is not None for name, each in teachers}
    values["reward.model"] = config.reward.model.url is not None
    return values


# Keys of earlier versions that had an effect only before the first RL step.
_GONE = ("training.warm_start.",)
# The address of a teacher or a reward model. It may change, but not from or to null.
_ADDRESS = re.compile(r"(objective\.distillation\.(teachers\.[^.]+\.)?|reward\.model\.)url")
# The default preset gives way to weights that are named when a run resumes. The key of the weights
# has a line of its own. (Earlier versions wrote the preset beside named weights, too.)
_RENAMED_PRESET = ("model.preset", "tiny", None)


def _class_of(key: str, info: FieldInfo, values: tuple[Any, Any], config: AnyConfig) -> str:
    """Return the resume class of a changed key. It may depend on the values and on other keys."""
    if _ADDRESS.fullmatch(key):
        return "shapes" if None in values else "harmless"
    if key == "evaluation.correct_at" and isinstance(config, Config):
        selection = config.data.selection  # it reads this key if it has none of its own
        return "shapes" if selection.is_on and selection.correct_at is None else resume_of(info)
    return resume_of(info)


def _compare(
    key: str, resume: str, old: Any, new: Any, same: bool | None, decay: str
) -> tuple[str, str]:
    """Return the name of the list in Changes that a changed key belongs to, and the key's line."""
    was, renamed = f"was {format_value(old)}", f"{key}: {format_value(old)} -> {format_value(new)}"
    if resume in ("contents", "shown"):
        if same:
            return "allowed", f"{renamed}, with the same contents"
        if resume == "shown":
            return "allowed", renamed if old != new else f"{key}: its contents"
        if old != new:
            return "refused", problem(key, new, f"{was}, of other contents")
        return "refused", problem(key, new, "its contents are not what they were")
    if resume == "code" and old == new:
        return "warned", f"{key}: the code of {format_value(new)}"
    harmless = resume == "harmless" or _is_harmless_field(key)
    if harmless or (resume == "steps" and decay == "constant"):
        return "allowed", renamed
    ends = f", and optimizer.decay = {decay} ends there" if resume == "steps" else ""
    return "refused", problem(key, new, f"{was}{ends}")


def _is_harmless_field(key: str) -> bool:
    return key.rpartition(".")[2] in _HARMLESS_FIELDS.split()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values.

    In a dict of Megatron's fields each field has its own key. A dict that the user defines
    (`options`, `chat_template_options`) is one value.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not name.endswith("options"):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
