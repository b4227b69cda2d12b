"""Saves and reads a step's Experience: all that a policy update needs besides the weights.

Saved Experience has two uses: a run can stop between a rollout and its update, and a bad step can
be computed again. Each data-parallel rank writes its share as a `RolloutGroup`; each pipeline stage
writes the routes of its layers. If the layout has changed, each rank reads its groups from all
files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    Position,
    Publication,
    checkpoints_in,
    hide,
    owned_by,
    reference_name,
    remove_leftovers,
    write_file,
)
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    Files,
    files_below,
    find_damage,
    first_whole,
    record_of,
)
from gspo_megatron.checkpoint.resume import refuse_damage, run_folder
from gspo_megatron.checkpoint.run_state import STATE_FILE, RunState
from gspo_megatron.config import Config
from gspo_megatron.config.phases import reference_step
from gspo_megatron.errors import DataError, problem
from gspo_megatron.files import WRONG_VALUES, make_folder, parse_json
from gspo_megatron.models.build import Policy
from gspo_megatron.objectives import build_objective
from gspo_megatron.observe.metrics_files import RL, read_metrics, series
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import gather_objects, on_main, raise_everywhere
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rollout.store import FOLDER
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.routing.hooks import attach_hooks

STEP_FILE = "step.json"
_NAME = re.compile(r"step_(\d{8,})")

# The files of one step, in the folder of a checkpoint or of a saved step


def write_rollouts(experience: Experience, folder: Path) -> None:
    """Write this rank's share below `folder`; every rank calls it. Raises OSError."""
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        return  # the first tensor-parallel rank writes the same data
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage > 0 and experience.group.routes is None:
        return
    data_rank = parallel_state.get_data_parallel_group(with_context_parallel=True).rank()
    name = f"rank_{dist.get_rank():05d}_data_{data_rank:05d}_stage_{stage:03d}.safetensors"
    path = folder / FOLDER / name
    make_folder(path.parent)
    write_file(path, experience.group.save(routes_only=stage > 0))


