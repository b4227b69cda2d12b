"""One rank of a pre-training or fine-tuning run, from an already checked configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.hf.writer_folder import check_destination
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start, finished_text, run_folder
from gspo_megatron.checkpoint.run_lock import run_lock
from gspo_megatron.checkpoint.start import (
    count_restart,
    find_start,
    load_starting_weights,
    move_earlier_run,
    open_record,
)
from gspo_megatron.config.parallel import resolve_parallel
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig, StageConfig
from gspo_megatron.data.inputs import model_vocab_size
from gspo_megatron.data.stage_inputs import FineTuningInputs, PretrainingInputs
from gspo_megatron.models.build import build_policy
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import (
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
)
from gspo_megatron.platform.stop import StopRun, StopSignals
from gspo_megatron.platform.watch import watched
from gspo_megatron.supervised.loop import Batches, StageJob, SupervisedLoop

Inputs = FineTuningInputs | PretrainingInputs


def run_stage(config: StageConfig, inputs: Inputs, *, fresh: bool = False) -> bool:
    """Train as this process's rank of the run; every rank calls it with the same configuration,
    which has passed `check_config` and knows its steps. An earlier run in the run folder is gone on
    with, unless `fresh`, which wants that folder empty.

    Returns whether the run is done; False where it was told to stop, and is saved. Raises UserError
    for what the user can mend.
    """
    folder = run_folder(config)
    with run_lock() as lock, StopSignals(enabled=config.checkpoint.interval > 0) as stop:
        try:
            ranks = start_processes(patience_minutes(config.training.hang_timeout_seconds))
            on_main(lambda: lock.hold(folder))
            start = find_start(config, fresh=fresh)
            if start.is_finished and not export_is_due(config):
                assert start.state is not None
                if ranks.is_main:
                    print(finished_text(config, start.state), flush=True)
                return True
            on_main(lambda: check_export(config))
            on_main(lambda: count_restart(config, start))
            if start.state is None:
                on_main(lambda: move_earlier_run(folder, lock))
            job, hf = assemble_stage(config, inputs, start, stop)
            try:
                with watched(config, job.policy.models, ranks, stop):
                    done = _run(job)
                if done:  # not watched: one rank writes, the others wait, for as long as it takes
                    _finish(job, hf)
                return done
            finally:
                job.record.close()
        finally:
            stop_processes()


def _run(job: StageJob) -> bool:
    try:
        SupervisedLoop(job).run()
        job.checkpoints.close()
    except StopRun as stopped:
        job.checkpoints.close()
        job.record.note(str(stopped))
        return False
    return True


def _finish(job: StageJob, hf: Any) -> None:
    """The export, where one is asked for, and the report."""
    path = job.config.export.hf_path
    if path is not None:
        from gspo_megatron.checkpoint.hf.export import export_hf

        export_hf(job.policy, path, hf_config=hf, tokenizer=job.config.data.tokenizer)
    job.record.finish()
    if path is not None and job.record.is_main:
        print(f"model   {path}", flush=True)


def assemble_stage(
    config: StageConfig, inputs: Inputs, start: Start | None = None, stop: StopSignals | None = None
) -> tuple[StageJob, Any]:
    """Join the other ranks and build this rank's part of everything; the policy has the weights of
    `start`, where there is one. With it comes the config.json of the Hugging Face model that the
    weights go back to, None without one."""
    start = start or Start()
    patience = patience_minutes(config.training.hang_timeout_seconds)
    ranks = start_processes(patience)
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed, patience)
    policy = build_policy(config, parallel, model_vocab_size(config, inputs.tokenizer))
    record = open_record(config, ranks.is_main, start)
    hf = load_starting_weights(config, policy, start, record)
    stop = stop or StopSignals(enabled=False)
    checkpoints = Checkpoints(config, policy, record, start, stop, hf)
    batches: Batches
    if isinstance(config, FineTuningConfig):
        from gspo_megatron.supervised.batches import FineTuningBatches

        assert isinstance(inputs, FineTuningInputs)
        pad_id = inputs.tokenizer.pad_id
        batches = FineTuningBatches(config, policy, pad_id, inputs.train, inputs.evaluation)
        for line in [*_left_out(inputs), *(f"warning: {line}" for line in inputs.warnings)]:
            record.note(line)
    else:
        from gspo_megatron.supervised.pretraining import PretrainingBatches

        assert isinstance(config, PretrainingConfig) and isinstance(inputs, PretrainingInputs)
        goes_on = start.checkpoint is not None
        batches = PretrainingBatches(config, policy, inputs, goes_on=goes_on)
    return StageJob(config, policy, batches, record, checkpoints), hf


def export_is_due(config: StageConfig) -> bool:
    """Whether the run has to write a Hugging Face folder that is not there."""
    path = config.export.hf_path
    return path is not None and not (Path(path) / "config.json").exists()


def check_export(config: StageConfig) -> None:
    """Raise DataError, before anything is trained, where the folder to write is taken."""
    if config.export.hf_path is not None:
        check_destination(Path(config.export.hf_path))


def _left_out(inputs: FineTuningInputs) -> list[str]:
    lines = []
    for name, data in (("training", inputs.train), ("evaluation", inputs.evaluation)):
        if data is None:
            continue
        for what, count in (("left out", data.counts.dropped), ("cut", data.counts.truncated)):
            if count:
                lines.append(f"{name} examples that are too long: {count} {what}")
    return lines
