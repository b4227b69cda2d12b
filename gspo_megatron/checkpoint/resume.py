"""Finds what a run starts from: the newest undamaged checkpoint in its folder, the configured
weights, or random weights.

Nothing here imports torch, so that mistakes are reported before anything is started.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.folder import CHECKPOINTS, checkpoints_at, checkpoints_in, put_back
from gspo_megatron.checkpoint.lineage import read_branch
from gspo_megatron.checkpoint.manifest import MANIFEST, damage_notes, find_damage, first_whole
from gspo_megatron.checkpoint.run_lock import LOCK_FILE, RunLock
from gspo_megatron.checkpoint.run_state import (
    BESIDE_TOKENIZER,
    MODEL_FILE,
    TOKENIZER,
    RunState,
    fingerprints,
    lora_of,
    read_config,
    read_model,
    versions,
)
from gspo_megatron.config.hub import HUB_FILE
from gspo_megatron.config.load import override
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.phases import at_step, is_border, may_change
from gspo_megatron.config.resume import find_changes
from gspo_megatron.config.stages import AnyConfig, PretrainingConfig, StageConfig
from gspo_megatron.errors import ConfigError, DataError, UserError, format_value, problem, some_of
from gspo_megatron.families import differences
from gspo_megatron.families.model_shape import WHOLE_MODEL_KEYS, checkpoint_preset, no_checkpoint
from gspo_megatron.files import folder_lacks, unused_name
from gspo_megatron.observe.metrics_files import RL

# Fields of TransformerConfig that decide which tokens are dropped. A run may set them differently
# from the checkpoint whose weights it loads.
_NEW_CHOICES = (
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)
# A message about a refused change begins with one of these keys if the change asks for weights that
# differ from the weights of the run.
_OTHER_WEIGHTS = ("model.hf_path ", "model.checkpoint_path ", "model.preset ", "data.tokenizer ")


@dataclass
class Start:
    """The checkpoint that a run resumes; all fields are empty for a new run."""

    checkpoint: Path | None = None
    state: RunState | None = None
    is_finished: bool = False
    notes: list[str] = field(default_factory=list)  # for the user
    # Whether some keys get new values at this point, by `--change` or because a phase begins.
    begins_phase: bool = False
    changed: list[str] = field(default_factory=list)  # by `--change`: one line for each key

    @property
    def next_step(self) -> int:
        """The RL step with which the run goes on: the first step that is not finished, or the last
        finished step if its evaluation is missing."""
        if self.state is None or self.state.phase != RL:
            return 1
        return self.state.step + (self.state.unevaluated is None)


def run_folder(config: AnyConfig) -> Path:
    """Return the folder that the run writes to."""
    return Path(str(config.logging.dir))


def candidates(config: AnyConfig, *, fresh: bool, lock: RunLock | None = None) -> list[Path]:
    """List the run's checkpoints, the newest first, including damaged checkpoints. Afterwards
    `lock` holds the run folder. Raises UserError if another run holds it, or if `fresh` is set and
    the folder is not empty."""
    folder = run_folder(config)
    if lock is not None:
        lock.hold(folder)
        put_back(folder / CHECKPOINTS)
    if not fresh:
        return [*checkpoints_in(folder / CHECKPOINTS).values()]
    entries = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    if any(path.name not in (LOCK_FILE, HUB_FILE) for path in entries):
        raise UserError(
            f"--fresh: {folder} is not empty; move it away, or give another logging.dir"
        )
    return []


def conclude(
    config: AnyConfig,
    chosen: Path | None,
    damage: Mapping[Path, Sequence[str]],
    command: Sequence[str] = (),
    *,
    change: bool = False,
) -> Start:
    """Return the start of a run from `chosen`, the newest undamaged checkpoint. `damage`: the
    damage of newer checkpoints. `command`: the words with which the user started the run, for
    advice that can be copied. `change`: the run may continue with new values of the keys that a
    phase may change. A branch may always begin with such new values.

    Raises UserError if all checkpoints are damaged, and ConfigError with all keys that have changed
    but must not change.
    """
    notes = damage_notes(damage)
    if chosen is None:
        if damage:
            where = run_folder(config)
            notes.append(
                f"{where}: all checkpoints of this run are damaged; repair one, or move the folder "
                "away to start again"
            )
            raise UserError("\n".join(notes))
        return Start()
    state = RunState.read(chosen)
    # If the examples of a stage cannot be read, its number of steps is unknown.
    steps = math.inf if config.training.steps is None else config.training.steps
    step = state.step if state.phase == config.phase else 0
    done = step >= steps and not state.rollouts and state.unevaluated is None
    undamaged = ", the newest undamaged checkpoint," if damage else ""
    where = f" at step {step + 1} of {steps}" if step < steps < math.inf else ""
    notes.append(f"resuming from {chosen}{undamaged}{where}")
    # A checkpoint at the border of two phases has the values of the phase that ends there. A
    # checkpoint with the responses of the next step has the values of that step.
    saved_in = at_step(config, step + 1 if state.rollouts else max(step, 1))
    branch = read_branch(run_folder(config))
    change = change or (branch is not None and chosen.name == branch.checkpoint)
    lines, changed = _changes(saved_in, chosen, state, command, change)
    # In the middle of a step, and before its evaluation, the phase of this step goes on.
    is_between = state.rollouts is None and state.unevaluated is None
    begins_phase = bool(changed) or (is_border(config, step) and is_between)
    if changed:  # saved responses depend on the old values, so the step begins again
        state = state.without_rollouts()
    return Start(chosen, state, done, [*notes, *lines], begins_phase, changed)


def preview(
    config: AnyConfig, *, fresh: bool = False, change: bool = False, command: Sequence[str] = ()
) -> Start:
    """Return the start that the ranks will find. Of files with tensors only the sizes are compared.
    With `fresh`, the run folder must be empty; `change` and `command`: see `conclude`. Raises the
    errors of `candidates` and `conclude`, and UserError if the run folder cannot be written."""
    checkpoints = candidates(config, fresh=fresh)
    chosen, damage = first_whole(checkpoints, lambda path: find_damage(path, contents=False))
    start = conclude(config, chosen, damage, command, change=change)
    lacks = None if start.is_finished else folder_lacks(run_folder(config))
    if lacks is not None:
        raise UserError(problem("logging.dir", str(config.logging.dir), lacks))
    return start


def finished_text(config: AnyConfig, state: RunState, command: Sequence[str] = ()) -> str:
    """Return the text to print about a finished run. `command`: as in `conclude`."""
    folder, training = run_folder(config), config.training
    newest = folder / CHECKPOINTS / state.position.name
    lines = [f"{folder}: finished, with {state.step} of {training.steps} steps"]
    if config.optimizer.decay == "constant":
        more = {"training.steps": 2 * state.step}
        for name in ("epochs", "tokens"):  # a stage may have these limits, too
            if limit := getattr(training, name, None):
                more[f"training.{name}"] = 2 * limit
        words = _words(command, more | _new_export(config))
        lines.append(f"to continue, raise training.steps: {words}")
    words = _words(command, _new_run(config, newest))
    lines.append(f"to train its weights in a new run: {words}")
    return "\n".join([*lines, "to start again, move the folder away"])


def _words(command: Sequence[str], overrides: Mapping[str, Any]) -> str:
    """Return a command that the user can copy. overrides: values by key, which replace those of
    the command."""
    replaced = tuple(f"{key}=" for key in overrides)
    kept = [word for word in command if not word.startswith(replaced)]
    return shlex.join([*kept, *(override(key, value) for key, value in overrides.items())])


def _new_run(config: AnyConfig, checkpoint: Path | None) -> dict[str, Any]:
    """Return the overrides that make a new run of a configuration. The new run starts from the
    weights of `checkpoint`. If this is None, it starts from the weights that the configuration
    names."""
    values: dict[str, Any] = {"logging.dir": str(unused_name(run_folder(config), "-", 2))}
    if checkpoint is not None and config.model.lora.rank:
        values["model.lora.checkpoint"] = str(checkpoint)
    elif checkpoint is not None:
        values |= {} if config.model.hf_path is None else {"model.hf_path": None}
        values["model.checkpoint_path"] = str(checkpoint)
    return values | _new_export(config)


def _new_export(config: AnyConfig) -> dict[str, Any]:
    """Return the override that a stage needs if its export folder exists already."""
    given = config.export.hf_path if isinstance(config, StageConfig) else None
    if given is None or not Path(given).exists():
        return {}
    return {"export.hf_path": str(unused_name(Path(given), "-", 2))}


def check_given(config: AnyConfig, vocab_size: int) -> None:
    """Check the checkpoint of model.checkpoint_path without reading its tensors. Raises
    UserError."""
    checkpoint = fitting_checkpoint(config, vocab_size)
    refuse_damage(checkpoint, find_damage(checkpoint, contents=False, only=is_of_model))


def fitting_checkpoint(config: AnyConfig, vocab_size: int) -> Path:
    """Return the checkpoint of model.checkpoint_path. Raises DataError if the path has no
    checkpoint or the checkpoint holds only adapters, and ConfigError if the checkpoint's model
    differs from the configured model."""
    checkpoint = given_checkpoint(str(config.model.checkpoint_path))
    if lora_of(read_model(checkpoint), checkpoint) is not None:
        path = str(config.model.checkpoint_path)
        base = (read_model(checkpoint)["base"] or {}).get("path", "their base")
        wrong = f"holds only adapters; give it as model.lora.checkpoint, and {base} as "
        wrong += "model.hf_path or model.checkpoint_path"
        raise DataError(problem("model.checkpoint_path", path, wrong))
    weights_fit(checkpoint, config, vocab_size)
    return checkpoint


def given_adapters(path: str, section: LoraSection, base: Mapping[str, str] | None) -> Path:
    """Return the checkpoint of model.lora.checkpoint, which may name a run folder. Raises DataError
    unless its adapters have the settings of `section` and were trained on `base`."""
    checkpoint = given_checkpoint(path, "model.lora.checkpoint")
    adapters = lora_of(read_model(checkpoint), checkpoint)
    if adapters is None:
        wrong = "holds a whole model and no adapters; allowed: a checkpoint of adapters, or give "
        wrong += "it as model.checkpoint_path"
        raise DataError(problem("model.lora.checkpoint", path, wrong))
    if lines := section.differences(adapters):
        raise DataError("\n".join(f"{checkpoint}: {line}" for line in lines))
    refuse_other_base(checkpoint, base)
    return checkpoint


def refuse_other_base(checkpoint: Path, base: Mapping[str, str] | None) -> None:
    """Raise DataError if a checkpoint's adapters were trained on another model than `base`."""
    trained_on = read_model(checkpoint).get("base")
    if trained_on is None or base is None or trained_on["fingerprint"] == base["fingerprint"]:
        return
    raise DataError(
        f"{checkpoint}: its adapters were trained on {trained_on['path']}, whose weights at that "
        f"time differ from those of {base['path']} now; allowed: the model of that time, unchanged"
    )