def read_experience(folder: Path, description: dict[str, Any], policy: Policy) -> Experience:
    """Read this rank's share, in the current layout, from the files of `write_rollouts`.

    description: the value of `Experience.describe`. Every rank calls it. Raises the same DataError
    on all ranks.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device = torch.device(torch.cuda.current_device())
    experience, error = None, None
    try:
        share = read_share(
            folder / FOLDER, group.rank(), group.size(), lambda: attach_hooks(policy.models)
        )
        if description.keys() - {each.name for each in fields(Experience)}:
            raise ValueError("another version of this program has written them")
        experience = Experience(share, device, **description)
    except (OSError, SafetensorError, RuntimeError, *WRONG_VALUES) as cause:
        error = f"{folder / FOLDER}: cannot be read: {cause}"
    raise_everywhere(error)
    assert experience is not None
    return experience


def read_share(
    folder: Path, rank: int, size: int, layers: Callable[[], Sequence[int]]
) -> RolloutGroup:
    """Read the groups whose number modulo `size` is `rank`. Rollouts divide the groups in the same
    way.

    layers: a function that returns the numbers of the layers whose routes are read; it is called
    only if there are routes. Only one data-parallel rank's file is in memory at a time. Raises
    OSError, SafetensorError, DataError or KeyError if a file is missing or damaged.
    """
    shares: list[RolloutGroup] = []
    for path in sorted(folder.glob("*_stage_000.safetensors"), key=_data_rank):
        with safe_open(path, framework="np") as file:
            is_own = file.get_tensor("group_index") % size == rank
        if shares and not is_own.any():
            continue
        share = RolloutGroup.load(path.read_bytes())
        if share.routes is not None:
            share = _with_routes(share, path, layers())
        shares.append(share.select(is_own))
    return RolloutGroup.join(shares)


def _with_routes(
    share: RolloutGroup, first_stage: Path, layer_numbers: Sequence[int]
) -> RolloutGroup:
    """Return the share with the routes of these layers. They are read from the files of all
    stages."""
    assert share.routes is not None
    routes, layers = [share.routes[:, :0]], []
    for path in sorted(first_stage.parent.glob(f"*_data_{_data_rank(first_stage):05d}_*")):
        with safe_open(path, framework="np") as file:
            stored = file.get_tensor("layers").tolist()
            present = [row for row, layer in enumerate(stored) if layer in layer_numbers]
            if present:
                routes.append(file.get_tensor("routes")[:, present])
                layers += [stored[row] for row in present]
    share = replace(share, routes=np.concatenate(routes, 1), layers=np.array(layers, np.int64))
    return share.of_layers(layer_numbers)


def _data_rank(path: Path) -> int:
    return int(path.name.split("_")[3])


# The last steps of a run


class KeptSteps:
    """Saves the inputs of the last `training.keep_step_inputs` steps in the store's folder.

    Every rank calls every method. A step is saved before its update, so that a step that crashes
    the run is saved too.
    """

    def __init__(self, config: Config, policy: Policy, logger: RunLogger) -> None:
        self.keep, self.config = config.training.keep_step_inputs, config
        self.policy, self.logger = policy, logger
        self.folder = run_folder(config) / FOLDER
        if self.keep:
            on_main(lambda: remove_leftovers(self.folder))

    def write(self, step: int, experience: Experience) -> None:
        """Save a step. If the disk refuses, the run continues with a warning."""
        if not self.keep:
            return
        publication = on_main(lambda: Publication(self.folder, _name(step)))
        refusal = on_main(lambda: _refusal(publication.begin))
        if refusal is None:
            files: Files = {}  # the files of this rank, with checksums
            own_refusal = _refusal(
                lambda: files.update(self._write_share(publication, step, experience))
            )
            of_all_ranks = gather_objects((files, own_refusal))
            # the main rank publishes the step only if all ranks have written their files
            if of_all_ranks is not None:
                all_files = {
                    name: record for own, _ in of_all_ranks for name, record in own.items()
                }
                refusal = next((text for _, text in of_all_ranks if text is not None), None)
                refusal = refusal or _refusal(lambda: self._publish(publication, step, all_files))
                if refusal is not None:
                    publication.abandon()
        if refusal is not None:
            self.logger.note(f"warning: the inputs of step {step} could not be kept: {refusal}")

    def _write_share(self, publication: Publication, step: int, experience: Experience) -> Files:
        folder = publication.folder
        write_rollouts(experience, folder)
        if dist.get_rank() == 0:
            content = {
                "step": step,
                "precision": self.config.training.precision,
                "vocab_size": self.policy.vocab_size,
                "has_routes": experience.group.routes is not None,
                "rollouts": experience.describe(),
            }
            write_file(folder / STEP_FILE, (json.dumps(content, indent=1) + "\n").encode())
        names = owned_by(files_below(folder), dist.get_rank(), dist.get_world_size())
        return {name: record_of(folder / name) for name in names}

    def _publish(self, publication: Publication, step: int, files: Files) -> None:
        """Publish a step. Delete the oldest steps if there are too many, and steps after this one,
        which the run saved before it was resumed."""
        publication.publish(files)
        steps = kept_steps(self.folder)
        kept = [each for each in steps if each <= step][-self.keep :]
        for surplus in set(steps).difference(kept):
            shutil.rmtree(hide(self.folder / _name(surplus)), ignore_errors=True)


def kept_steps(folder: Path) -> list[int]:
    """Return the steps whose inputs a store holds, in order."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class StepInputs:
    """A saved step; the fields after `run` are the content of step.json."""

    run: Path
    step: int
    precision: str  # training.precision of the step
    vocab_size: int
    has_routes: bool
    rollouts: dict[str, Any]  # the value of Experience.describe

    @property
    def folder(self) -> Path:
        return self.run / FOLDER / _name(self.step)

    @classmethod
    def read(cls, run: Path, step: int, *, contents: bool = True) -> StepInputs:
        """Read step.json and check the folder. Raises DataError, which lists all problems.

        contents: also check the checksums of the files.
        """
        store = run / FOLDER
        folder = store / _name(step)
        if not folder.is_dir():
            steps = ", ".join(map(str, kept_steps(store))) or "none"
            raise DataError(
                f"{folder}: no such folder: the inputs of step {step} were not kept; the run has "
                f"kept those of the steps: {steps} (training.keep_step_inputs)"
            )
        refuse_damage(folder, find_damage(folder, contents=contents))
        try:
            return cls(run, **parse_json((folder / STEP_FILE).read_bytes()))
        except (OSError, *WRONG_VALUES):
            raise DataError(f"{folder}: not the inputs of a step") from None

    def logged_loss(self) -> float | None:
        """Return the loss that the run logged for the step; None if the run logged no loss."""
        try:
            records = read_metrics(self.run)
        except DataError:
            return None
        return dict(zip(*series(records, "loss", RL))).get(self.step)

    def problems(self, config: Config, vocab_size: int) -> list[str]:
        """Return why a configuration cannot compute the step, one line for each problem."""
        problems = []
        if self.vocab_size != vocab_size:
            wrong = f"{self.folder} is of a model with {self.vocab_size} tokens"
            problems.append(problem("vocabulary", vocab_size, wrong))
        for key in ("replay", "reference_replay"):
            if getattr(config.routing, key) == "r3" and not self.has_routes:
                wrong = f"{self.folder} has no routes of the rollout; allowed: off or r2"
                problems.append(problem(f"routing.{key}", "r3", wrong))
        return problems


