"""When a run is saved and what with it, and how it goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    REFERENCE,
    Position,
    Retention,
    hide,
    positions,
    remove_leftovers,
    set_latest,
)
from gspo_megatron.checkpoint.resume import Start, run_folder
from gspo_megatron.checkpoint.rng import save_rng
from gspo_megatron.checkpoint.run_state import (
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
    RunState,
    describe_model,
    fingerprints,
    versions,
)
from gspo_megatron.checkpoint.start import load_reference
from gspo_megatron.checkpoint.storage import write_file
from gspo_megatron.checkpoint.tensors import (
    load_model,
    load_optimizer,
    load_trainer_state,
    trainer_state,
)
from gspo_megatron.checkpoint.writer import CheckpointWriter
from gspo_megatron.config import Config, to_yaml
from gspo_megatron.config.problems import did_you_mean, nearest, problem
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.errors import DataError, UserError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.observe.metrics_files import RL, WARM_START
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import any_rank, on_main
from gspo_megatron.platform.stop import StopRun, StopSignals
from gspo_megatron.rl.rollout_store import RolloutBuffer


class Checkpoints:
    """A run's checkpoints; every rank calls everything. Nothing is saved with interval 0, and a run
    without an earlier one has nothing to restore."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        record: RunLogger,
        start: Start,
        stop: StopSignals,
        hf: Any = None,
    ) -> None:
        """`hf` is the config.json of the Hugging Face model that the weights come from.

        Raises UserError where the disk has no room for one checkpoint.
        """
        self.config, self.section, self.policy = config, config.checkpoint, policy
        self.record, self.start, self.stop = record, start, stop
        self.folder = run_folder(config) / CHECKPOINTS
        self.said = list(start.state.said) if start.state else []
        if not self.section.interval:
            return
        self.writer = CheckpointWriter(self.folder, policy)
        self._model = describe_model(config, policy.vocab_size, hf)
        on_main(self._prepare)

    # What a run goes on from

    def is_past(self, phase: str) -> bool:
        """Whether the run has finished a phase before."""
        state = self.start.state
        if state is None:
            return False
        return (state.phase == phase and state.phase_is_done) or (phase, state.phase) == (
            WARM_START,
            RL,
        )

    def restore(self, phase: str, trainer: Trainer, loader: PromptLoader) -> int:
        """Put a phase's optimizer, schedule and prompts where they were; the policy has its weights
        already. Returns the finished steps, 0 where the phase begins."""
        state, checkpoint = self.start.state, self.start.checkpoint
        if state is None or checkpoint is None or state.phase != phase:
            return 0
        load_optimizer(checkpoint, self.policy, trainer)
        load_trainer_state(trainer, state.trainer)
        loader.load_state_dict(state.loader)
        return state.step

    def restored_rollouts(self) -> RolloutBuffer | None:
        """The responses of the step that the run stopped in, if they were all there."""
        state, checkpoint = self.start.state, self.start.checkpoint
        if state is None or checkpoint is None or state.rollouts is None:
            return None
        return RolloutBuffer.read(checkpoint, state.rollouts, self.policy)

    def begin_reference(self) -> None:
        """Give the policy the weights that RL starts from: they are saved here, or those of an
        earlier start are read, and `end_reference` puts the run's own back."""
        if self._is_in_rl:
            load_reference(self.config, self.policy)
        elif self.section.interval:
            self._raise(self.writer.finish())
            self._raise(
                self.writer.begin(
                    REFERENCE, None, self._write_model, lambda _: None, asynchronous=False
                )
                or self.writer.finish()
            )

    def end_reference(self) -> None:
        """See begin_reference."""
        if self._is_in_rl:
            assert self.start.checkpoint is not None
            load_model(self.start.checkpoint, self.policy)

    @property
    def _is_in_rl(self) -> bool:
        return self.start.state is not None and self.start.state.phase == RL

    # Saving

    def end_of_step(
        self,
        phase: str,
        step: int,
        trainer: Trainer,
        loader: PromptLoader,
        metrics: Mapping[str, float],
        *,
        is_last: bool,
    ) -> None:
        """Save where it is time to: by the interval, at a phase's end, when told to stop.

        Raises StopRun, on all ranks, where the run is to end here, and UserError where it has to be
        saved and cannot. Otherwise a checkpoint that cannot be written is warned of, and the run
        goes on: the next one may fit.
        """
        interval = self.section.interval
        if not interval:
            return
        self.stop.boundary()
        stop, busy = any_rank([self.stop.is_requested, self.writer.is_busy])
        if not busy:
            self._warn(self.writer.finish())
        ends = stop or is_last
        if not (ends or step % interval == 0):
            return
        self._miss_figure(phase, step, metrics, is_last)
        done = is_last and phase == WARM_START  # its optimizer has nothing left to do
        state = self._state(phase, step, trainer, loader, is_last)
        if self.section.best_metric in metrics:
            state.figures = {self.section.best_metric: float(metrics[self.section.best_metric])}
        self._save(state, None if done else trainer, None, must=ends)
        if stop and not (is_last and phase != WARM_START):
            raise StopRun(self._stopped(state.position))

    def _miss_figure(
        self, phase: str, step: int, metrics: Mapping[str, float], is_last: bool
    ) -> None:
        """Say, once in a run, that a checkpoint has not the figure that `keep_best` goes by, where
        one was to be expected."""
        name, every = self.section.best_metric, self.config.training.evaluation_interval
        if not self.section.keep_best or phase == WARM_START or name in metrics:
            return
        evaluated = is_last or (every and step % every == 0)
        key = f"checkpoint.best_metric = {name}"
        if key in self.said or (name.startswith("evaluation/") and not evaluated):
            return
        self.said.append(key)
        wrong = f"no figure of step {step}, whose checkpoint is not kept for it"
        if close := nearest(name, metrics, 1):
            wrong += f"; {did_you_mean(close)}"
        self.record.note(f"warning: {problem('checkpoint.best_metric', name, wrong)}")

    def after_rollouts(
        self, step: int, trainer: Trainer, loader: PromptLoader, rollouts: RolloutBuffer
    ) -> None:
        """Where the run is told to stop, save it with the responses of `step`, which is not trained
        on yet, and raise StopRun on all ranks."""
        if not self.section.interval or not any_rank([self.stop.is_requested])[0]:
            return
        state = self._state(RL, step - 1, trainer, loader, False)
        state.rollouts = rollouts.describe()
        self._save(state, trainer, rollouts, must=True)
        raise StopRun(self._stopped(state.position))

    def close(self) -> None:
        """Wait for what is still being written or removed; at the end of a run that ends well."""
        if self.section.interval:
            self._warn(self.writer.finish())
            self.writer.wait_for_removal()

    def _save(
        self,
        state: RunState,
        trainer: Trainer | None,
        rollouts: RolloutBuffer | None,
        *,
        must: bool,
    ) -> None:
        self._warn(self.writer.finish())  # the one before took longer than the interval
        self.record.sync()

        def write_small(folder: Path) -> None:
            save_rng(folder)
            if rollouts is not None:
                rollouts.write(folder, self.policy)
            if self.record.is_main:
                write_file(folder / STATE_FILE, state.dump())
                write_file(folder / CONFIG_FILE, to_yaml(self.config).encode())
            self._write_model(folder)

        def published(_: Path) -> None:
            set_latest(self.folder, state.position.name)
            self._drop_surplus(state.position)

        asynchronous = self.section.asynchronous and not must
        problem = self.writer.begin(
            state.position.name, trainer, write_small, published, asynchronous=asynchronous
        )
        if problem is None and not asynchronous:
            problem = self.writer.finish()
        if must:
            self._raise(problem)
        else:
            self._warn(problem)

    def _state(
        self, phase: str, step: int, trainer: Trainer, loader: PromptLoader, is_last: bool
    ) -> RunState:
        return RunState(
            phase=phase,
            step=step,
            phase_is_done=is_last,
            trainer=trainer_state(trainer),
            loader=loader.state_dict(),
            fingerprints=self._fingerprints if self.record.is_main else {},
            layout=str(self.config.layout()),
            world_size=dist.get_world_size(),
            versions=versions(),
            said=list(self.said),
        )

    def _write_model(self, folder: Path) -> None:
        if self.record.is_main:
            write_file(folder / MODEL_FILE, (json.dumps(self._model, indent=1) + "\n").encode())

    def _prepare(self) -> None:
        """On the main rank, before training: a tidy folder, with room for a checkpoint."""
        remove_leftovers(self.folder)
        self._fingerprints = fingerprints(self.config)
        refusal = self.writer.lacks_room()
        if refusal is not None:
            raise UserError(
                f"{self.folder}: no room for a checkpoint: {refusal}; free some, give another "
                "logging.dir, or set checkpoint.interval=0"
            )

    def _drop_surplus(self, newest: Position) -> None:
        """On the main rank. Checkpoints after the newest are damaged ones, which the run is going
        to replace."""
        section = self.section
        figures = {}
        for position in positions(self.folder):
            if position.order <= newest.order:
                figures[position] = self._figure(position)
        keep = Retention(section.keep_last, section.keep_best, section.keep_every)
        surplus = [self.folder / position.name for position in keep.surplus(figures)]
        self.writer.remove([hide(path) for path in surplus])

    def _figure(self, position: Position) -> float | None:
        if not self.section.keep_best:
            return None
        try:
            state = RunState.read(self.folder / position.name)
        except DataError:
            return None
        return state.figures.get(self.section.best_metric)

    def _stopped(self, position: Position) -> str:
        where = f"after step {position.step} of {position.phase}"
        if position.rolled_out:
            where += ", with the rollouts of the next"
        return (
            f"stopped as asked, {where}: {self.folder / position.name}; the same command goes on "
            "from there"
        )

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            self.record.note(
                f"warning: trouble with a checkpoint: {problem}; the run goes on, and the next "
                "one is tried in time"
            )

    def _raise(self, problem: str | None) -> None:
        if problem is not None:
            raise UserError(
                f"{self.folder}: the run ends here, with trouble saving it: {problem}; once that "
                "is mended, the same command goes on from the newest checkpoint there is"
            )
