"""`gspo-megatron train`: one process of a run, or the launcher of all of them on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.cli.check import check_all
from gspo_megatron.errors import UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config

# A layout for a cluster, started by mistake on a laptop or a login node, is refused rather than
# turned into hundreds of processes. So many are fine on any machine: small models share cores.
_RANKS_WITHOUT_ASKING = 16


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands, "train", run, "train as a configuration says", list_name="overrides"
    )
    add_config(parser)
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks to start on this machine; as many as the layout asks for unless given. "
        "Under torchrun or srun leave it out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train with the parsed arguments."""
    return train(arguments.config, arguments.overrides, arguments.nproc)


def train(config_path: str, overrides: Sequence[str] = (), nproc: int | None = None) -> int:
    """Be a rank where the environment says so, else be the only one, or launch them all here.

    Returns the exit code. Raises UserError for everything that is wrong with the configuration,
    before any process group or other process exists.
    """
    from gspo_megatron.config import check_config, load_config

    ranks.adopt_slurm_task(os.environ)
    rank_of = ranks.world_size_of_rank(os.environ)
    config = load_config(config_path, overrides)
    world_size = decide_world_size(config, nproc, rank_of)
    if rank_of is None:
        check_all(config, world_size)  # with the input files: torch is not even imported yet
    else:
        check_config(config, world_size, for_training=True)
    if rank_of is None and world_size > 1:
        from gspo_megatron.cli.launch import launch

        rank_command = [sys.executable, "-m", "gspo_megatron", "train", config_path, *overrides]
        return launch(rank_command, world_size)
    from gspo_megatron.train.run import run_training

    run_training(config)
    return 0


def decide_world_size(config: Config, nproc: int | None, rank_of: int | None) -> int:
    """How many ranks the run has; `rank_of` is their number where they are started already.

    Raises UserError where `nproc` contradicts it, or nobody asked for that many on one machine.
    """
    if rank_of is not None:
        if nproc not in (None, rank_of):
            raise UserError(
                f"--nproc {nproc}: this process is already one of {rank_of} ranks (WORLD_SIZE in "
                "the environment); leave --nproc out under torchrun and srun"
            )
        return rank_of
    if nproc is not None:
        return nproc
    world_size = config.world_size_hint()
    if world_size > max(_RANKS_WITHOUT_ASKING, os.cpu_count() or 1):
        raise UserError(
            f"layout {config.layout()}: takes {world_size} ranks, which is much for one machine; "
            f"start them with srun or torchrun, or say --nproc {world_size} to have them all here"
        )
    return world_size
