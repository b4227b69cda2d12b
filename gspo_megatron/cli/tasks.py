"""`gspo-megatron tasks`: writes tasks of a taskset of the package verifiers to a prompt file."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_megatron.cli.arguments import Commands, config_parser, not_negative, positive
from gspo_megatron.data.rows import json_line
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.files import write_atomically


def add_parser(commands: Commands) -> None:
    text = "write tasks of environment.verifiers as a file of prompts"
    more = ", in their order. The files that the configuration names are not read."
    parser = config_parser(commands, "tasks", run, text, more)
    parser.add_argument(
        "-o", "--output", metavar="FILE.jsonl", type=Path, required=True, help="a new file"
    )
    parser.add_argument(
        "-n",
        "--count",
        metavar="N",
        type=positive,
        required=True,
        help="the largest number of tasks to write; some tasksets have no end",
    )
    parser.add_argument(
        "--skip", metavar="N", type=not_negative, default=0, help="leave out the first N tasks"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print how many tasks it has. Raises UserError."""
    from gspo_megatron.config import load_config
    from gspo_megatron.environments.registry import environment_of
    from gspo_megatron.environments.verifiers import Verifiers

    if arguments.output.exists():
        raise DataError(f"--output {arguments.output}: is there already; allowed: a new file")
    config = load_config(arguments.config, arguments.overrides)
    section = config.environment
    if section.verifiers is None or section.python is None:
        raise ConfigError(["environment.verifiers, environment.python: no taskset is named"])
    environment = environment_of(config)
    assert isinstance(environment, Verifiers)
    rows = list(environment.tasks(arguments.skip, arguments.count))
    if not rows:
        raise DataError(f"{section.verifiers}: it has no task from number {arguments.skip} on")
    write_atomically(arguments.output, "".join(map(json_line, rows)).encode())
    print(f"{arguments.output}: {len(rows)} tasks of {section.verifiers}")
    return 0
