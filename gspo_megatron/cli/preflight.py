"""`gspo-megatron preflight`: whether the nodes of a job are fit to train, in a few seconds."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.cli.failures import UNFIT

if TYPE_CHECKING:
    from gspo_megatron.platform.preflight import Verdict

DEFAULT_SHARE = 0.7
# The keys of preflight.MAIN_OPERATION, which cannot be imported without torch.
MEASURES = ("matmul", "tp", "pp", "cp", "ep", "dp")


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "preflight",
        run,
        "measure the devices and links of the nodes that a configuration is to train on",
        list_name="overrides",
    )
    parser.description += (
        ". Every rank looks at its device and multiplies matrices; then each kind of group of the "
        "layout exchanges messages. A host is named if it has no device, has another device or "
        f"driver than most, or is much slower than its peers; the exit code is then {UNFIT}. "
        "Start it as you start the training: by srun, by torchrun, or alone."
    )
    add_config(parser)
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks to start on this machine, as for train"
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=DEFAULT_SHARE,
        metavar="X",
        help="a host is slow below this share of the median of its peers (default: "
        f"{DEFAULT_SHARE:g})",
    )
    parser.add_argument(
        "--minimum",
        type=_minima,
        default={},
        metavar="NAME=NUMBER,...",
        help="smallest values besides: matmul in TFLOP/s; tp, cp, dp (all-reduce), ep "
        "(all-to-all) and pp (send/recv) in GB/s, as in matmul=600,dp=40",
    )


def run(arguments: argparse.Namespace) -> int:
    """Be a rank where the environment says so, else be the only one, or launch them all here.

    Returns the exit code; only rank 0 returns that of an unfit host. Raises UserError for what is
    wrong with the configuration or the environment.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.config.load import load_any_config

    ranks.adopt_slurm_task(os.environ)
    rank_of = ranks.world_size_of_rank(os.environ)
    config = load_any_config(arguments.config, arguments.overrides)
    world_size = ranks.decide_world_size(config, arguments.nproc, rank_of)
    check_config(config, world_size)
    if rank_of is None and world_size > 1:
        from gspo_megatron.cli.launch import launch

        command = [sys.executable, "-m", "gspo_megatron", "preflight", arguments.config]
        command += [*arguments.overrides, f"--share={arguments.share}"]
        if arguments.minimum:
            pairs = ",".join(f"{name}={value}" for name, value in arguments.minimum.items())
            command.append(f"--minimum={pairs}")
        return launch(command, world_size)
    from gspo_megatron.config import resolve_parallel
    from gspo_megatron.platform.preflight import run_preflight

    parallel, precision = resolve_parallel(config, world_size), config.training.precision
    is_fit, is_stuck = run_preflight(parallel, precision, arguments.share, arguments.minimum, show)
    code = 0 if is_fit or os.environ.get("RANK", "0") != "0" else UNFIT
    if is_stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def show(verdict: Verdict) -> None:
    """Print the table, and a line for each problem."""
    from rich import box
    from rich.table import Table

    from gspo_megatron.cli.estimate_table import console

    if verdict.rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="preflight", title_justify="left")
        table.add_column("measure")
        for name in ("median", "slowest", "share"):
            table.add_column(name, justify="right")
        table.add_column("unit")
        table.add_column("slowest is", overflow="fold")
        for row in verdict.rows:
            share = row.slowest.value / row.median if row.median else 1.0
            values = (f"{row.median:,.4g}", f"{row.slowest.value:,.4g}", f"{share:.0%}")
            table.add_row(row.measure, *values, row.unit, str(row.slowest))
        console().print(table, markup=False)
    if not verdict.problems:
        print("preflight: all hosts are fit", flush=True)
        return
    for host, problems in sorted(verdict.problems.items()):
        for line in problems:
            print(f"{host}: {line}", file=sys.stderr)
    names = ", ".join(sorted(verdict.problems))
    print(f"preflight: unfit to train on: {names}", file=sys.stderr, flush=True)


def _share(text: str) -> float:
    number = _number(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number


def _minima(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in MEASURES:
            legal = ", ".join(MEASURES)
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER; names: {legal}")
        found[name] = _number(number)
    return found


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number
