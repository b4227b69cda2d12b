"""Functions that the commands share: to make their parsers, and to load the rest of the package."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from gspo_megatron.config import Config

Commands = Any  # what argparse's `add_subparsers` returns: its type has no public name
Run = Callable[[argparse.Namespace], int]
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # values of --dtype, and torch's names


def new_parser(
    commands: Commands, name: str, run: Run, help_text: str, list_name: str | None = None
) -> argparse.ArgumentParser:
    """Add the command `name`. `list_name`: the argument that takes any number of words."""
    parser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:], allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser, list_name=list_name)
    return parser


def config_parser(
    commands: Commands,
    name: str,
    run: Run,
    help_text: str,
    more: str = "",
    *,
    required: bool = True,
    source: str = "CONFIG.yaml",
) -> argparse.ArgumentParser:
    """Add a command that takes a configuration file and overrides of its values. source: the name
    of the file in the command's help. more: text that follows `help_text` in the command's own
    help."""
    parser = new_parser(commands, name, run, help_text, list_name="overrides")
    parser.description = f"{parser.description}{more}"
    parser.add_argument(
        "config",
        metavar=source,
        nargs=None if required else "?",
        help="the configuration file" + " or a run folder" * ("RUN" in source),
    )
    add_overrides(parser, "replaces a value of the file, for example rollout.group_size=16")
    return parser


def add_overrides(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],  # without this default, argparse would require at least one word
        help=help_text,
    )


def add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="the number of ranks to start on this machine (default: as many as the layout needs). "
        "If Kubernetes or SkyPilot start the command on several pods or nodes, it is the number on "
        "each of them. Do not give it under torchrun or srun, which start the ranks themselves",
    )


def add_step(parser: argparse.ArgumentParser, default: str = "the first step") -> None:
    parser.add_argument(
        "--step",
        type=positive,
        metavar="N",
        help="for a configuration with training.phases: take the values of the phase that step N "
        f"belongs to (default: {default})",
    )


def in_phase(config: Config, step: int | None) -> tuple[Config, str | None]:
    """Return the configuration with the values of the phase of `step` (None: of the first step),
    and a text that names this phase. The text is None for a configuration without phases. Raises
    ConfigError."""
    from gspo_megatron.config.phases import at_step, phase_end, phase_number, phases_of

    count = len(phases_of(config))
    if count == 0 and step is not None:
        raise ConfigError([f"--step {step}: only with training.phases; leave it out"])
    if count == 0:
        return config, None
    step = step or 1
    number, end = phase_number(config, step) + 1, phase_end(config, step)
    return at_step(config, step), f"{number} of {count}, which ends with step {end:,}"


def integer(text: str, wanted: str, least: int = 0, most: float = math.inf) -> int:
    """Read a whole number from `least` to `most`. Raises argparse's error for anything else."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(text)


positive = partial(integer, wanted="a positive integer", least=1)
not_negative = partial(integer, wanted="a whole number of 0 or more")


def number(
    text: str,
    wanted: str = "a number of 0 or more",
    least: float = 0.0,
    most: float = sys.float_info.max,
) -> float:
    """Read a number from `least` to `most`. Raises argparse's error for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


@contextlib.contextmanager
def loading() -> Generator[None]:
    """Turn the garbage collector off while modules are imported inside the context. The collector
    would take a fifth of the time for importing torch and Megatron-Core. Modules are never freed,
    so the collector also skips these modules afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