def given_checkpoint(path: str, key: str = "model.checkpoint_path") -> Path:
    """Return the newest complete checkpoint at the path of `key`, which may be a run folder. Raises
    DataError."""
    checkpoints = checkpoints_at(Path(path))
    for checkpoint in checkpoints:
        if (checkpoint / MANIFEST).is_file():
            return checkpoint
    if checkpoints:
        wrong = f"all checkpoints in it are damaged: none has a {MANIFEST}; allowed: a whole one"
        raise DataError(problem(key, path, wrong))
    raise DataError(no_checkpoint(path).replace("model.checkpoint_path", key, 1))


def weights_fit(checkpoint: Path, config: AnyConfig, vocab_size: int | None = None) -> None:
    """Raise ConfigError with all differences between a checkpoint's model and the configured model:
    sizes, and other settings that change the results. Without `vocab_size`, the vocabulary is not
    compared."""
    document = read_model(checkpoint)
    shape, theirs = config.resolved_model(), checkpoint_preset(document)
    if theirs.scores and not shape.scores:
        wrong = "holds a preference model, which gives scores and no tokens"
        line = problem("model.checkpoint_path", str(checkpoint), wrong)
        raise ConfigError([f"{line}; allowed: a checkpoint of a language model"])
    stored_shape, stored_size = document["shape"], document["vocab_size"]
    expected = {**shape.megatron, **vars(shape), "vocab_size": vocab_size or stored_size}
    known = {**stored_shape["megatron"], **stored_shape, "vocab_size": stored_size}
    # A preference model may start from the weights of a language model. Then its head is new.
    not_compared = ("max_sequence_length", "scores")
    names = [name for name in stored_shape if name in expected and name not in not_compared]
    different = [name for name in names if name != "megatron" and expected[name] != known[name]]
    different += [
        name for name in differences(shape, theirs) if name not in (*different, *_NEW_CHOICES)
    ]
    if different:
        own = (*WHOLE_MODEL_KEYS, "joint_qk_norm")
        keys = {name: f"model.{'' if name in own else 'megatron.'}{name}" for name in different}
        raise ConfigError(
            [
                problem(
                    key, expected.get(name), f"{checkpoint} has {format_value(known.get(name))}"
                )
                for name, key in keys.items()
            ]
        )


