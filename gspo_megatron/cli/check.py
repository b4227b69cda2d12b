"""`gspo-megatron check`: everything about a run that can be known without starting it."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.data.inputs import Inputs

DEFAULT_GB = 80.0  # of an H100


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "check",
        run,
        "check a configuration and its input files without starting a run",
        list_name="overrides",
    )
    parser.description += (
        ". With any of --memory, --world-size, --gpu-memory and --suggest, also a dry run: the "
        "model of one rank of each pipeline stage is built and run on torch's meta device, without "
        "a GPU and without memory. Exit codes: 0 sound, 2 something is wrong, 1 sound but larger "
        "than --gpu-memory."
    )
    add_config(parser)
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
        help="leave prompts, tokenizer and weights alone, which may be on another machine; a "
        "shape that model.hf_path would tell is then named by model.preset=",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what the run will be. Raises ConfigError with everything that is wrong."""
    from gspo_megatron.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if arguments.no_files:
        config = _without_weights(config)
    world_size = arguments.world_size or config.world_size_hint()
    problems: list[str] = []
    inputs = None
    try:
        inputs = check_all(config, world_size, with_files=not arguments.no_files)
    except ConfigError as error:
        problems = str(error).splitlines()
        if not arguments.suggest or not _only_the_layout_is_wrong(config, problems, world_size):
            raise
    dry = arguments.memory or arguments.suggest
    dry = dry or arguments.world_size is not None or arguments.gpu_memory is not None
    vocab_size = config.resolved_model().vocab_size
    if vocab_size is None and inputs is not None:
        vocab_size = inputs.tokenizer.vocab_size
    if dry and vocab_size is None:
        raise ConfigError(
            ["model.vocab_size = None: the tokenizer decides, which was not read; give a number"]
        )
    if not problems:
        for name, text in summary(config, world_size, inputs):
            print(f"{name:<10} {text}")
    if not dry:
        return 0
    assert vocab_size is not None
    request = Request(config, world_size, vocab_size, _longest(inputs), arguments.gpu_memory)
    fits = bool(problems) or estimate(request)
    for line in problems:
        print(line, file=sys.stderr)
    if arguments.suggest:
        search(request)
    return 2 if problems else int(not fits)


def _without_weights(config: Config) -> Config:
    """With the preset's shape in the place of a Hugging Face folder that is not here. Raises
    ConfigError where no preset is named."""
    folder = config.model.hf_path
    if folder is None or Path(folder, "config.json").exists():
        return config
    if "preset" not in config.model.model_fields_set:
        raise ConfigError(
            [
                f"model.hf_path = {folder!r}: not here; name its shape, as in "
                "model.preset=qwen3-30b-a3b"
            ]
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"hf_path": None})})


def _gigabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB above 0")
    return number


def _only_the_layout_is_wrong(config: Config, problems: list[str], world_size: int) -> bool:
    """Whether another layout would do: then there is something to search for."""
    return all(line.startswith(("parallel.", f"world size = {world_size}")) for line in problems)


def _longest(inputs: Inputs | None) -> int | None:
    if inputs is None:
        return None
    return max(len(p.token_ids) for prompts in inputs.files.values() for p in prompts)


@dataclass(frozen=True)
class Request:
    """What the dry run is of."""

    config: Config
    world_size: int
    vocab_size: int
    longest_prompt: int | None  # in tokens; None: as long as allowed
    gpu_gb: float | None


