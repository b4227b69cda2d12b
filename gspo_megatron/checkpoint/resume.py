"""What a run begins with: the newest whole checkpoint in its folder, given weights, or nothing.

The same command resumes the run in its folder. Nothing here imports torch, so that a refusal comes
before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
from gspo_megatron.checkpoint.manifest import MANIFEST, damage_notes, find_damage
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

# Fields of TransformerConfig that a run on given weights may choose anew: which tokens are dropped.
_NEW_CHOICES = (
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)

Damage = Mapping[str, Sequence[str]]  # what is wrong, by the checkpoint's name


@dataclass
class Start:
    """What a run goes on from; nothing for one that begins."""

    checkpoint: Path | None = None
    state: RunState | None = None
    is_finished: bool = False
    notes: list[str] = field(default_factory=list)  # for the user


def run_folder(config: Config) -> Path:
    """Where the run writes."""
    return Path(str(config.logging.dir))


def candidates(config: Config, *, fresh: bool) -> list[Path]:
    """The checkpoints that a run may go on from, the newest first, whole or not. Raises UserError
    where `fresh` forbids what is there."""
    folder = run_folder(config)
    if fresh:
        if folder.exists() and not _is_empty(folder):
            raise UserError(
                f"--fresh: {folder} is not empty; move it away, or give another logging.dir"
            )
        return []
    return [folder / CHECKPOINTS / position.name for position in positions(folder / CHECKPOINTS)]


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and all(path.name == LOCK_FILE for path in folder.iterdir())


def conclude(config: Config, chosen: Path | None, damage: Damage) -> Start:
    """The start of a run, once it is known which checkpoint is the newest whole one, and what is
    wrong with those after it.

    Raises UserError where none is whole, and ConfigError with all keys that have changed and must
    not.
    """
    notes = [line for name, lines in damage.items() for line in damage_notes(name, lines)]
    if chosen is None:
        if damage:
            where = run_folder(config)
            notes.append(
                f"{where}: no checkpoint of this run is whole; mend one, or move the folder away "
                "to begin anew"
            )
            raise UserError("\n".join(notes))
        return Start()
    state = RunState.read(chosen)
    notes.append(f"going on from {chosen}")
    if damage:
        notes[-1] += ", the newest whole checkpoint"
    notes += _changes(config, chosen, state)
    last = config.phase if isinstance(config, StageConfig) else "rl"
    done = state.phase == last and state.step >= config.training.steps and not state.rollouts
    return Start(chosen, state, done, notes)


def preview(config: Config, *, fresh: bool) -> Start:
    """What the ranks will find, by the sizes of files alone. Raises as `candidates` and `conclude`
    do, and UserError where the run folder cannot be written."""
    damage: dict[str, list[str]] = {}
    for checkpoint in candidates(config, fresh=fresh):
        wrong = find_damage(checkpoint, contents=False)
        if not wrong:
            start = conclude(config, checkpoint, damage)
            break
        damage[checkpoint.name] = wrong
    else:
        start = conclude(config, None, damage)
    lacks = None if start.is_finished else folder_lacks(run_folder(config))
    if lacks is not None:
        raise UserError(problem("logging.dir", str(config.logging.dir), lacks))
    return start


def finished_text(config: Config, state: RunState) -> str:
    """What to print about a run that is finished already."""
    folder, steps = run_folder(config), config.training.steps
    newest = folder / CHECKPOINTS / state.position.name
    ways = []
    if config.optimizer.decay == "constant":
        ways.append("raise training.steps to go on")
    ways.append(f"give {_on_these_weights(config, newest)} to train its weights")
    ways.append("move the folder away to begin anew")
    return f"{folder}: finished, with {state.step} of {steps} steps; {'; '.join(ways)}"


def _on_these_weights(config: Config, checkpoint: Path) -> str:
    """The keys with which another run begins from the weights of a checkpoint."""
    source = "" if config.model.hf_path is None else ", model.hf_path=null"
    return f"another logging.dir{source} and model.checkpoint_path={checkpoint}"


def given_checkpoint(path: str) -> Path:
    """The checkpoint that model.checkpoint_path means. Raises DataError."""
    given = Path(path)
    if (given / MANIFEST).is_file():
        return given
    for folder in (given / CHECKPOINTS, given):
        for position in positions(folder):
            if (folder / position.name / MANIFEST).is_file():
                return folder / position.name
    raise DataError(no_checkpoint(path))


def check_given(config: Config, vocab_size: int) -> None:
    """Look at what model.checkpoint_path names without reading its tensors. Raises UserError."""
    checkpoint = given_checkpoint(str(config.model.checkpoint_path))
    damage = find_damage(checkpoint, contents=False, only=is_of_model)
    if damage:
        raise DataError("\n".join(f"{checkpoint}: {line}" for line in damage))
    weights_fit(checkpoint, config, vocab_size)


def weights_fit(checkpoint: Path, config: Config, vocab_size: int) -> None:
    """Raise ConfigError with everything in which a checkpoint's model computes something else than
    the configured one: sizes, and the other numbers of its function."""
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
    """Whether a file of a checkpoint is read where its weights alone are wanted."""
    return name.startswith("model/") or name == MODEL_FILE


def _changes(config: Config, checkpoint: Path, state: RunState) -> list[str]:
    """Notes on changes that are allowed, of versions too. Raises ConfigError with the others."""
    path = checkpoint / CONFIG_FILE
    try:
        before = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ConfigError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    now = fingerprints(config)
    same = {key: now[key] == known for key, known in state.fingerprints.items() if key in now}
    changes = find_changes(before, config, same)
    if changes.refused:
        folder = run_folder(config)
        raise ConfigError(
            [
                *changes.refused,
                f"{folder}: holds a run with other values of these keys; set them back to go on, "
                f"or start a new run from its weights with {_on_these_weights(config, checkpoint)}",
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
