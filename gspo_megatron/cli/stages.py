"""`gspo-megatron pretrain` and `sft`: a rank of such a run, or the launcher of all of them here."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, add_launching, new_parser
from gspo_megatron.cli.failures import STOPPED

if TYPE_CHECKING:
    from gspo_megatron.config.stages import StageConfig

STAGES = {
    "pretrain": "pre-train a model on tokenized corpora",
    "sft": "fine-tune a model on conversations, or prompts with answers",
}


def add_parser(commands: Commands) -> None:
    """Add both commands to the parser."""
    for name, text in STAGES.items():
        parser = new_parser(commands, name, partial(run, name), text, list_name="overrides")
        add_config(parser)
        add_launching(parser)


def run(name: str, arguments: argparse.Namespace) -> int:
    """Be a rank if the environment says so, else be the only one, or launch all of them here.

    Returns the exit code. Raises UserError for everything that is wrong with the configuration, its
    files or the run that it would resume, before any process group or other process exists.
    """
    from gspo_megatron.cli.check_inputs import check_stage
    from gspo_megatron.config.load import load_config
    from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig

    ranks.adopt_slurm_task(os.environ)
    rank_of = ranks.world_size_of_rank(os.environ)
    schema = PretrainingConfig if name == "pretrain" else FineTuningConfig
    config: Any = load_config(arguments.config, arguments.overrides, schema)
    world_size = ranks.decide_world_size(config, arguments.nproc, rank_of)
    config, inputs = check_stage(config, world_size, fresh=arguments.fresh)
    if rank_of is None and _is_finished(config, inputs, arguments.fresh):
        return 0
    if rank_of is None and world_size > 1:
        from gspo_megatron.cli.launch import launch

        command = [sys.executable, "-m", "gspo_megatron", name, arguments.config]
        command += arguments.overrides + (["--fresh"] if arguments.fresh else [])
        return launch(command, world_size, saves_on_signals=config.checkpoint.interval > 0)
    from gspo_megatron.supervised.run import run_stage

    return 0 if run_stage(config, inputs, fresh=arguments.fresh) else STOPPED


def _is_finished(config: StageConfig, inputs: Any, fresh: bool) -> bool:
    """Whether the run folder holds this run, finished and exported; prints that it does.

    Raises UserError if the run in the folder cannot be resumed, or if a new one could not begin
    with the weights that it names.
    """
    from gspo_megatron.checkpoint.resume import check_given, finished_text, preview
    from gspo_megatron.data.inputs import model_vocab_size

    start = preview(config, fresh=fresh)
    if start.state is None and config.model.checkpoint_path is not None:
        check_given(config, model_vocab_size(config, inputs.tokenizer))
    path = config.export.hf_path
    exported = path is None or (Path(path) / "config.json").exists()
    if start.state is None or not (start.is_finished and exported):
        return False
    print(finished_text(config, start.state), flush=True)
    return True