@dataclass(frozen=True)
class StepWeights:
    """The source of the weights for a saved step."""

    checkpoint: Path | None  # None: the weights with which the run began
    # whether the step began with these weights, so that the loss can equal the logged one
    is_start: bool
    optimizer: bool  # whether the optimizer's state of the checkpoint is used
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A description for people."""
        source = str(self.checkpoint or "the run's first ones")
        source += ", with its optimizer" if self.optimizer else ""
        return source if self.is_start else f"{source}, not those that the step began with"


def find_weights(step: StepInputs, config: Config, given: str | None) -> StepWeights:
    """Find the weights for a saved step, and check the checksums of all files to be read.

    given: a checkpoint; None: the newest undamaged checkpoint from before the step, or else the
    weights with which the run began. If the objective needs a reference policy, its checkpoint is
    checked, too. Raises DataError.
    """
    checkpoint, notes = None, []
    if given is not None:
        checkpoint = Path(given)
        refuse_damage(checkpoint, find_damage(checkpoint))
    else:
        # The latest position that can be used: the previous step is finished, and the responses of
        # this step are already generated.
        last, found = Position(RL, step.step - 1, True), checkpoints_in(step.run / CHECKPOINTS)
        usable = (path for position, path in found.items() if position.order <= last.order)
        checkpoint, damage = first_whole(usable, find_damage)
        notes = [f"{path} is damaged and not used: {lines[0]}" for path, lines in damage.items()]
        if checkpoint is None:
            return StepWeights(None, step.step == 1, False, tuple(notes))
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    if (
        objective.needs_reference
        and (reference := reference_of(checkpoint, config, step.step)) is not None
    ):
        # Without this folder, `verify` takes the run's first weights as the reference. A reference
        # that no phase has renewed has these weights.
        way = "replace it by an undamaged copy"
        if reference.name == reference_name(0):
            way += ", or move it away: the first weights are the same"
        refuse_damage(reference, find_damage(reference), f"damaged, and needed; {way}")
    if not (checkpoint / STATE_FILE).is_file():  # a checkpoint of weights alone
        return StepWeights(checkpoint, False, False, tuple(notes))
    state = RunState.read(checkpoint)
    is_start = state.step == step.step - 1
    return StepWeights(checkpoint, is_start, state.phase == RL and is_start, tuple(notes))


def reference_of(checkpoint: Path, config: Config, step: int) -> Path | None:
    """Return the folder, beside a checkpoint, that has the weights of the reference policy at
    `step`. Returns None if there is no such folder."""
    reference = checkpoint.parent / reference_name(reference_step(config, step))
    return reference if (reference / MANIFEST).is_file() else None


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _refusal(work: Callable[[], object]) -> str | None:
    """Run `work`; return the reason if the disk refused, else None."""
    try:
        work()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return None
