"""`gspo-megatron check`: shows everything about a run that can be known without starting it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli import rollout_plan, train
from gspo_megatron.cli.arguments import Commands, config_parser, loading, number, positive
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config.stages import AnyConfig
    from gspo_megatron.estimate.workload import DataSizes

DEFAULT_GB = 80.0  # the memory of an H100
STAGES = ("rl", "sft", "pretrain", "reward_model")


def add_parser(commands: Commands) -> None:
    text = "check a configuration of any stage and its input files without starting a run"
    more = (
        ". With any of --memory, --world-size, --gpu-memory and --suggest, also a dry run: the "
        "model of one rank of each pipeline stage is built and run on torch's meta device, without "
        "a GPU and without memory. Exit codes: 0 sound, 2 something is wrong, 1 sound but larger "
        "than --gpu-memory."
    )
    parser = config_parser(commands, "check", run, text, more, required=False)
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
        help="the stage of the configuration; rl is for `train` (default: the one that its keys "
        "belong to)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="check for a new run: the run folder must be empty"
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="the number of ranks (default: as many as the layout needs)",
    )
    parser.add_argument("--memory", action="store_true", help="do the dry run")
    parser.add_argument(
        "--gpu-memory",
        type=partial(number, wanted="a number of GB above 0", least=1e-9),
        metavar="GB",
        help="the memory of a GPU, into which the run must fit. 1 GB is 10^9 bytes, here and in "
        "all that is printed; `doctor` shows a GPU's memory: about 85 for an H100 sold as 80 GB",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="search for layouts that fit into --gpu-memory (default: "
        f"{DEFAULT_GB:g}), ordered by the training time of a step",
    )
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="the run is for another machine: do not look at data, tokenizer, weights, run folder "
        "and installed packages; model.preset=NAME gives the shape of weights that are not here",
    )
    rollout_plan.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what the run will be. Raises ConfigError with all problems."""
    if arguments.keys is not None:
        return _print_keys(arguments.keys, arguments.stage)
    if arguments.config is None:
        arguments.parser.error("the following arguments are required: CONFIG.yaml")
    rollout_plan.check_options(arguments)
    if arguments.fresh and arguments.no_files:
        arguments.parser.error("--fresh: not with --no-files, which looks at no run folder")
    if arguments.rollout_plan:
        return rollout_plan.run(arguments)
    from gspo_megatron.checkpoint.resume import preview
    from gspo_megatron.cli import check_tables
    from gspo_megatron.cli.check_inputs import Checked, all_problems, check_run
    from gspo_megatron.config.load import load_any_config

    with_files, gpu_gb = not arguments.no_files, arguments.gpu_memory
    find_start = partial(preview, fresh=arguments.fresh)
    with all_problems(arguments.world_size, with_files=with_files, find_start=find_start):
        config: Any = load_any_config(arguments.config, arguments.overrides, arguments.stage)
    if not with_files:
        config = _without_weights(config)
    world_size = arguments.world_size or config.world_size_hint()
    problems: list[str] = []
    checked = Checked(config)
    find_start = partial(find_start, command=_command(config, arguments))
    try:
        checked = check_run(config, world_size, with_files=with_files, find_start=find_start)
    except ConfigError as error:
        problems = error.problems
        # A search makes sense only if another layout may solve all problems.
        of_layout = ("parallel.", f"world size = {world_size}")
        if not arguments.suggest or not all(line.startswith(of_layout) for line in problems):
            raise
    dry = arguments.memory or arguments.suggest or bool(arguments.world_size or gpu_gb)
    vocab_size = check_tables.vocab_size_of(checked)
    if dry and vocab_size is None:
        raise ConfigError(
            ["model.vocab_size = null: the tokenizer decides it, and was not read; give a number"]
        )
    if not problems:
        check_tables.print_lines(check_tables.summary(checked, world_size), 11)
    if not dry or vocab_size is None:
        return 0
    with _dry_run():
        of_run = (checked.config, world_size, vocab_size, check_tables.sizes_of(checked))
        fits = bool(problems) or _estimate(*of_run, gpu_gb)
        for line in problems:
            print(line, file=sys.stderr)
        if arguments.suggest:
            _search(*of_run, gpu_gb or DEFAULT_GB)
    return 2 if problems else int(not fits)