def refuse_damage(folder: Path, damage: Sequence[str], *advice: str) -> None:
    """Raise DataError if a checkpoint, or a saved step, is damaged. advice: further lines."""
    if damage:
        raise DataError("\n".join(f"{folder}: {line}" for line in (*some_of(damage), *advice)))


def is_of_model(name: str) -> bool:
    """Whether a file of a checkpoint is needed to load its weights."""
    return name.startswith("model/") or name == MODEL_FILE


def _can_take(config: AnyConfig, checkpoint: Path) -> bool:
    """Whether a run of this configuration can begin with the weights of a checkpoint."""
    if config.model.lora.rank:
        return False
    update = {"hf_path": None, "checkpoint_path": str(checkpoint)}
    model = config.model.model_copy(update=update)
    try:
        weights_fit(checkpoint, config.model_copy(update={"model": model}))
    except UserError:
        return False
    return True


def _changes(
    config: AnyConfig, checkpoint: Path, state: RunState, command: Sequence[str], change: bool
) -> tuple[list[str], list[str]]:
    """Return notes on allowed changes of keys and versions, and the changes that `change` allows.
    Raises ConfigError with all changes that are refused."""
    config.require_whole()
    now, before = fingerprints(config), read_config(checkpoint)
    same = {key: now[key] == known for key, known in state.fingerprints.items() if key in now}
    if not same.pop(BESIDE_TOKENIZER, True):
        same[TOKENIZER] = False
    changes = find_changes(before, config, same, change=change)
    if changes.refused:
        others = any(line.startswith(_OTHER_WEIGHTS) for line in changes.refused)
        on_these = not others and _can_take(config, checkpoint)
        words = _words(command, _new_run(config, checkpoint if on_these else None))
        advice = f"start a new run{' on its weights' if on_these else ''}: {words}"
        keys = [line.partition(" = ")[0] for line in changes.refused]
        has_option = not isinstance(config, PretrainingConfig)
        if has_option and all(":" not in key and may_change(key) for key in keys):
            words = _words([*command, "--change"], {})
            advice = f"go on with the new values from step {state.step + 1}: {words}\nor {advice}"
        raise ConfigError(
            [
                *changes.refused,
                f"{run_folder(config)}: holds a run with other values of these keys; set them back "
                f"to resume it, or {advice}",
            ]
        )
    installed = versions()
    warned = changes.warned + [
        f"{package} {known} -> {installed[package]}"
        for package, known in state.versions.items()
        if installed.get(package, known) != known
    ]
    notes = (
        ("without effect on what is learned", changes.allowed),
        ("and may change results", warned),
    )
    texts = [f"changed since then, {what}: {'; '.join(lines)}" for what, lines in notes if lines]
    if changes.asked:
        texts.append(f"changed from step {state.step + 1} on: {'; '.join(changes.asked)}")
    return texts, changes.asked