def estimate(request: Request) -> bool:
    """Print the estimate of the layout that is configured; whether it fits."""
    from gspo_megatron.cli import estimate_table

    with _no_gpu():
        from gspo_megatron.estimate.layout import HEADROOM, estimate_layout, recompute_modes

        found = estimate_layout(
            request.config, request.world_size, request.vocab_size, request.longest_prompt
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
    from gspo_megatron.cli.parameters import count_parameters

    counts = count_parameters(request.config.resolved_model(), request.vocab_size)
    if counts is None:
        raise UserError("--suggest: the parameters of this model are beyond its formula")
    gpu_gb = request.gpu_gb or DEFAULT_GB
    with _no_gpu():
        from gspo_megatron.estimate.cost import LEFT_OUT
        from gspo_megatron.estimate.suggest import suggest

        found = suggest(
            request.config,
            request.world_size,
            request.vocab_size,
            counts,
            gpu_gb * 1e9,
            longest_prompt=request.longest_prompt,
        )
    estimate_table.show_search(found, gpu_gb, LEFT_OUT)


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """A dry run needs none, and must not take memory of one that is in use."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def check_all(config: Config, world_size: int, *, with_files: bool = True) -> Inputs | None:
    """Check a loaded configuration with everything it names; None without the files.

    Raises ConfigError with the problems of all parts: what keys must satisfy together, reward,
    an objective of the user's own, tokenizer, prompt files and their lengths.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.data.inputs import read_inputs
    from gspo_megatron.rewards.registry import get_reward

    problems: list[str] = []
    inputs = None
    with _gathered_in(problems):
        check_config(config, world_size, for_training=True)
    with _gathered_in(problems):
        get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    with _gathered_in(problems):
        _check_own_objective(config)
    if with_files:
        with _gathered_in(problems):
            inputs = read_inputs(config)
    if problems:
        raise ConfigError(problems)
    return inputs


def _check_own_objective(config: Config) -> None:
    """Load the user's own functions, which are written with torch; nothing else here needs it."""
    section = config.objective
    if section.import_path is None and section.advantage_import_path is None:
        return
    from gspo_megatron.objectives import build_objective

    build_objective(section, config.rollout.max_response_tokens)


@contextlib.contextmanager
def _gathered_in(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())


def summary(config: Config, world_size: int, inputs: Inputs | None) -> list[tuple[str, str]]:
    """Names and texts that tell what a checked configuration will train, and how; of its files
    only where they were read."""
    from gspo_megatron.cli.parameters import count_parameters
    from gspo_megatron.config import resolve_parallel

    shape = config.resolved_model()
    model = f"{config.model.preset}: {shape.num_layers} layers of {shape.hidden_size}"
    if shape.num_moe_experts is not None:
        model += f", {shape.moe_router_topk} of {shape.num_moe_experts} experts"
    vocab_size = shape.vocab_size
    if vocab_size is None and inputs is not None:
        vocab_size = inputs.tokenizer.vocab_size
    counted = None if vocab_size is None else count_parameters(shape, vocab_size)
    if counted is not None:
        total, active = counted
        model += f", {total:,} parameters"
        if active < total:
            model += f", {active:,} for each token"
    parallel = resolve_parallel(config, world_size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rollout, objective = config.rollout, config.objective
    sequences = rollout.prompts_per_step * rollout.group_size
    rows = [
        ("model", model),
        ("layout", f"{config.layout()} on {ranks}, dp={parallel.data_parallel_size}"),
    ]
    lengths = f"prompts of at most {config.max_prompt_tokens()} tokens"
    if inputs is not None:
        files = ", ".join(f"{len(prompts):,} in {key}" for key, prompts in inputs.files.items())
        rows += [
            ("tokenizer", f"{config.data.tokenizer}, {inputs.tokenizer.vocab_size:,} tokens"),
            ("prompts", files),
        ]
        lengths = (
            f"prompts of at most {_longest(inputs)} tokens ({config.max_prompt_tokens()} allowed)"
        )
    return [
        *rows,
        ("lengths", f"{lengths}, responses of at most {rollout.max_response_tokens}"),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.group_size} responses = {sequences} "
            f"sequences, {objective.mini_batches} updates by "
            f"{objective.import_path or objective.name}",
        ),
        ("run", f"{config.training.steps:,} steps into {config.logging.dir}"),
    ]
