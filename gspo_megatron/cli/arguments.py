"""What the commands' parsers share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

# What argparse calls the object that `add_subparsers` returns; it has no public name.
Commands = Any


def new_parser(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
    list_name: str | None = None,
) -> argparse.ArgumentParser:
    """Add the command `name`; `list_name` is the argument that takes any number of words."""
    parser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:], allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser, list_name=list_name)
    return parser


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """CONFIG.yaml and its overrides, as `train` and `check` take them."""
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        nargs=None if required else "?",
        help="the configuration file",
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],  # without it argparse would say that one is required
        help="a value that replaces the file's, as in rollout.group_size=16",
    )


def add_launching(parser: argparse.ArgumentParser) -> None:
    """--nproc and --fresh, as the commands that train take them."""
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks to start on this machine; as many as the layout asks for unless given. "
        "Under torchrun or srun leave it out",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin a new run: the run folder must be empty or absent. Without this, the same "
        "command goes on from the newest checkpoint in that folder",
    )


def positive(text: str) -> int:
    """An argument that counts something. Raises argparse's error for anything below 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1")
    return int(text)


def number(
    text: str,
    wanted: str = "a number from 0",
    least: float = 0.0,
    most: float = sys.float_info.max,
) -> float:
    """An argument from `least` to `most`. Raises argparse's error for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
