"""The inputs of a run's last steps, kept to compute a step again that went wrong.

A dump is what a policy update needs beside the weights: the step's Experience. It depends on no
layout, and is written before the update, so that the step that ends a run leaves one too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    REFERENCE,
    Position,
    Publication,
    hide,
    owned_by,
    positions,
    remove_leftovers,
    write_file,
)
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    Files,
    files_below,
    find_damage,
    record_of,
)
from gspo_megatron.checkpoint.resume import run_folder
from gspo_megatron.checkpoint.run_state import STATE_FILE, RunState
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError, problem, some_of
from gspo_megatron.files import parse_json
from gspo_megatron.models.build import Policy
from gspo_megatron.objectives import build_objective
from gspo_megatron.observe.metrics_files import RL, read_metrics, series
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import gather_objects, on_main
from gspo_megatron.rl.rollout_store import write_rollouts
from gspo_megatron.rl.rollouts import Experience

DUMPS = "dumps"  # in the run folder
DUMP_FILE = "dump.json"
_FORMAT = "gspo-megatron step dump"
_NAME = re.compile(r"step_(\d{8,})")


class StepDumps:
    """Keeps the inputs of the last `training.dump_batches` steps; every rank calls everything."""

    def __init__(self, config: Config, policy: Policy, logger: RunLogger) -> None:
        self.keep, self.config = config.training.dump_batches, config
        self.policy, self.logger = policy, logger
        self.folder = run_folder(config) / DUMPS
        if self.keep:
            on_main(lambda: remove_leftovers(self.folder))

    def write(self, step: int, experience: Experience) -> None:
        """Dump a step before its update. Where the disk refuses, the run goes on with a warning."""
        if not self.keep:
            return
        publication = on_main(lambda: Publication(self.folder, _name(step)))
        refusal = on_main(lambda: _refusal(publication.begin))
        if refusal is None:
            files: Files = {}  # of this rank, with their checksums
            mine = _refusal(lambda: files.update(self._write_share(publication, step, experience)))
            everyones = gather_objects((files, mine))
            if everyones is not None:  # the main rank: all of it, or nothing
                whole = {name: record for own, _ in everyones for name, record in own.items()}
                refusal = next((text for _, text in everyones if text is not None), None)
                refusal = refusal or _refusal(lambda: self._publish(publication, step, whole))
                if refusal is not None:
                    publication.abandon()
        if refusal is not None:
            self.logger.note(f"warning: step {step} could not be dumped: {refusal}")

    def _write_share(self, publication: Publication, step: int, experience: Experience) -> Files:
        folder = publication.folder
        write_rollouts(experience, folder)
        if dist.get_rank() == 0:
            content = {
                "format": _FORMAT,
                "version": 2,
                "step": step,
                "precision": self.config.training.precision,
                "vocab_size": self.policy.vocab_size,
                "has_routes": experience.group.routes is not None,
                "rollouts": experience.describe(),
            }
            write_file(folder / DUMP_FILE, (json.dumps(content, indent=1) + "\n").encode())
        names = owned_by(files_below(folder), dist.get_rank(), dist.get_world_size())
        return {name: record_of(folder / name) for name in names}

    def _publish(self, publication: Publication, step: int, files: Files) -> None:
        """Dumps of later steps are of a time before the run was resumed: they go too."""
        publication.publish(files)
        steps = dumped_steps(self.folder)
        kept = [each for each in steps if each <= step][-self.keep :]
        for surplus in set(steps).difference(kept):
            shutil.rmtree(hide(self.folder / _name(surplus)), ignore_errors=True)


def dumped_steps(folder: Path) -> list[int]:
    """The steps of which a folder holds dumps, in order."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True)
