"""Runs one rank of a pre-training, fine-tuning or preference-model run, from a checked
configuration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.manager import Checkpoints
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.checkpoint.start import open_session, start_model
from gspo_megatron.config.stages import FineTuningConfig, PreferenceConfig, PretrainingConfig
from gspo_megatron.data.inputs import ExampleInputs, PretrainingInputs, model_vocab_size
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.writer import check_destination
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.supervised.batches import FineTuningBatches
from gspo_megatron.supervised.loop import Batches, SupervisedLoop
from gspo_megatron.supervised.preferences import PreferenceBatches
from gspo_megatron.supervised.pretraining import PretrainingBatches

Inputs = ExampleInputs | PretrainingInputs
Stage = FineTuningConfig | PretrainingConfig | PreferenceConfig


def run_stage(config: Stage, inputs: Inputs, *, fresh: bool = False, change: bool = False) -> bool:
    """Train on this rank. Every rank calls this with the same configuration.

    The configuration has passed `check_config`, and its number of steps is known. If the run folder
    holds a run, it is continued. With `fresh`, the folder must be empty. `change`: see `conclude`.

    Returns True if the run is done, False if it was stopped and saved. Raises UserError.
    """
    export = None if config.export.hf_path is None else Path(config.export.hf_path)
    with open_session(config, fresh=fresh, change=change) as session:
        is_exported = export is None or (export / "config.json").exists()
        if session.start.is_finished and is_exported:
            session.tell_finished()
            return True
        if export is not None:  # a folder that cannot be used is refused before training
            on_main(lambda: check_destination(export))
        session.begin()
        loop, hf = assemble_stage(config, inputs, session.start, session.stop)
        with loop.logger:
            step = loop.checkpoints.finished_steps
            loop.logger.begin_phase(step, session.start.changed, config, config)
            is_done = session.train(loop.run, loop.policy, loop.checkpoints.close, loop.logger)
            # No watchdog runs here, because one rank writes and all other ranks may wait for long.
            if is_done:
                if export is not None:
                    tokenizer = config.data.tokenizer
                    export_hf(loop.policy, str(export), hf_config=hf, tokenizer=tokenizer)
                loop.logger.finish()
                if export is not None and loop.logger.is_main:
                    print(f"model   {config.export.hf_path}", flush=True)
        return is_done


def assemble_stage(
    config: Stage, inputs: Inputs, start: Start, stop: StopSignals
) -> tuple[SupervisedLoop, Any]:
    """Join the other ranks and build this rank's part of the run.

    The policy has the weights of `start`. Also returns the config.json of the Hugging Face model
    from which the weights come, or None."""
    with ExitStack() as if_this_fails:
        _, policy, logger, hf = start_model(
            config, model_vocab_size(config, inputs.tokenizer), start
        )
        if_this_fails.enter_context(logger)
        checkpoints = Checkpoints(config, policy, logger, start, stop, hf)
        batches: Batches
        if isinstance(inputs, ExampleInputs):
            is_preference = isinstance(config, PreferenceConfig)
            kind: Any = PreferenceBatches if is_preference else FineTuningBatches
            batches = kind(config, policy, inputs.tokenizer.pad_id, inputs.train, inputs.evaluation)
            for name, data in (("training", inputs.train), ("evaluation", inputs.evaluation)):
                for line in data.notes() if data is not None else ():
                    logger.note(f"{name} {line}")
            for line in inputs.warnings:
                logger.note(f"warning: {line}")
        else:
            assert isinstance(config, PretrainingConfig) and isinstance(inputs, PretrainingInputs)
            resumed = start.checkpoint is not None
            batches = PretrainingBatches(config, policy, inputs, resumed=resumed)
        loop = SupervisedLoop(config, policy, batches, logger, checkpoints)
        if_this_fails.pop_all()
    return loop, hf
