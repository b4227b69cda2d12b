"""One rank of a pre-training or fine-tuning run, from an already checked configuration."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.hf.writer import check_destination
from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.checkpoint.start import load_starting_weights, open_logger, open_session
from gspo_megatron.config import resolve_parallel
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig, StageConfig
from gspo_megatron.data.inputs import FineTuningInputs, PretrainingInputs, model_vocab_size
from gspo_megatron.models.build import build_policy
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.groups import patience_minutes, set_up_model_parallel, start_processes
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.supervised.loop import Batches, StageComponents, SupervisedLoop

Inputs = FineTuningInputs | PretrainingInputs


def run_stage(config: StageConfig, inputs: Inputs, *, fresh: bool = False) -> bool:
    """Train as this process's rank of the run. Every rank calls it with the same configuration,
    which has passed `check_config` and knows its steps. A run that is already in the run folder is
    continued, unless `fresh` is true: then the folder has to be empty.

    Returns whether the run is done; False if it was told to stop, and is saved. Raises UserError
    for what the user can mend.
    """
    with open_session(config, fresh=fresh) as session:
        if session.start.is_finished and not export_is_due(config):
            session.tell_finished()
            return True
        on_main(lambda: check_export(config))
        session.begin()
        job, hf = assemble_stage(config, inputs, session.start, session.stop)
        with closing(job.record):
            loop = lambda: SupervisedLoop(job).run()  # noqa: E731 (built under the watches)
            done = session.train(loop, job.policy, job.checkpoints, job.record)
            if done:  # not watched: one rank writes, the others wait, for as long as it takes
                _finish(job, hf)
        return done


def _finish(job: StageComponents, hf: Any) -> None:
    """The export, if one is asked for, and the report."""
    path = job.config.export.hf_path
    if path is not None:
        from gspo_megatron.checkpoint.hf.export import export_hf

        export_hf(job.policy, path, hf_config=hf, tokenizer=job.config.data.tokenizer)
    job.record.finish()
    if path is not None and job.record.is_main:
        print(f"model   {path}", flush=True)


def assemble_stage(
    config: StageConfig, inputs: Inputs, start: Start | None = None, stop: StopSignals | None = None
) -> tuple[StageComponents, Any]:
    """Join the other ranks and build this rank's part of everything; the policy has the weights of
    `start`, where there is one. With it comes the config.json of the Hugging Face model that the
    weights go back to, None without one."""
    start = start or Start()
    patience = patience_minutes(config.training.hang_timeout_seconds)
    ranks = start_processes(patience)
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, config.training.seed, patience)
    policy = build_policy(config, parallel, model_vocab_size(config, inputs.tokenizer))
    record = open_logger(config, ranks.is_main, start)
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
    return StageComponents(config, policy, batches, record, checkpoints), hf


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
