"""`gspo-megatron preflight`: whether the nodes of a job are fit to train, in a few seconds."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_nproc, config_parser, number
from gspo_megatron.process import ranks
from gspo_megatron.process.failures import UNFIT

if TYPE_CHECKING:
    from gspo_megatron.platform.preflight import Verdict

# What a user's minimum applies to: the operation that training uses most in each kind of group.
MAIN_OPERATION = {
    "matmul": "matmul",
    "tp": "tp all-reduce",
    "pp": "pp send/recv",
    "cp": "cp all-reduce",
    "ep": "ep all-to-all",
    "dp": "dp all-reduce",
}


def add_parser(commands: Commands) -> None:
    text = "measure the devices of the nodes on which a configuration will train, and their links"
    more = (
        ". Every rank looks at its device and multiplies matrices; then each kind of group of the "
        "layout exchanges messages. A host is named if it has no device, has another device or "
        f"driver than most, or is much slower than its peers; the exit code is then {UNFIT}. "
        "Start it as you start the training: with srun, with torchrun, or alone."
    )
    parser = config_parser(commands, "preflight", run, text, more)
    add_nproc(parser)
    parser.add_argument(
        "--share",
        type=partial(number, wanted="a share from 0 to 1", most=1.0),
        default=0.7,
        metavar="X",
        help="a host below this share of the median of its peers is slow (default: %(default)s)",
    )
    parser.add_argument(
        "--minimum",
        type=_minima,
        default={},
        metavar="NAME=NUMBER,...",
        help="also the smallest values allowed: matmul in TFLOP/s; tp, cp, dp (all-reduce), ep "
        "(all-to-all) and pp (send/recv) in GB/s, as in matmul=600,dp=40",
    )


def run(arguments: argparse.Namespace) -> int:
    """Be a rank where the environment says so, else be the only one, or launch them all here.

    Returns the exit code; only rank 0 returns that of an unfit host. Raises UserError for what is
    wrong with the configuration or the environment.
    """
    from gspo_megatron.config import check_config, resolve_parallel
    from gspo_megatron.config.load import load_any_config

    rank_of = ranks.world_size_of_rank(os.environ)
    config = load_any_config(arguments.config, arguments.overrides)
    world_size = ranks.decide_world_size(config, arguments.nproc, rank_of)
    check_config(config, world_size)
    if rank_of is None and world_size > 1:
        from gspo_megatron.process.launcher import launch

        command = [sys.executable, "-m", "gspo_megatron", "preflight", arguments.config]
        command += [*arguments.overrides, f"--share={arguments.share}"]
        if arguments.minimum:
            pairs = ",".join(f"{name}={value}" for name, value in arguments.minimum.items())
            command.append(f"--minimum={pairs}")
        return launch(command, world_size)
    from gspo_megatron.platform.preflight import run_preflight

    parallel, precision = resolve_parallel(config, world_size), config.training.precision
    minima = {MAIN_OPERATION[name]: value for name, value in arguments.minimum.items()}
    is_fit, is_stuck = run_preflight(parallel, precision, arguments.share, minima, show)
    code = 0 if is_fit or os.environ.get("RANK", "0") != "0" else UNFIT
    if is_stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def show(verdict: Verdict) -> None:
    """Print the table, and a line for each problem."""
    from gspo_megatron.cli.check_tables import console, new_table

    if verdict.rows:
        names = ("measure", ">median", ">slowest", ">share", "unit", "slowest is")
        table = new_table("preflight", *names)
        for measure, unit, median, slowest in verdict.rows:
            share = slowest.value / median if median else 1.0
            values = (f"{median:,.4g}", f"{slowest.value:,.4g}", f"{share:.0%}")
            where = f"{', '.join(sorted(slowest.hosts))} ({slowest.names})"
            table.add_row(measure, *values, unit, where)
        console().print(table, markup=False)
    if not verdict.problems:
        print("preflight: all hosts are fit", flush=True)
        return
    for host, problems in sorted(verdict.problems.items()):
        for line in problems:
            print(f"{host}: {line}", file=sys.stderr)
    names = ", ".join(sorted(verdict.problems))
    print(f"preflight: unfit to train on: {names}", file=sys.stderr, flush=True)


def _minima(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in MAIN_OPERATION:
            legal = ", ".join(MAIN_OPERATION)
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER; names: {legal}")
        found[name] = number(value)
    return found
