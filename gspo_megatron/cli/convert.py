"""`gspo-megatron convert`: checkpoints from and to Hugging Face folders, without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, new_parser
from gspo_megatron.errors import UserError

_DTYPES = {"bf16": "BF16", "fp32": "F32"}  # as safetensors files call them
# Processes that nobody asked for by number: those of a layout meant for a cluster.
_MOST_PROCESSES = 64


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "convert a checkpoint from or to the files of Hugging Face"
    parser = commands.add_parser(
        "convert", help=text, description=text[0].upper() + text[1:], allow_abbrev=False
    )
    directions = parser.add_subparsers(title="directions", metavar="DIRECTION", required=True)
    to_ours = new_parser(
        directions,
        "hf-to-megatron",
        run_import,
        "make a checkpoint, to be trained on any layout, of a Hugging Face folder",
    )
    to_ours.add_argument("source", metavar="SRC", type=Path, help="a folder with safetensors files")
    to_ours.add_argument(
        "--ignore-custom-code",
        action="store_true",
        help="take a folder whose config.json names code of its own for what its model_type says; "
        "the code is not run",
    )
    to_hf = new_parser(
        directions,
        "megatron-to-hf",
        run_export,
        "make a Hugging Face folder of a checkpoint that was written on any layout",
    )
    to_hf.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="a checkpoint; of a run or of its checkpoints folder, the newest of which no file is "
        "missing or cut short. Contents are verified while they are read: where they are altered, "
        "the command ends and names the checkpoint; give an older one by its path then",
    )
    to_hf.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="convert a large model in as many processes as this layout has ranks, as tp=2,pp=2; "
        "the result is the same",
    )
    for direction in (to_ours, to_hf):
        direction.add_argument("destination", metavar="DST", type=Path, help="a new folder")
        direction.add_argument(
            "--dtype",
            choices=tuple(_DTYPES),
            help="of all tensors but the biases of routers (default: each keeps its own)",
        )


def run_import(arguments: argparse.Namespace) -> int:
    """Convert to a checkpoint of ours."""
    from gspo_megatron.checkpoint.hf.offline import hf_to_megatron

    hf_to_megatron(
        arguments.source,
        arguments.destination,
        dtype=_dtype(arguments),
        ignore_custom_code=arguments.ignore_custom_code,
    )
    _tell(arguments, arguments.source)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Convert to a Hugging Face folder: alone, as a rank, or as the launcher of the ranks."""
    from gspo_megatron.config import Layout

    ranks.adopt_slurm_task(os.environ)
    rank_of = ranks.world_size_of_rank(os.environ)
    processes = 1 if arguments.layout is None else Layout.parse(arguments.layout).world_size
    if rank_of is not None:
        if arguments.layout is not None and processes != rank_of:
            raise UserError(
                f"--layout {arguments.layout}: takes {processes} processes, and this one is "
                f"already one of {rank_of} (WORLD_SIZE in the environment); leave --layout out "
                "under torchrun and srun"
            )
        return _export_as_rank(arguments)
    if processes > _MOST_PROCESSES:
        raise UserError(
            f"--layout {arguments.layout}: takes {processes} processes; legal: {_MOST_PROCESSES} "
            "on one machine, any number under srun and torchrun"
        )
    if processes > 1:
        from gspo_megatron.cli.launch import launch

        command = [sys.executable, "-m", "gspo_megatron", "convert", "megatron-to-hf"]
        command += [str(arguments.source), str(arguments.destination)]
        command += ["--dtype", arguments.dtype] if arguments.dtype else []
        return launch(command, processes)
    from gspo_megatron.checkpoint.hf.offline import megatron_to_hf

    taken, notes = megatron_to_hf(arguments.source, arguments.destination, dtype=_dtype(arguments))
    _tell(arguments, taken, notes)
    return 0


def _export_as_rank(arguments: argparse.Namespace) -> int:
    from gspo_megatron.checkpoint.hf.offline import megatron_to_hf
    from gspo_megatron.checkpoint.hf.offline_share import shared_by_ranks

    with shared_by_ranks() as share:
        taken, notes = megatron_to_hf(
            arguments.source, arguments.destination, dtype=_dtype(arguments), share=share
        )
    if share.is_main:
        _tell(arguments, taken, notes)
    return 0


def _dtype(arguments: argparse.Namespace) -> str | None:
    return _DTYPES[arguments.dtype] if arguments.dtype else None


def _tell(arguments: argparse.Namespace, source: Path, notes: Sequence[str] = ()) -> None:
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{arguments.destination}: written, and every tensor compared with {source}")
