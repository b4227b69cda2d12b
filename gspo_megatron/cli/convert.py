"""`gspo-megatron convert`: converts checkpoints from and to Hugging Face folders, without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, loading, new_parser
from gspo_megatron.errors import UserError
from gspo_megatron.families.adapter_map import PEFT_CONFIG
from gspo_megatron.process import ranks

if TYPE_CHECKING:
    import torch

    from gspo_megatron.checkpoint.convert_workers import WorkerShard

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_MOST_PROCESSES = 64  # on one machine: a layout with more ranks may be meant for a cluster


def add_parser(commands: Commands) -> None:
    text = "convert a checkpoint from or to a Hugging Face folder"
    parser = commands.add_parser(
        "convert", help=text, description=text[0].upper() + text[1:], allow_abbrev=False
    )
    directions = parser.add_subparsers(title="directions", metavar="DIRECTION", required=True)
    to_ours = new_parser(
        directions,
        "hf-to-megatron",
        run_import,
        "convert a Hugging Face folder to a checkpoint, which can be loaded on any layout",
    )
    to_ours.add_argument("source", metavar="SRC", type=Path, help="a folder with safetensors files")
    to_ours.add_argument(
        "--ignore-custom-code",
        action="store_true",
        help="accept a config.json that names custom Python code: only its model_type counts, and "
        "the code is not run",
    )
    to_hf = new_parser(
        directions,
        "megatron-to-hf",
        run_export,
        "convert a checkpoint of any layout to a Hugging Face folder",
    )
    to_hf.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="a checkpoint, a run folder, or a folder of checkpoints. Of several checkpoints the "
        "newest one is taken of which no file is missing or cut short. Its checksums are compared "
        "first: if its contents are altered the command fails; then give the path of an older one",
    )
    to_hf.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with adapters (model.lora): write these alone, as a PEFT folder; without it "
        "they are merged into their base",
    )
    to_hf.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="convert a large model in as many processes as this layout has ranks, for example "
        "tp=2,pp=2; the tensors are the same",
    )
    for direction in (to_ours, to_hf):
        direction.add_argument(
            "--base",
            metavar="FOLDER",
            type=Path,
            help="of adapters: the model that they were trained on, if it is not where it was",
        )
        direction.add_argument("destination", metavar="DST", type=Path, help="a new folder")
        direction.add_argument(
            "--dtype",
            choices=tuple(_DTYPES),
            help="the dtype of all tensors except router biases (default: unchanged)",
        )


def run_import(arguments: argparse.Namespace) -> int:
    with loading():
        from gspo_megatron.checkpoint.convert import hf_to_megatron
        from gspo_megatron.checkpoint.convert_adapters import peft_to_megatron

    source, destination = arguments.source, arguments.destination
    options = {"dtype": _dtype(arguments), "ignore_custom_code": arguments.ignore_custom_code}
    if (source / PEFT_CONFIG).exists():
        peft_to_megatron(source, destination, base=arguments.base, **options)
    elif arguments.base is not None:
        wrong = f"{source} holds a whole model and no adapters; leave --base out"
        raise UserError(f"--base {arguments.base}: {wrong}")
    else:
        hf_to_megatron(source, destination, **options)
    print(f"{arguments.destination}: written from {arguments.source}")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Convert to a Hugging Face folder: as the only process, as a rank, or by launching ranks."""
    from gspo_megatron.config import Layout

    rank_of = ranks.world_size_of_rank(os.environ)
    processes = 1 if arguments.layout is None else Layout.parse(arguments.layout).world_size
    if rank_of is not None:
        if arguments.layout is not None and processes != rank_of:
            raise UserError(
                f"--layout {arguments.layout}: takes {processes} processes, and this one is "
                f"already one of {rank_of} (WORLD_SIZE in the environment); do not give --layout "
                "under torchrun or srun"
            )
        from gspo_megatron.checkpoint.convert_workers import shard_of_rank

        with shard_of_rank() as shard:
            _export(arguments, shard)
            if shard.world_size > 1:
                # Destroying a gloo group ends about one such process in ten with "terminate called
                # without an active exception" (torch 2.13), after all its work is done.
                shard.gather(None)  # every process has written its files
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        return 0
    if processes > _MOST_PROCESSES:
        raise UserError(
            f"--layout {arguments.layout}: takes {processes} processes; allowed: up to "
            f"{_MOST_PROCESSES} on one machine, any number under srun and torchrun"
        )
    if processes > 1:
        from gspo_megatron.process.launcher import launch

        command = [sys.executable, "-m", "gspo_megatron", "convert", "megatron-to-hf"]
        command += [str(arguments.source), str(arguments.destination)]
        command += ["--dtype", arguments.dtype] if arguments.dtype else []
        command += ["--adapter"] if arguments.adapter else []
        command += ["--base", str(arguments.base)] if arguments.base else []
        return launch(command, processes)
    _export(arguments)
    return 0


def _export(arguments: argparse.Namespace, shard: WorkerShard | None = None) -> None:
    with loading():
        from gspo_megatron.checkpoint.convert_adapters import any_to_hf
        from gspo_megatron.checkpoint.convert_workers import ALONE

    shard = shard or ALONE
    taken, notes = any_to_hf(
        arguments.source,
        arguments.destination,
        as_peft=arguments.adapter,
        base=arguments.base,
        dtype=_dtype(arguments),
        shard=shard,
    )
    if shard.is_main:
        for note in notes:
            print(note, file=sys.stderr)
        print(f"{arguments.destination}: written from {taken}")


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, _DTYPES[arguments.dtype]) if arguments.dtype else None