class Dump:
    """A step's dump, as dump.json describes it."""

    folder: Path
    step: int
    precision: str  # that the step was computed in
    vocab_size: int
    has_routes: bool
    rollouts: dict[str, Any]  # Experience.describe

    @classmethod
    def read(cls, folder: Path, *, contents: bool = True) -> Dump:
        """Raises DataError with all that is wrong with the folder; the files' checksums only with
        `contents`."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        steps = dumped_steps(folder)
        if steps:
            names = ", ".join(_name(step) for step in steps)
            raise DataError(f"{folder}: holds the dumps {names}; name one of them")
        _check_whole(folder, contents=contents)
        try:
            content = parse_json((folder / DUMP_FILE).read_bytes())
            assert (content.pop("format"), content.pop("version")) == (_FORMAT, 2)
            return cls(folder, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise DataError(f"{folder}: not the dump of a step") from None

    def logged_loss(self) -> float | None:
        """What the run wrote down for the step, where it came that far."""
        try:
            records = read_metrics(self.run)
        except DataError:
            return None
        return dict(zip(*series(records, "loss", RL))).get(self.step)

    @property
    def run(self) -> Path:
        """The run folder, if the dump lies where it was written."""
        return self.folder.absolute().parent.parent

    def problems(self, config: Config, vocab_size: int) -> list[str]:
        """Why a configuration cannot compute the step."""
        found = []
        if self.vocab_size != vocab_size:
            wrong = f"{self.folder} is of a model with {self.vocab_size}"
            found.append(problem("vocabulary", vocab_size, wrong))
        for key in ("replay", "reference_replay"):
            if getattr(config.routing, key) == "r3" and not self.has_routes:
                wrong = f"{self.folder} has no routes of the rollout; legal: off or r2"
                found.append(problem(f"routing.{key}", "r3", wrong))
        return found


@dataclass(frozen=True)
class StepWeights:
    """Where the weights for a dumped step come from."""

    checkpoint: Path | None  # None: those that the run began with
    is_start: bool  # those that the step began with: its loss can be that of the run
    optimizer: bool  # with the optimizer's state
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """For people."""
        source = str(self.checkpoint or "the run's first ones")
        source += ", with its optimizer" if self.optimizer else ""
        return source if self.is_start else f"{source}, not those that the step began with"


def find_weights(dump: Dump, config: Config, given: str | None) -> StepWeights:
    """The weights of the checkpoint `given`, or of the newest whole one of the dump's run that is
    not of a later time, or the first ones. All that is read of them is held against its checksum,
    the reference too where the objective needs one. Raises DataError."""
    notes = []
    if given is not None:
        checkpoint = Path(given)
        _check_whole(checkpoint)
    else:
        start = Position(RL, dump.step - 1, True)  # all of the step before, and its own rollouts
        for position in positions(dump.run / CHECKPOINTS):
            if position.order > start.order:
                continue
            checkpoint = dump.run / CHECKPOINTS / position.name
            damage = find_damage(checkpoint)
            if not damage:
                break
            notes.append(f"{checkpoint} is damaged and not used: {damage[0]}")
        else:
            return StepWeights(None, dump.step == 1, False, tuple(notes))
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    if objective.needs_reference and (reference := reference_of(checkpoint)) is not None:
        # without one, the run's first weights, which are the same, take its place
        way = "put a whole copy in its place, or move it away: the run's first weights are the same"
        _check_whole(reference, f"damaged, and needed; {way}")
    if not (checkpoint / STATE_FILE).is_file():  # weights alone
        return StepWeights(checkpoint, False, False, tuple(notes))
    state = RunState.read(checkpoint)
    is_start = state.step == dump.step - 1
    return StepWeights(checkpoint, is_start, state.phase == RL and is_start, tuple(notes))


def reference_of(checkpoint: Path) -> Path | None:
    """The weights that RL started from, where they lie beside a checkpoint."""
    reference = checkpoint.parent / REFERENCE
    return reference if (reference / MANIFEST).is_file() else None


def _check_whole(folder: Path, *advice: str, contents: bool = True) -> None:
    """Raises DataError with all that is damaged in a folder, and what to do about it."""
    damage = find_damage(folder, contents=contents)
    if damage:
        raise DataError("\n".join(f"{folder}: {line}" for line in (*some_of(damage), *advice)))


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _refusal(work: Callable[[], object]) -> str | None:
    """Why the disk did not let `work` be done; None where it was."""
    try:
        work()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return None
