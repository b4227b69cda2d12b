"""`gspo-megatron check`: everything about a run that can be known without starting it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.cli.check_inputs import Checked, check_any
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config.stages import AnyConfig

DEFAULT_GB = 80.0  # of an H100
STAGES = ("rl", "sft", "pretrain")


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "check",
        run,
        "check a configuration of any stage and its input files without starting a run",
        list_name="overrides",
    )
    parser.description += (
        ". With any of --memory, --world-size, --gpu-memory and --suggest, also a dry run: the "
        "model of one rank of each pipeline stage is built and run on torch's meta device, without "
        "a GPU and without memory. Exit codes: 0 sound, 2 something is wrong, 1 sound but larger "
        "than --gpu-memory."
    )
    add_config(parser, required=False)
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="print all keys, or those with WORD in their name or description, and check nothing; "
        "CONFIG.yaml is not needed",
    )
    parser.add_argument(
        "--stage",
        choices=STAGES,
        help="what the configuration is for: `train`, `sft` or `pretrain`; told by its keys unless "
        "given",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="as for a run that is to begin anew: its folder must be empty",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks of the run; as many as the layout asks for unless given",
    )
    parser.add_argument("--memory", action="store_true", help="do the dry run")
    parser.add_argument(
        "--gpu-memory", type=_gigabytes, metavar="GB", help="memory of a GPU (10^9 bytes) to fit"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help=f"search for layouts that fit into --gpu-memory ({DEFAULT_GB:g} unless given)",
    )
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="leave data, tokenizer, weights, run folder and installed packages alone: the run is "
        "for another machine; model.preset= then names the shape of weights that are not here",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what the run will be. Raises ConfigError with everything that is wrong."""
    if arguments.keys is not None:
        return _print_keys(arguments.keys, arguments.stage)
    if arguments.config is None:
        arguments.parser.error("the following arguments are required: CONFIG.yaml")
    from gspo_megatron.cli.check_summary import longest_of, summary
    from gspo_megatron.config.load import load_any_config

    config = load_any_config(arguments.config, arguments.overrides, arguments.stage)
    if arguments.no_files:
        config = _without_weights(config)
    world_size = arguments.world_size or config.world_size_hint()
    problems: list[str] = []
    checked = Checked(config)
    try:
        checked = check_any(
            config, world_size, with_files=not arguments.no_files, fresh=arguments.fresh
        )
    except ConfigError as error:
        problems = str(error).splitlines()
        if not arguments.suggest or not _only_the_layout_is_wrong(config, problems, world_size):
            raise
    dry = arguments.memory or arguments.suggest
    dry = dry or arguments.world_size is not None or arguments.gpu_memory is not None
    config, inputs = checked.config, checked.inputs
    vocab_size = config.resolved_model().vocab_size
    if vocab_size is None and inputs is not None:
        vocab_size = inputs.tokenizer.vocab_size
    if dry and vocab_size is None:
        raise ConfigError(
            ["model.vocab_size = None: the tokenizer decides, which was not read; give a number"]
        )
    if not problems:
        for name, text in summary(checked, world_size):
            print(f"{name:<10} {text}")
    if not dry:
        return 0
    assert vocab_size is not None
    request = Request(config, world_size, vocab_size, longest_of(inputs), arguments.gpu_memory)
    fits = bool(problems) or estimate(request)
    for line in problems:
        print(line, file=sys.stderr)
    if arguments.suggest:
        search(request)
    return 2 if problems else int(not fits)


def _print_keys(word: str, stage: str | None) -> int:
    from gspo_megatron.config.keys import find_keys

    lines = find_keys(word, stage)
    if not lines:
        raise UserError(f"--keys {word}: no key has that in its name or description")
    print("\n".join(lines))
    return 0


def _without_weights(config: AnyConfig) -> AnyConfig:
    """With the preset's shape in the place of weights that are not here. Raises ConfigError where
    no preset is named."""
    try:
        config.resolved_model()
    except ConfigError as error:
        if config.model.preset is None:
            advice = "name its shape, as in model.preset=qwen3-30b-a3b"
            raise ConfigError([f"{line}; {advice}" for line in error.problems]) from None
        return config.model_copy(
            update={"model": config.model.model_copy(update={"hf_path": None})}
        )
    return config


def _gigabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB above 0")
    return number


def _only_the_layout_is_wrong(config: AnyConfig, problems: list[str], world_size: int) -> bool:
    """Whether another layout may solve all problems, so that a search makes sense."""
    return all(line.startswith(("parallel.", f"world size = {world_size}")) for line in problems)


@dataclass(frozen=True)
class Request:
    """What the dry run estimates."""

    config: AnyConfig
    world_size: int
    vocab_size: int
    longest: int | None  # tokens of a prompt or an example; None: as long as allowed
    gpu_gb: float | None


def estimate(request: Request) -> bool:
    """Print the estimate of the layout that is configured; whether it fits."""
    from gspo_megatron.cli import estimate_table

    with _dry_run():
        from gspo_megatron.estimate.layout import HEADROOM, estimate_layout, recompute_modes

        found = estimate_layout(
            request.config, request.world_size, request.vocab_size, request.longest
        )
        modes = recompute_modes(found, request.vocab_size)
    estimate_table.show_layout(found, modes)
    gpu_bytes = None if request.gpu_gb is None else request.gpu_gb * 1e9
    fits = gpu_bytes is None or found.fits(gpu_bytes)
    if gpu_bytes is not None:
        worst = found.worst
        text = (
            f"rank {worst.rank} needs {worst.total / 1e9:,.1f} GB; of {request.gpu_gb:g} GB, "
            f"{1 - HEADROOM:.0%} can be counted on (the rest: gaps, NCCL, CUDA context)"
        )
        out = sys.stdout if fits else sys.stderr
        print(f"{'fits:' if fits else 'does not fit:'} {text}", file=out)
    pairs = estimate_table.figures(found, gpu_bytes)
    print(" ".join(f"{name}={value}" for name, value in pairs.items()))
    return fits


def search(request: Request) -> None:
    """Print the best layouts for this number of ranks."""
    from gspo_megatron.cli import estimate_table
    from gspo_megatron.cli.check_summary import count_parameters

    counts = count_parameters(request.config.resolved_model(), request.vocab_size)
    if counts is None:
        raise UserError("--suggest: the parameters of this model are beyond its formula")
    gpu_gb = request.gpu_gb or DEFAULT_GB
    with _dry_run():
        from gspo_megatron.config import Config
        from gspo_megatron.estimate.suggest import suggest
        from gspo_megatron.estimate.traffic import LEFT_OUT

        found = suggest(
            request.config,
            request.world_size,
            request.vocab_size,
            counts,
            gpu_gb * 1e9,
            longest=request.longest,
        )
    left_out = f"{LEFT_OUT}, the rollout" if isinstance(request.config, Config) else LEFT_OUT
    estimate_table.show_search(found, gpu_gb, left_out)


@contextlib.contextmanager
def _dry_run() -> Iterator[None]:
    """Hide the GPUs: a dry run needs none, and must not take memory of one that is in use.

    Every rank that is built becomes garbage. `gc.freeze` takes the loaded modules, most of what the
    garbage collector would scan, out of its way.
    """
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import gspo_megatron.estimate.suggest  # noqa: F401

        gc.freeze()
        yield
    finally:
        gc.unfreeze()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
