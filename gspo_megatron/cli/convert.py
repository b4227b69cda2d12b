"""`gspo-megatron convert`: converts checkpoints from and to Hugging Face folders, without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import DTYPES, Commands, loading, new_parser
from gspo_megatron.errors import UserError
from gspo_megatron.hub import folder_of
from gspo_megatron.process import ranks
from gspo_megatron.process.failures import exit_code_of

if TYPE_CHECKING:
    import torch

    from gspo_megatron.checkpoint.convert_workers import WorkerShard

_MOST_PROCESSES = 64  # on one machine; a layout with more ranks is probably meant for a cluster


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
    to_ours.add_argument(
        "source",
        metavar="SRC",
        help="a folder with safetensors files, or ORG/NAME[@REVISION] of the Hub",
    )
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
        help="a checkpoint, a run folder, or a folder of checkpoints. Of several checkpoints, the "
        "command takes the newest one whose files all have their full size. It compares each file "
        "with its checksum in manifest.json. If a file was altered, the command fails and writes "
        "nothing; then give the path of an older checkpoint",
    )
    to_hf.add_argument(
        "--adapter",
        action="store_true",
        help="for a run with adapters (model.lora): write only the adapters, as a PEFT folder; "
        "without --adapter they are merged into their base",
    )
    to_hf.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="convert a large model in as many processes as this layout has ranks, for example "
        "tp=2,pp=2; the tensors are the same",
    )
    to_hf.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="also write a model card, README.md, and push the folder to the Hub in one commit, "
        "with the token in HF_TOKEN",
    )
    to_hf.add_argument(
        "--public",
        action="store_true",
        help="with --push: a new repository is public (default: private)",
    )
    for direction in (to_ours, to_hf):
        direction.add_argument(
            "--base",
            metavar="FOLDER",
            help="for adapters: the model that they were trained on, if it has moved: a folder, or "
            "ORG/NAME[@REVISION] of the Hub",
        )
        direction.add_argument("destination", metavar="DST", type=Path, help="a new folder")
        direction.add_argument(
            "--dtype",
            choices=tuple(DTYPES),
            help="the dtype of all tensors except router biases and the decay of delta nets "
            "(default: unchanged)",
        )


def run_import(arguments: argparse.Namespace) -> int:
    with loading():
        from gspo_megatron.checkpoint.convert import hf_to_megatron
        from gspo_megatron.checkpoint.convert_adapters import peft_to_megatron
        from gspo_megatron.families.adapter_map import PEFT_CONFIG

    destination = arguments.destination
    source = folder_of(arguments.source, "SRC", weights=True)
    options = {"dtype": _dtype(arguments), "ignore_custom_code": arguments.ignore_custom_code}
    if (source / PEFT_CONFIG).exists():
        peft_to_megatron(source, destination, base=_base(arguments), **options)
    elif arguments.base is not None:
        wrong = f"{source} holds a whole model and no adapters; leave --base out"
        raise UserError(f"--base {arguments.base}: {wrong}")
    else:
        hf_to_megatron(source, destination, **options)
    print(f"{arguments.destination}: written from {arguments.source}")
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Convert to a Hugging Face folder. This process converts alone, or is one of several ranks, or
    launches ranks."""
    from gspo_megatron.config import Layout
    from gspo_megatron.hf.hub import check_push

    if arguments.public and arguments.push is None:
        arguments.parser.error("--public: only with --push")
    env_size = ranks.world_size_of_rank(os.environ)
    if arguments.push is not None:
        check_push(arguments.push)  # fails here, before a long conversion
    processes = 1 if arguments.layout is None else Layout.parse(arguments.layout).world_size
    if env_size is not None:
        if arguments.layout is not None and processes != env_size:
            raise UserError(
                f"--layout {arguments.layout}: takes {processes} processes, and this one is "
                f"already one of {env_size} (WORLD_SIZE in the environment); do not give --layout "
                "under torchrun or srun"
            )
        from gspo_megatron.checkpoint.convert_workers import shard_of_rank

        with shard_of_rank() as shard:
            code = exit_code_of(lambda: _run_rank(arguments, shard))
            if shard.world_size > 1:
                # The process ends by os._exit. Otherwise about one process in ten aborts with
                # "terminate called without an active exception" (torch 2.13) when it destroys its
                # gloo group. An abort would also hide an error, so the error is told before.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return code
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
        command += ["--base", arguments.base] if arguments.base else []
        # The main rank pushes: only the ranks know which checkpoint they have converted.
        command += ["--push", arguments.push] if arguments.push else []
        command += ["--public"] if arguments.public else []
        return launch(command, processes)
    _push(arguments, _export(arguments))
    return 0


def _run_rank(arguments: argparse.Namespace, shard: WorkerShard) -> int:
    """Convert as one of several ranks. The main rank pushes the folder."""
    taken = _export(arguments, shard)
    shard.gather(None)  # wait until every process has written its files
    if shard.is_main:
        _push(arguments, taken)
    return 0


def _push(arguments: argparse.Namespace, taken: Path) -> None:
    """Write the model card and push the folder, if --push is given. taken: the converted
    checkpoint; a run that goes on may have published a newer one since. Raises DataError."""
    if arguments.push is None:
        return
    from gspo_megatron.checkpoint.run_state import CONFIG_FILE, RunState
    from gspo_megatron.config.load import read_mapping
    from gspo_megatron.hf.hub import push, write_card
    from gspo_megatron.observe.metrics_files import METRICS_FILE, read_metrics

    checkpoint = taken.resolve()
    config, step, scores = {}, None, {}
    if (checkpoint / CONFIG_FILE).is_file():  # a run wrote the checkpoint, not a conversion
        config = read_mapping(checkpoint / CONFIG_FILE)
        step = RunState.read(checkpoint).step
        run = checkpoint.parent.parent
        records = read_metrics(run) if (run / METRICS_FILE).is_file() else []
        for record in records:
            if record["step"] <= step:
                scores |= {k: v for k, v in record.items() if k.startswith("evaluation/")}
    write_card(arguments.destination, arguments.push, config, step, scores)
    print(f"pushing to {arguments.push}", file=sys.stderr, flush=True)
    print(push(arguments.destination, arguments.push, private=not arguments.public))


def _export(arguments: argparse.Namespace, shard: WorkerShard | None = None) -> Path:
    """Convert, and return the checkpoint that was converted. Raises UserError."""
    with loading():
        from gspo_megatron.checkpoint.convert_adapters import any_to_hf
        from gspo_megatron.checkpoint.convert_workers import ALONE

    shard = shard or ALONE
    taken, notes = any_to_hf(
        arguments.source,
        arguments.destination,
        as_peft=arguments.adapter,
        base=_base(arguments),
        dtype=_dtype(arguments),
        shard=shard,
    )
    if shard.is_main:
        for note in notes:
            print(note, file=sys.stderr)
        print(f"{arguments.destination}: written from {taken}")
    return taken


def _base(arguments: argparse.Namespace) -> Path | None:
    return arguments.base and folder_of(arguments.base, "--base", weights=True)


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
