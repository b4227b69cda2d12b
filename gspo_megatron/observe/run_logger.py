"""Writes metrics, samples and reports into the run folder. Only the main rank writes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.config import to_shown_yaml
from gspo_megatron.config.phases import phases_of
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import tell
from gspo_megatron.files import make_folder, os_errors, sync, write_atomically, write_durably
from gspo_megatron.observe.environment import write_environment
from gspo_megatron.observe.metrics_files import (
    CHANGES_FILE,
    DRAWS_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    RL,
    SAMPLES_FILE,
    JsonLinesWriter,
    MetricsWriter,
    Record,
    changed_config,
    changed_configs,
    read_changes,
    read_metrics,
)
from gspo_megatron.observe.progress import Progress
from gspo_megatron.observe.trackers import RunEnd, open_trackers


class RunLogger:
    """Writes metrics, samples, trackers and the progress display; only on the main rank. As a
    context manager it closes the files, and tells the trackers of a failure."""

    def __init__(
        self,
        config: AnyConfig,
        is_main: bool,
        resumed_at: tuple[str, int] | None = None,
        *,
        has_changed: bool = False,
        is_unlogged: bool = False,
    ) -> None:
        """Open the files. `resumed_at` is the phase and step at which the run resumes,
        `has_changed` says that it resumes with other values, and `is_unlogged` that the metrics of
        this step are still to be written.

        If a run is resumed, its records of later steps are dropped. Without `resumed_at` the folder
        must hold no earlier run: see `move_earlier_run`. Raises UserError if the folder or its
        files cannot be created, or if the metrics of the resumed run are damaged.
        """
        self.is_main = is_main
        self.folder = Path(str(config.logging.dir))
        self.plots = config.logging.plots
        self._progress: Progress | None = None
        if not is_main:
            return
        assert resumed_at or not (self.folder / METRICS_FILE).exists(), "an earlier run's folder"
        with os_errors(f"logging.dir = {str(self.folder)!r}", "cannot be made"):
            make_folder(self.folder)
        self._trackers = open_trackers(
            config.logging.trackers, self.folder, config.model_dump(mode="json")
        )
        try:
            self._begin(config, resumed_at, has_changed, is_unlogged)
        except BaseException:
            self._trackers.close(RunEnd.FAILED)
            raise

    def _begin(
        self,
        config: AnyConfig,
        resumed_at: tuple[str, int] | None,
        has_changed: bool,
        is_unlogged: bool,
    ) -> None:
        """Open the files, and write what is known at the start."""
        self._metrics = MetricsWriter(self.folder)
        self._draws = JsonLinesWriter(self.folder / DRAWS_FILE)
        self._samples = JsonLinesWriter(self.folder / SAMPLES_FILE)
        self._evaluation = JsonLinesWriter(self.folder / EVALUATION_FILE)
        self._files = (self._metrics, self._draws, self._samples, self._evaluation)
        if resumed_at is not None:
            phase, step = resumed_at
            for file in self._files:
                # An earlier start may have been killed after it wrote the metrics of this step.
                is_late = is_unlogged and file in (self._metrics, self._evaluation)
                last = step - 1 if is_late else step
                kept = file.truncate_after(last, phase)
                if file is self._metrics:
                    self._tell_missing(kept, last)
            # a change that was taken back is still in the file
            undone = [] if phases_of(config) else read_changes(self.folder)
            if has_changed or any(each["step"] >= step for each in undone):
                self._trackers.forget_after(phase, step)
        if config.logging.trackers:
            self._trackers.catch_up(read_metrics(self.folder))
        rollout = getattr(config, "rollout", None)  # fine-tuning and pre-training have no rollout
        has_servers = rollout is not None and rollout.engine == "vllm"
        write_environment(self.folder, rollout.vllm.python if has_servers else None)
        self.write_config(config)

    def _tell_missing(self, records: Sequence[Record], last: int) -> None:
        """Warn if the records do not reach the step `last`, for example because the file is older
        than the checkpoint. Nothing but reports and trackers reads them."""
        step = records[-1]["step"] if records else 0
        if step < last:
            tell(
                f"warning: {self.folder / METRICS_FILE}: ends at step {step}, and the run resumes "
                f"after step {last}; the metrics of the steps between them are lost"
            )

    def write_config(self, config: AnyConfig, unread: Mapping[str, str] | None = None) -> None:
        """Write config.resolved.yaml. `unread`: keys without effect in this run, with reasons."""
        if self.is_main:
            text = to_shown_yaml(config, unread or {})
            write_atomically(self.folder / "config.resolved.yaml", text.encode())

    def begin_phase(
        self,
        step: int,
        changed: Sequence[str],
        run: AnyConfig,
        phase: AnyConfig,
        *,
        has_rollouts: bool = False,
    ) -> None:
        """Record that the run goes on after `step` with the configuration `phase`. `changed` has
        one line for each key that gets a new value there. `has_rollouts`: the run goes on with
        responses of step + 1, which were generated with the values of `phase`."""
        has_phases, stage = bool(phases_of(run)), run.phase
        is_constant = not (changed or has_phases or (self.folder / CHANGES_FILE).exists())
        if is_constant or not self.is_main:
            return
        self.write_config(run)
        # A rollback or a resume may have gone back to a step before a recorded change.
        last_kept = step if has_rollouts else step - 1
        with JsonLinesWriter(self.folder / CHANGES_FILE) as file:
            file.truncate_after(last_kept, stage)
            if changed:
                file.append({"phase": stage, "step": step, "changed": list(changed)})
                file.sync()  # the checkpoints of later steps must not be newer
        recorded = changed_configs(self.folder)
        for first in [first for first in recorded if first > last_kept + 1]:
            recorded.pop(first).unlink()
        if changed or step == 0:
            recorded[step + 1] = changed_config(self.folder, step + 1)
        if recorded:  # keys without effect on the training may have new values
            if has_phases:  # whose first ones would change these values again
                training = phase.training.model_copy(update={"phases": []})
                phase = phase.model_copy(update={"training": training})
            path = recorded[max(recorded)]
            with os_errors(path, "cannot be written"):
                write_durably(path, to_shown_yaml(phase, {}).encode())

    def progress(self, total: int, title: str, done: int = 0) -> Progress:
        """Return a progress display of one phase; `done` of its steps were finished earlier."""
        self._progress = Progress(total, title, enabled=self.is_main, initial_step=done)
        return self._progress

    def note(self, text: str) -> None:
        """Print a permanent line of text, also while the progress bar is shown."""
        if self._progress is not None:
            self._progress.note(text)
        elif self.is_main:
            tell(text)

    def sync(self) -> None:
        """Wait until all records are on the disk, because a checkpoint must not be newer than the
        records of its steps.

        Raises UserError on the main rank if the disk refuses; the launcher stops the other ranks.
        """
        if self.is_main:
            for file in self._files:
                file.sync()

    def go_back(self, step: int, name: str) -> None:
        """Prepare a rollback to `step`: copy metrics.jsonl to the file `name` of the run folder,
        and let trackers get the repeated steps again. Raises OSError."""
        if self.is_main:
            self._trackers.forget_after(RL, step)
            shutil.copyfile(self.folder / METRICS_FILE, self.folder / name)
            sync(self.folder / name)  # the later steps are then dropped from metrics.jsonl

    def write(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics. Raises UserError as `sync` does."""
        if self.is_main:
            self._metrics.write({"phase": phase, "step": step, **metrics})
            self._trackers.log(step, {"phase": phase, **metrics})

    def write_draws(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the results of a step's prompts: see `rl.rollouts.Collector.judge`."""
        if self.is_main:
            for record in records:
                self._draws.append(record)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write some responses of a step: see `metrics_files.sample_row`."""
        if self.is_main:
            for row in rows:
                self._samples.append({"step": step, **row})

    def write_evaluation(self, step: int, responses: Sequence[Mapping[str, Any]]) -> None:
        """Write the held-out responses of an evaluation."""
        if self.is_main:
            for response in responses:
                self._evaluation.append({"phase": RL, "step": step, **response})

    def finish(self) -> None:
        """Close the files; write the plots and the report, print the summary."""
        if not self.is_main:
            return
        self.close(RunEnd.FINISHED)
        # The import is here, because only the main rank needs the module.
        from gspo_megatron.observe.report import finish_run

        finish_run(self.folder, plots=self.plots)

    def close(self, end: RunEnd = RunEnd.KILLED) -> None:
        """Close the files. Only the first call has an effect."""
        if self.is_main:
            for file in self._files:
                file.close()
            self._trackers.close(end)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(RunEnd.KILLED if kind is None else RunEnd.FAILED)
