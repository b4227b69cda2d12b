"""What a run starts from: the newest undamaged checkpoint in its folder, given weights, or nothing.

Nothing here imports torch: mistakes are reported before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
from gspo_megatron.checkpoint.manifest import MANIFEST, damage_notes, find_damage, first_whole
from gspo_megatron.checkpoint.run_lock import LOCK_FILE
from gspo_megatron.checkpoint.run_state import (
    CONFIG_FILE,
    MODEL_FILE,
    RunState,
    fingerprints,
    read_model,
    versions,
)
from gspo_megatron.config import Config
from gspo_megatron.config.families import differences
from gspo_megatron.config.load import parse_yaml
from gspo_megatron.config.model_shape import checkpoint_preset, no_checkpoint
from gspo_megatron.config.problems import problem
from gspo_megatron.config.resume import find_changes
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.errors import ConfigError, DataError, UserError
from gspo_megatron.files import folder_lacks

# Fields of TransformerConfig that a run on given weights may change: which tokens are dropped.
_NEW_CHOICES = (
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)


@dataclass
class Start:
    """The checkpoint that a run resumes; all fields are empty for a new run."""

    checkpoint: Path | None = None
    state: RunState | None = None
    is_finished: bool = False
    notes: list[str] = field(default_factory=list)  # for the user


def run_folder(config: Config) -> Path:
    """Where the run writes."""
    return Path(str(config.logging.dir))


def candidates(config: Config, *, fresh: bool) -> list[Path]:
    """The run's checkpoints, the newest first, damaged ones too. Raises UserError if `fresh` is set
    and the folder is not empty."""
    folder = run_folder(config)
    if not fresh:
        return [folder / CHECKPOINTS / each.name for each in positions(folder / CHECKPOINTS)]
    entries = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    if any(path.name != LOCK_FILE for path in entries):
        raise UserError(
            f"--fresh: {folder} is not empty; move it away, or give another logging.dir"
        )
    return []


def conclude(config: Config, chosen: Path | None, damage: Mapping[Path, Sequence[str]]) -> Start:
    """The start of a run from the newest undamaged checkpoint; `damage`: that of newer ones.

    Raises UserError where all are damaged, and ConfigError with all keys that must not change and
    have changed.
    """
    notes = [line for path, lines in damage.items() for line in damage_notes(path.name, lines)]
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
    notes.append(f"resuming from {chosen}")
    if damage:
        notes[-1] += ", the newest undamaged checkpoint"
    notes += _changes(config, chosen, state)
    last = config.phase if isinstance(config, StageConfig) else "rl"
    done = state.phase == last and state.step >= config.training.steps and not state.rollouts
    return Start(chosen, state, done, notes)


def preview(config: Config, *, fresh: bool) -> Start:
    """The start that the ranks will find; only sizes of files are compared. Raises what
    `candidates` and `conclude` raise, and UserError where the run folder cannot be written."""
    found = candidates(config, fresh=fresh)
    chosen, damage = first_whole(found, lambda path: find_damage(path, contents=False))
    start = conclude(config, chosen, damage)
    lacks = None if start.is_finished else folder_lacks(run_folder(config))
    if lacks is not None:
        raise UserError(problem("logging.dir", str(config.logging.dir), lacks))
    return start


def finished_text(config: Config, state: RunState) -> str:
    """What to print about a finished run."""
    folder, steps = run_folder(config), config.training.steps
    newest = folder / CHECKPOINTS / state.position.name
    ways = []
    if config.optimizer.decay == "constant":
        ways.append("raise training.steps to continue")
    ways.append(f"give {_on_these_weights(config, newest)} to train its weights")
    ways.append("move the folder away to start again")
    return f"{folder}: finished, with {state.step} of {steps} steps; {'; '.join(ways)}"


def _on_these_weights(config: Config, checkpoint: Path) -> str:
    """The keys with which another run starts from the weights of a checkpoint."""
    source = "" if config.model.hf_path is None else ", model.hf_path=null"
    return f"another logging.dir{source} and model.checkpoint_path={checkpoint}"


def given_checkpoint(path: str) -> Path:
    """The checkpoint of model.checkpoint_path, which may be a run folder. Raises DataError."""
    given = Path(path)
    if (given / MANIFEST).is_file():
        return given
    for folder in (given / CHECKPOINTS, given):
        for position in positions(folder):
            if (folder / position.name / MANIFEST).is_file():
                return folder / position.name
    raise DataError(no_checkpoint(path))


def check_given(config: Config, vocab_size: int) -> None:
    """Check the checkpoint of model.checkpoint_path without reading its tensors. Raises
    UserError."""
    checkpoint = given_checkpoint(str(config.model.checkpoint_path))
    refuse_damage(checkpoint, find_damage(checkpoint, contents=False, only=is_of_model))
    weights_fit(checkpoint, config, vocab_size)


def refuse_damage(checkpoint: Path, damage: Sequence[str]) -> None:
    """Raise DataError where a checkpoint is damaged."""
    if damage:
        raise DataError("\n".join(f"{checkpoint}: {line}" for line in damage))


def weights_fit(checkpoint: Path, config: Config, vocab_size: int) -> None:
    """Raise ConfigError with all differences between a checkpoint's model and the configured one,
    in sizes and in other settings that change its results."""
    there = read_model(checkpoint)
    shape = config.resolved_model()
    wanted = {**shape.megatron, **vars(shape), "vocab_size": vocab_size}
    known = {**there["shape"]["megatron"], **there["shape"], "vocab_size": there["vocab_size"]}
    names = [name for name in there["shape"] if name in wanted and name != "max_sequence_length"]
    different = [name for name in names if name != "megatron" and wanted[name] != known[name]]
    different += [
        name
        for name in differences(shape, checkpoint_preset(there))
        if name not in (*different, *_NEW_CHOICES)
    ]
    if different:
        raise ConfigError(
            [
                problem(f"model: {name}", wanted.get(name), f"{checkpoint} has {known.get(name)}")
                for name in different
            ]
        )


def is_of_model(name: str) -> bool:
    """Whether a file of a checkpoint is needed to load its weights."""
    return name.startswith("model/") or name == MODEL_FILE


def _changes(config: Config, checkpoint: Path, state: RunState) -> list[str]:
    """Notes on allowed changes of keys and versions. Raises ConfigError with the other ones."""
    path, now = checkpoint / CONFIG_FILE, fingerprints(config)
    try:
        before = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ConfigError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    same = {key: now[key] == known for key, known in state.fingerprints.items() if key in now}
    changes = find_changes(before, config, same)
    if changes.refused:
        folder = run_folder(config)
        raise ConfigError(
            [
                *changes.refused,
                f"{folder}: holds a run with other values of these keys; set them back to resume "
                f"it, or start a new run with {_on_these_weights(config, checkpoint)}",
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
    return [f"changed since then, {what}: {'; '.join(lines)}" for what, lines in notes if lines]
