"""`gspo-megatron train`: one process of a run, or the launcher of all of them on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, add_launching, new_parser
from gspo_megatron.cli.check_inputs import check_all
from gspo_megatron.cli.failures import STOPPED
from gspo_megatron.errors import UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.data.inputs import Inputs


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands, "train", run, "train as a configuration says", list_name="overrides"
    )
    add_config(parser)
    add_launching(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train with the parsed arguments."""
    return train(arguments.config, arguments.overrides, arguments.nproc, fresh=arguments.fresh)


def train(
    config_path: str,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    *,
    fresh: bool = False,
) -> int:
    """Be a rank where the environment says so, else be the only one, or launch them all here.

    Returns the exit code. Raises UserError for everything that is wrong with the configuration or
    the run that it would go on with, before any process group or other process exists.
    """
    from gspo_megatron.config import check_config, load_config

    ranks.adopt_slurm_task(os.environ)
    rank_of = ranks.world_size_of_rank(os.environ)
    config = load_config(config_path, overrides)
    world_size = ranks.decide_world_size(config, nproc, rank_of)
    if rank_of is None:
        try:
            inputs = check_all(config, world_size, fresh=fresh)  # torch is not even imported yet
            if _is_finished(config, inputs, fresh):
                return 0
        except UserError as error:
            raise UserError(f"{error}{_advice(config, config_path)}") from error
    else:
        check_config(config, world_size, for_training=True)
    if rank_of is None and world_size > 1:
        from gspo_megatron.cli.launch import launch

        rank_command = [sys.executable, "-m", "gspo_megatron", "train", config_path, *overrides]
        if fresh:
            rank_command.append("--fresh")
        # A run that saves itself when it is told to stop takes as long as its step does.
        return launch(rank_command, world_size, saves_on_signals=config.checkpoint.interval > 0)
    from gspo_megatron.rl.run import run_training

    return 0 if run_training(config, fresh=fresh) else STOPPED


def _is_finished(config: Config, inputs: Inputs | None, fresh: bool) -> bool:
    """Whether the run folder holds this run, done; says so, and adds a report that is missing.

    Raises UserError where the run in the folder is not one to go on with, or a new one could not
    begin with the weights that it names.
    """
    from gspo_megatron.checkpoint.resume import check_given, finished_text, preview, run_folder
    from gspo_megatron.data.inputs import model_vocab_size

    start = preview(config, fresh=fresh)
    if start.state is None and config.model.checkpoint_path is not None:
        assert inputs is not None, "checked without its files"
        check_given(config, model_vocab_size(config, inputs.tokenizer))
    if start.state is None or not start.is_finished:
        return False
    folder = run_folder(config)
    if config.logging.plots and not (folder / "report.html").exists():  # killed just before
        from gspo_megatron.observe.report import finish_run

        finish_run(folder)
    print(finished_text(config, start.state), flush=True)
    return True


def _advice(config: Config, config_path: str) -> str:
    """The script beside an example's configuration, where what it makes is missing."""
    from gspo_megatron.data.inputs import prompt_files

    needed = (config.data.tokenizer, config.model.checkpoint_path, *prompt_files(config).values())
    script = Path(config_path).with_name("run.sh")
    if not script.is_file() or all(path is None or Path(path).exists() for path in needed):
        return ""
    return f"\n{script}: makes what this configuration needs; run it first"