def _command(config: AnyConfig, arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts the checked run."""
    (name,) = (name for name, (stage, _) in train.STAGES.items() if stage == config.phase)
    return train.command_of(name, arguments)


def _print_keys(word: str, stage: str | None) -> int:
    from gspo_megatron.config.keys import find_keys

    lines = find_keys(word, stage)
    if not lines:
        raise UserError(f"--keys {word}: no key has this word in its name or description")
    print("\n".join(lines))
    return 0


def _without_weights(config: AnyConfig) -> AnyConfig:
    """Return the configuration with the shape of its preset, without looking at the weights.
    Without a preset, the weights decide the shape. Raises ConfigError if they are missing on this
    machine."""
    model = config.model.model_copy(update={"hf_path": None})
    of_preset = config.model_copy(update={"model": model})
    # A resolved configuration of an earlier version names the preset `tiny` beside hf_path.
    if model.preset not in (None, "tiny"):
        return of_preset
    try:
        config.resolved_model()
    except ConfigError as error:
        if model.preset is None:
            advice = "name its shape, as in model.preset=qwen3-30b-a3b"
            raise ConfigError([f"{line}; {advice}" for line in error.problems]) from None
        return of_preset
    return config


def _estimate(
    config: Any, world_size: int, vocab_size: int, sizes: DataSizes, gpu_gb: float | None
) -> bool:
    """Print the estimate of the configured layout, and return whether the run fits into the
    memory."""
    from gspo_megatron.cli import check_tables
    from gspo_megatron.config.phases import phase_configs
    from gspo_megatron.estimate.layout import HEADROOM, estimate_layout, recompute_modes

    phases = [
        (phase, estimate_layout(phase, world_size, vocab_size, sizes))
        for phase in phase_configs(config)
    ]
    largest = max((estimate for _, estimate in phases), key=lambda each: each.worst.total)
    check_tables.show_layout(largest, recompute_modes(largest, vocab_size))
    cost = check_tables.show_cost(phases, vocab_size)
    if len(phases) > 1:
        check_tables.show_phases(phases, vocab_size)
    pairs = check_tables.figures(largest) | cost
    fits = gpu_gb is None or largest.fits(gpu_gb * 1e9)
    if gpu_gb is not None:
        text = (
            f"rank {largest.worst.rank} needs {largest.worst.total / 1e9:,.1f} GB; "
            f"of {gpu_gb:g} GB, "
            f"{1 - HEADROOM:.0%} can be used (the rest: fragmentation, NCCL, CUDA context)"
        )
        out = sys.stdout if fits else sys.stderr
        print(f"{'fits:' if fits else 'does not fit:'} {text}", file=out)
        pairs["fits"] = "yes" if fits else "no"
    print("for scripts, in bytes:")
    print(" ".join(f"{name}={value}" for name, value in pairs.items()))
    return fits


def _search(config: Any, world_size: int, vocab_size: int, sizes: DataSizes, gpu_gb: float) -> None:
    """Print the best layouts for this number of ranks."""
    from gspo_megatron.cli import check_tables
    from gspo_megatron.config import Config
    from gspo_megatron.estimate.cost import LEFT_OUT
    from gspo_megatron.estimate.suggest import suggest

    counts = check_tables.count_parameters(config.resolved_model(), vocab_size)
    if counts is None:
        raise UserError("--suggest: the parameters of a model with these fields cannot be counted")
    search = suggest(config, world_size, vocab_size, counts, gpu_gb * 1e9, sizes)
    has_rollouts = isinstance(config, Config)
    left_out = f"{LEFT_OUT}, the rollout" if has_rollouts else LEFT_OUT
    check_tables.show_search(search, gpu_gb, left_out, has_rollouts)


@contextlib.contextmanager
def _dry_run() -> Generator[None]:
    """Hide the GPUs: a dry run needs none, and must not take memory of a GPU that is in use.

    The models that a dry run builds become garbage. During the dry run the garbage collector skips
    the objects of the loaded modules, because most objects that it would scan belong to modules.
    """
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with loading():
            import gspo_megatron.estimate.suggest  # noqa: F401
        yield
    finally:
        gc.unfreeze()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
