"""Decides when a run is saved and what is saved, and restores a resumed run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    Position,
    checkpoints_in,
    finish_rollback,
    hide,
    positions,
    reference_name,
    remove_leftovers,
    set_latest,
    surplus,
    to_go_back_to,
    write_file,
)
from gspo_megatron.checkpoint.lineage import Rollbacks, read_rollbacks
from gspo_megatron.checkpoint.manifest import first_whole
from gspo_megatron.checkpoint.optimizer import load_trainer_state, trainer_state
from gspo_megatron.checkpoint.resume import Start, run_folder
from gspo_megatron.checkpoint.rng import save_rng
from gspo_megatron.checkpoint.run_state import (
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
    RunState,
    describe_model,
    fingerprints,
    read_config,
    versions,
)
from gspo_megatron.checkpoint.start import damage_of, load_reference
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer
from gspo_megatron.checkpoint.writer import CheckpointWriter
from gspo_megatron.config import to_yaml
from gspo_megatron.config.phases import reference_step
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import (
    DataError,
    ServersEndError,
    UserError,
    did_you_mean,
    nearest,
    problem,
)
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.observe.collapse import Alarm, CollapseWatch
from gspo_megatron.observe.history import kept_metrics
from gspo_megatron.observe.metrics_files import RL
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.platform.collectives import any_rank, on_main
from gspo_megatron.platform.stop import StopRun, StopSignals

# Keys of `data` that decide the order of the prompts. The fingerprint covers the files themselves,
# which may have moved.
_PROMPT_KEYS = ("weights", "shuffle", "selection")


class DataOrder(Protocol):
    """The data loader of any stage, which knows the run's position in its data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Saves and restores a run. Every rank calls every method. With interval 0 nothing is saved."""

    def __init__(
        self,
        config: AnyConfig,
        policy: Policy,
        logger: RunLogger,
        start: Start,
        stop: StopSignals,
        hf: Any = None,
    ) -> None:
        """`hf`: config.json of the Hugging Face model that the weights come from. Raises UserError
        if the disk has no room for one checkpoint."""
        self.config, self.section, self.policy = config, config.checkpoint, policy
        self.phase = config.phase
        self.logger, self.start, self.stop = logger, start, stop
        self.folder = run_folder(config) / CHECKPOINTS
        # the position of the last published checkpoint
        self._newest = Position.of_name(start.checkpoint.name) if start.checkpoint else None
        self._begun: Position | None = None  # of an asynchronous save that is not published yet
        self.warned = list(start.state.warned) if start.state else []
        # Ranks may differ in the last digit of a metric, so the main rank decides whether the run
        # has collapsed.
        self.watch = CollapseWatch(**(start.state.watch if start.state else {}))
        self.rollbacks = start.state.rollbacks if start.state else 0
        self.reward_moments = dict(start.state.reward_moments) if start.state else {}
        self.back: Path | None = None  # the checkpoint to which the run has just gone back
        self._next_prompts: dict[str, Any] | None = None  # position in the data after a rollback
        self._figures: dict[str, float] = {}  # of the last finished step, for `keep_best`
        if not self.section.interval:
            return
        self.writer = CheckpointWriter(self.folder, policy)
        base = None if policy.lora is None else policy.lora.base
        self._model = describe_model(config, policy.vocab_size, hf, base)
        self.rollbacks, self._next_prompts = on_main(self._prepare)

    def saved_step(self, step: int) -> int:
        """Return the step from which the run would resume if it were killed now, after `step`.
        If the run saves no checkpoints, this is `step`, because the data of earlier steps is never
        needed again."""
        if not self.section.interval:
            return step
        return 0 if self._newest is None else self._newest.step

    # What a run restores

    @property
    def is_new(self) -> bool:
        """Whether the stage begins now, because the run has no checkpoint of it."""
        return self.start.state is None or self.start.state.phase != self.phase

    @property
    def finished_steps(self) -> int:
        """The number of the stage's steps that an earlier start of the run has finished."""
        return 0 if self.is_new or self.start.state is None else self.start.state.step

    def restore(self, trainer: Trainer, loader: DataOrder, updates_per_step: int = 1) -> int:
        """Restore the stage's optimizer, schedule and prompt order, which are saved from now on.
        The policy has its weights already. Returns the number of finished steps, which is 0 if the
        stage begins now.

        If a phase begins that changes values, the schedule continues at finished steps ×
        `updates_per_step`. If that phase has other prompts than the previous phase, it begins with
        its first prompt.
        """
        self._trainer, self._loader = trainer, loader
        state, checkpoint = self.start.state, self.start.checkpoint
        if state is None or checkpoint is None or state.phase != self.phase:
            return 0
        load_optimizer(checkpoint, self.policy, trainer)
        position = state.trainer
        if self.start.begins_phase:
            position = {"scheduler": {"num_steps": state.step * updates_per_step}}
        load_trainer_state(trainer, position)
        has_others = partial(self._has_other_prompts, state)
        if self._next_prompts is not None:
            loader.load_state_dict(self._next_prompts)
        elif not (self.start.begins_phase and on_main(has_others)):
            loader.load_state_dict(state.loader)
        return state.step

    def _has_other_prompts(self, state: RunState) -> bool:
        """Whether the prompts or examples, or their order, have changed since the checkpoint was
        made."""
        assert self.start.checkpoint is not None
        data, before = self.config.model_dump()["data"], read_config(self.start.checkpoint)["data"]
        # a checkpoint of an earlier version may lack a key
        if any(before[key] != data[key] for key in _PROMPT_KEYS if key in before):
            return True
        # other keys decide how many rows of a file can be used
        if self._loader.state_dict().get("num_prompts") != state.loader.get("num_prompts"):
            return True
        now, key = fingerprints(self.config), f"data.{self.config.inputs[0]}"
        return now.get(key) != state.fingerprints.get(key)

    @contextlib.contextmanager
    def reference_weights(self, *, needed: bool, kept: bool) -> Generator[None]:
        """Inside the context, give the policy the weights of the reference policy, if `needed`.

        At the start of RL, and when a phase renews the reference, the policy itself is the
        reference. If `kept`, this method then saves the reference. At any other time the reference
        is read from its checkpoint, and at the end of the context the policy's own weights are read
        again. A policy whose adapters had no effect at the start of RL needs no saved reference:
        without its adapters it is the reference."""
        lora = self.policy.lora
        is_base = lora is not None and lora.starts_as_base
        needed, kept = needed and not is_base, kept and not is_base
        step, since = self.finished_steps, reference_step(self.config, self.start.next_step)
        is_read, name = not self.is_new and (since != step or step == 0), reference_name(since)
        if is_read and needed:
            load_reference(self.config, self.policy, name)
        elif not is_read and kept and self.section.interval:
            self._raise(self._finish())
            self._raise(self.writer.begin(name, None, self._write_model, asynchronous=False))
        yield
        if is_read and needed:
            assert self.start.checkpoint is not None
            load_model(self.start.checkpoint, self.policy)

    # A run that goes back

    def judge(self, step: int, metrics: dict[str, float]) -> Alarm | None:
        """Return the alarm if the policy collapses at this step, and add the metrics about
        collapses to the step's metrics. If training.on_collapse is warn, only the main rank gets
        the alarm."""
        if getattr(self.config.training, "on_collapse", "warn") != "warn":
            alarm = on_main(lambda: self.watch.add(step, metrics))
        else:
            alarm = self.watch.add(step, metrics) if self.logger.is_main else None
        if alarm is not None:
            metrics["collapse/alarm"] = 1.0
        if self.rollbacks:
            metrics["collapse/rollbacks"] = float(self.rollbacks)
        return alarm

    def lose(self, step: int, text: str) -> Alarm:
        """Return the alarm for a step whose update has made the weights unusable."""
        return on_main(lambda: self.watch.lose(step, text))

    def before_first_step(self) -> None:
        """Save a new run before its first step, if a rollback may have to go back to this point."""
        if getattr(self.config.training, "on_collapse", "warn") == "rollback":
            self._save(self._state(0), must=True)

    def collapsed_text(self, step: int) -> str:
        """Return the message of a run that ends after a collapse, the same on all ranks."""
        return on_main(lambda: self._collapsed_text(step))

    def _collapsed_text(self, step: int) -> str:
        alarm, run = self.watch.alarm, run_folder(self.config)
        assert alarm is not None
        healthy = [p.step for p in positions(self.folder) if _is_healthy(p, alarm.healthy)]
        earlier = "no checkpoint is healthy"
        if healthy:
            words = f"gspo-megatron train {run} --from-step {healthy[0]} section.key=value"
            earlier = f"the last healthy checkpoint is that of step {healthy[0]}: {words}"
        return (
            f"{alarm.collapse}; the run ends, and is saved after step {step}\n{earlier}\n"
            "with training.on_collapse=warn, the same command continues the run as it is"
        )

    def roll_back(self, alarm: Alarm, step: int) -> int | None:
        """Take back all steps since the newest undamaged checkpoint with a policy that was healthy
        for sure.

        Afterwards `back` is that checkpoint. The run continues from it as a resumed run does, but
        with the prompts that come next after `step`. Returns the number of finished steps at that
        checkpoint. If there is no such checkpoint, changes nothing and returns None."""
        self._warn(self._finish())  # the run goes back to an earlier checkpoint
        saved = on_main(lambda: positions(self.folder))
        healthy = [self.folder / each.name for each in saved if _is_healthy(each, alarm.healthy)]
        self.back, _ = first_whole(healthy, damage_of)
        if self.back is None:
            return None
        to = Position.of_name(self.back.name)
        assert to is not None
        self.rollbacks = on_main(lambda: self._take_back(to, alarm, step))
        return to.step

    def _take_back(self, to: Position, alarm: Alarm, step: int) -> int:
        """Record a rollback, and hide the later checkpoints. Called on the main rank. Returns the
        number of rollbacks."""
        before = read_rollbacks(self.folder)
        number = self.rollbacks + 1
        rollback = {"number": number, "from_step": step, "to_step": to.step, "text": alarm.text}
        record = Rollbacks(
            number=number,
            to=to.name,
            loader=self._loader.state_dict(),
            prompts=self._prompts(),
            undone=[p.name for p in positions(self.folder) if p.order > to.order],
            rollbacks=[*(before.rollbacks if before else ()), rollback],
        )
        self.logger.go_back(to.step, kept_metrics(number))
        record.write(self.folder)
        finish_rollback(self.folder)
        set_latest(self.folder, to.name)
        return number

    def _prompts(self) -> dict[str, Any]:
        """Return the settings that decide which prompt a position in the data means. Called on the
        main rank."""
        data = self.config.model_dump(mode="json")["data"]
        values = {key: data[key] for key in _PROMPT_KEYS}
        return values | {"fingerprint": self._fingerprints.get("data.prompts")}

    # Saving

    def end_of_step(
        self, step: int, metrics: Mapping[str, float], *, is_last: bool, is_border: bool = False
    ) -> None:
        """Save the run if a save is due after this step: by the interval, at the stage's end, at a
        phase's last step (`is_border`), or after a stop signal.

        Raises StopRun on all ranks after a stop signal. Raises UserError if the save at the stage's
        end, at a border or after a stop signal fails. Any other failed save is a warning, and the
        run continues.
        """
        interval = self.section.interval
        if not interval:
            return
        # all figures of an evaluation, because a later start may have another `best_metric`
        self._figures = {
            name: float(value)
            for name, value in metrics.items()
            if name == self.section.best_metric or name.startswith("evaluation/")
        }
        self.stop.boundary()
        stop, busy = any_rank([self.stop.is_requested, self.writer.is_busy])
        if not busy:
            self._warn(self._finish())
        ends = stop or is_last or is_border
        if not (ends or step % interval == 0):
            return
        self._warn_of_missing_metric(step, metrics, is_last)
        state = self._state(step)
        state.metrics = self._figures
        self._save(state, must=ends)
        if stop and not is_last:
            raise StopRun(self._stopped(state.position))

    def _warn_of_missing_metric(
        self, step: int, metrics: Mapping[str, float], is_last: bool
    ) -> None:
        """Warn, once in a run, if this step should have the metric for `keep_best` but lacks it."""
        name = self.section.best_metric
        if not self.section.keep_best or name in metrics:
            return
        key = f"checkpoint.best_metric = {name}"
        if key in self.warned:
            return
        if name.startswith("evaluation/"):
            _, every = self.config.evaluated_every(name)
            if not is_last and (every == 0 or step % every):
                return
        self.warned.append(key)
        wrong = f"step {step} has no such metric, so its checkpoint is not kept as one of the best"
        if close := nearest(name, metrics, 1):
            wrong += f"; {did_you_mean(close)}"
        self.logger.note(f"warning: {problem('checkpoint.best_metric', name, wrong)}")

    def must_stop(self) -> bool:
        """Return, on all ranks, whether a stop signal has come to any rank of a run that is
        saved."""
        return bool(self.section.interval) and any_rank([self.stop.is_requested])[0]

    def stop_before_update(
        self,
        step: int,
        before: dict[str, Any],
        description: dict[str, Any],
        write_rollouts: Callable[[Path], None],
    ) -> NoReturn:
        """Save the run with the responses of `step`, before its update, and raise StopRun on all
        ranks. `write_rollouts` writes this rank's responses into a folder; `description` describes
        them and is stored as JSON; `before` has the values of `RunState.before_rollouts`."""
        state = self._state(step - 1)
        state.rollouts, state.before_rollouts = description, before
        self._save(state, write_rollouts, must=True)
        raise StopRun(self._stopped(state.position))

    def after_failure(
        self, step: int, error: UserError, unevaluated: Mapping[str, float] | None = None
    ) -> NoReturn:
        """Save the run as it was after `step`, unless it is saved already, and raise the error.

        All ranks raise the same error. This method adds to the error's message where the run is
        saved and when it can continue. After a ServersEndError, which is a stop, it raises StopRun.
        `unevaluated`: the step's metrics, if something after its update failed."""
        stops = isinstance(error, ServersEndError)
        if step == 0 and not stops:
            raise error
        if not self.section.interval:
            raise type(error)(f"{error}\nnothing is saved: checkpoint.interval = 0") from error
        self._finish()
        state = self._state(step)
        if unevaluated is None:
            state.metrics = self._figures
        else:
            state.unevaluated = {name: float(value) for name, value in unevaluated.items()}
        if unevaluated is not None or state.position != self._newest:
            try:
                self._save(state, must=True)
            except UserError as failed:
                raise type(error)(f"{error}\n{failed}") from error
        self.close()
        if stops:
            raise StopRun(self._stopped(state.position)) from error
        path = self.folder / state.position.name
        raise type(error)(
            f"{error}\n{path}: the run is saved, with {step} finished steps; the same command "
            f"continues it once {error.resume_when}"
        ) from error

    def next_start(self) -> Start:
        """Return the start of the next phase, from the checkpoint that was just saved at the end of
        this phase."""
        assert self._newest is not None
        checkpoint = self.folder / self._newest.name
        state = on_main(lambda: RunState.read(checkpoint))
        return Start(checkpoint, state, begins_phase=True)

    def close(self) -> None:
        """Wait for checkpoints that are still being written or removed."""
        if self.section.interval:
            self._warn(self._finish())
            self.writer.wait_for_removal()

    def _save(
        self,
        state: RunState,
        write_rollouts: Callable[[Path], None] | None = None,
        *,
        must: bool,
    ) -> None:
        self._warn(self._finish())  # the previous save may have outlasted the interval
        self.logger.sync()

        def write_small(folder: Path) -> None:
            save_rng(folder)
            if write_rollouts is not None:
                write_rollouts(folder)
            if self.logger.is_main:
                write_file(folder / STATE_FILE, state.dump())
                write_file(folder / CONFIG_FILE, to_yaml(self.config).encode())
            self._write_model(folder)

        def published() -> None:
            # first, because on a full disk `latest` may need the room of an old checkpoint
            self._drop_surplus(state.position)
            set_latest(self.folder, state.position.name)

        asynchronous = self.section.asynchronous and not must
        problem = self.writer.begin(
            state.position.name, self._trainer, write_small, published, asynchronous=asynchronous
        )
        if problem is None and asynchronous:
            self._begun = state.position
        elif problem is None:
            self._newest = state.position
        (self._raise if must else self._warn)(problem)

    def _finish(self) -> str | None:
        """Wait for the asynchronous save, if there is one, and publish it. Returns what went wrong,
        or None, the same on all ranks."""
        problem, begun, self._begun = self.writer.finish(), self._begun, None
        if problem is None and begun is not None:
            self._newest = begun
        return problem

    def _state(self, step: int) -> RunState:
        return RunState(
            phase=self.phase,
            step=step,
            trainer=trainer_state(self._trainer),
            loader=self._loader.state_dict(),
            fingerprints=self._fingerprints if self.logger.is_main else {},
            layout=str(self.config.layout()),
            world_size=dist.get_world_size(),
            versions=versions(),
            warned=list(self.warned),
            watch=self.watch.state(),
            reward_moments=dict(self.reward_moments),
            rollbacks=self.rollbacks,
        )

    def _write_model(self, folder: Path) -> None:
        if self.logger.is_main:
            write_file(folder / MODEL_FILE, (json.dumps(self._model, indent=1) + "\n").encode())

    def _prepare(self) -> tuple[int, dict[str, Any] | None]:
        """Clean the folder and check the free disk space. Called on the main rank before training.
        Returns the number of rollbacks. If the run continues at the checkpoint to which the last
        rollback went back, also returns the position in the data, else None."""
        finish_rollback(self.folder)
        remove_leftovers(self.folder)
        self._fingerprints = fingerprints(self.config)
        if refusal := self.writer.lacks_room():
            raise UserError(
                f"{self.folder}: no room for a checkpoint: {refusal}; free some space, give "
                "another logging.dir, or set checkpoint.interval=0"
            )
        record = read_rollbacks(self.folder)
        if record is None or self.start.state is None or self.rollbacks >= record.number:
            return self.rollbacks, None
        return record.number, record.loader if self._has_prompts_of(record) else None

    def _has_prompts_of(self, record: Rollbacks) -> bool:
        # an earlier version also recorded the paths of the files
        known = {key: value for key, value in record.prompts.items() if key != "prompts"}
        return known == self._prompts()

    def _drop_surplus(self, newest: Position) -> None:
        """Remove the checkpoints that the configuration does not keep. Called on the main rank.
        Checkpoints later than `newest` are damaged and stay, because the run will replace them. The
        checkpoints that a rollback may need stay too, because a collapse is seen only some steps
        after it has begun."""
        section = self.section
        metric_of: dict[Position, float | None] = {}
        paths = checkpoints_in(self.folder)
        for position, path in paths.items():
            if position.order <= newest.order:
                metric_of[position] = None
                if section.keep_best:
                    with contextlib.suppress(DataError):
                        metrics = RunState.read(path).metrics
                        metric_of[position] = metrics.get(section.best_metric)
        extra = surplus(metric_of, section.keep_last, section.keep_best, section.keep_every)
        needed = to_go_back_to([*metric_of], self.watch.healthy_step, self.watch.healthy)
        extra = [position for position in extra if position not in needed]
        self.writer.remove([hide(paths[each]) for each in extra])

    def _stopped(self, position: Position) -> str:
        where = f"after step {position.step} of {position.phase}"
        if position.rolled_out:
            where += f", and with the responses of step {position.step + 1} sampled"
        path = self.folder / position.name
        return f"stopped as asked, {where}: {path}; the same command resumes the run from there"

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            self.logger.note(
                f"warning: problem with a checkpoint: {problem}; the run continues, and tries "
                "again at the next one"
            )

    def _raise(self, problem: str | None) -> None:
        if problem is not None:
            raise UserError(
                f"{self.folder}: the run ends here, because of a problem with saving it: "
                f"{problem}; when that is solved, the same command resumes the run from its newest "
                "checkpoint"
            )


def _is_healthy(position: Position, step: int) -> bool:
    """Whether a checkpoint belongs to an RL step up to `step`, the last healthy step."""
    return position.phase == RL and position.step <= step and not position.rolled_out
