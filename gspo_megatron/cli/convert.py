"""`gspo-megatron convert`: checkpoints from and to Hugging Face folders, without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, new_parser
from gspo_megatron.errors import UserError

if TYPE_CHECKING:
    import torch

    from gspo_megatron.checkpoint.hf.convert import Share

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_MOST_PROCESSES = 64  # on one machine; a layout may be meant for a cluster


def add_parser(commands: Commands) -> None:
    """Add the command."""
    text = "convert a checkpoint from or to the files of Hugging Face"
    parser = commands.add_parser(
        "convert", help=text, description=text[0].upper() + text[1:], allow_abbrev=False
    )
    directions = parser.add_subparsers(title="directions", metavar="DIRECTION", required=True)
    to_ours = new_parser(
        directions,
        "hf-to-megatron",
        run_import,
        "convert a Hugging Face folder to a checkpoint, which any layout loads",
    )
    to_ours.add_argument("source", metavar="SRC", type=Path, help="a folder with safetensors files")
    to_ours.add_argument(
        "--ignore-custom-code",
        action="store_true",
        help="accept a config.json that names Python code of its own, and go by its model_type; "
        "the code is not run",
    )
    to_hf = new_parser(
        directions,
        "megatron-to-hf",
        run_export,
        "convert a checkpoint, written on any layout, to a Hugging Face folder",
    )
    to_hf.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="a checkpoint, a run, or a folder of checkpoints; of several, the newest one is taken "
        "whose files are all there in their full size. Its checksums are compared first: where its "
        "contents are altered, the command fails; then give the path of an older one",
    )
    to_hf.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="convert a large model in as many processes as this layout has ranks, for example "
        "tp=2,pp=2; the tensors are the same",
    )
    for direction in (to_ours, to_hf):
        direction.add_argument("destination", metavar="DST", type=Path, help="a new folder")
        direction.add_argument(
            "--dtype",
            choices=tuple(_DTYPES),
            help="dtype of all tensors but the biases of routers (default: each keeps its own)",
        )


def run_import(arguments: argparse.Namespace) -> int:
    """Convert to a checkpoint of ours."""
    from gspo_megatron.checkpoint.hf.convert import hf_to_megatron

    hf_to_megatron(
        arguments.source,
        arguments.destination,
        dtype=_dtype(arguments),
        ignore_custom_code=arguments.ignore_custom_code,
    )
    _report(arguments, arguments.source)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Convert to a Hugging Face folder: alone, as a rank, or by launching ranks."""
    from gspo_megatron.config import Layout

    rank_of = ranks.world_size_of_rank(os.environ)
    processes = 1 if arguments.layout is None else Layout.parse(arguments.layout).world_size
    if rank_of is not None:
        if arguments.layout is not None and processes != rank_of:
            raise UserError(
                f"--layout {arguments.layout}: takes {processes} processes, and this one is "
                f"already one of {rank_of} (WORLD_SIZE in the environment); leave --layout out "
                "under torchrun and srun"
            )
        from gspo_megatron.checkpoint.hf.convert import shared_by_ranks

        with shared_by_ranks() as share:
            code = _export(arguments, share)
            if share.world_size > 1:
                # Destroying a gloo group ends about one such process in ten with "terminate called
                # without an active exception" (torch 2.13), after all its work is done.
                share.gather(None)  # every process has written its files
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            return code
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
    return _export(arguments)


def _export(arguments: argparse.Namespace, share: Share | None = None) -> int:
    from gspo_megatron.checkpoint.hf.convert import ALONE, megatron_to_hf

    share = share or ALONE
    taken, notes = megatron_to_hf(
        arguments.source, arguments.destination, dtype=_dtype(arguments), share=share
    )
    if share.is_main:
        _report(arguments, taken, notes)
    return 0


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, _DTYPES[arguments.dtype]) if arguments.dtype else None


def _report(arguments: argparse.Namespace, source: Path, notes: Sequence[str] = ()) -> None:
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{arguments.destination}: written from {source}")
