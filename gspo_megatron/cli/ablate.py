"""`gspo-megatron ablate`: named settings of one configuration, with several seeds, compared."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.cli.arms import (
    OBJECTIVES,
    REPLAYS,
    Arm,
    ArmProblems,
    PlannedRun,
    baselines,
    choose_arms,
    plan_runs,
)
from gspo_megatron.cli.failures import STOPPED
from gspo_megatron.errors import UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config

MAX_SEEDS = 1000  # a slip otherwise: every run is planned before the first one starts
_SEEDS_END = 2**31  # as the schema has it
# What the launcher returns when it was told to end: by Ctrl-C, by a closed terminal, by kill; and
# by either of the signals that ask a run to save itself.
_TOLD_TO_END = (130, 129, 143, STOPPED)


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "ablate",
        run,
        "train the same configuration under several settings and seeds, and compare them",
        list_name="overrides",
    )
    add_config(parser)
    usual = ", ".join(f"{o}" if r == "off" else f"{o}+{r}" for o in OBJECTIVES for r in REPLAYS)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="ARM",
        help=f"which settings, by name (default: {usual}); a .yaml file among them replaces these "
        "by its own, a mapping from names to mappings from section.key to a value",
    )
    parser.add_argument(
        "--seeds",
        type=_seed_count,
        default=3,
        metavar="K",
        help=f"runs of each arm, from training.seed on (default: %(default)s, at most {MAX_SEEDS})",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="where the runs go, as DIR/ARM/seed_N, and the report; logging.dir unless given",
    )
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks of each run, as for `train`"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--print-commands",
        action="store_true",
        help="run nothing; print the command of each run still to be made, one a line, as for the "
        "tasks of a Slurm array",
    )
    instead.add_argument(
        "--slurm",
        metavar="OPTIONS",
        help="submit the runs still to be made as a Slurm array, one a task, and the report as a "
        "job after it, with these options for sbatch: --slurm='--nodes=1 --gpus-per-node=8'",
    )
    instead.add_argument(
        "--report-only", action="store_true", help="run nothing; write the report of what is there"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are not there yet, one after another, then the report.

    Exit code 1 where a run failed; 128 + n after signal n, where the same command goes on later.
    """
    from gspo_megatron.config import load_config

    _refuse_to_be_a_rank()
    config = load_config(arguments.config, arguments.overrides)
    arms = choose_arms(arguments.arms, config)
    out = Path(arguments.output or str(config.logging.dir))
    seeds = _seeds(config.training.seed, arguments.seeds)
    runs = plan_runs(arguments.config, arguments.overrides, arms, seeds, out)
    if arguments.report_only:
        return _report(arms, runs, out)
    here = not arguments.print_commands and arguments.slurm is None
    world_sizes = _check(arms, runs, arguments.nproc, here=here)
    todo = _unfinished(runs)
    if arguments.slurm is not None:
        return _submit(arguments, arms, todo, out, world_sizes)
    if not here:
        nproc = [] if arguments.nproc is None else ["--nproc", str(arguments.nproc)]
        for planned in todo:
            words = ["gspo-megatron", "train", arguments.config, *planned.overrides, *nproc]
            print(shlex.join(words))
        return 0
    say(f"{len(arms)} arms x {len(seeds)} seeds = {len(runs)} runs into {out}")
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} are finished and stay as they are")
    outcome = _make(arguments.config, todo, world_sizes)
    if outcome.told_to_end:
        say("ended before all runs were made; the same command goes on from here")
        return outcome.told_to_end
    if len(_unfinished(runs)) < len(runs):
        _report(arms, runs, out)
    for name in outcome.failed:
        say(f"failed: {name}")
    return 1 if outcome.failed else 0


def _seed_count(text: str) -> int:
    """`positive`, up to MAX_SEEDS."""
    count = positive(text)
    if count > MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"{text}: legal: 1 to {MAX_SEEDS}")
    return count


def _seeds(first: int, count: int) -> range:
    """Raises UserError where the last ones would be no seeds."""
    if first + count > _SEEDS_END:
        raise UserError(
            f"--seeds {count}: from training.seed = {first} on they reach {first + count - 1}; "
            f"legal: seeds below 2^31, so begin with {_SEEDS_END - count} at most"
        )
    return range(first, first + count)


def say(text: str) -> None:
    """A line of the command's own, in order with what the runs print."""
    print(text, flush=True)


def _refuse_to_be_a_rank() -> None:
    if ranks.world_size_of_rank(os.environ) is not None or ranks.is_slurm_task(os.environ):
        raise UserError(
            "ablate starts the ranks of its runs itself: start it once, outside torchrun and srun; "
            "--print-commands gives the runs' commands for tasks of a job"
        )


def _check(
    arms: Sequence[Arm], runs: Sequence[PlannedRun], nproc: int | None, *, here: bool
) -> dict[str, int]:
    """Every arm with all it names, as `train` would; the seed makes no difference. Returns the
    number of ranks of each arm. Raises ConfigError with the problems of all arms."""
    from gspo_megatron.cli.check_inputs import check_all

    problems, world_sizes = ArmProblems(arms), {}
    for planned in {run.arm.name: run for run in runs}.values():
        config, arm = planned.config, planned.arm
        with problems.of(arm):
            size = (
                ranks.decide_world_size(config, nproc, None) if here else config.world_size_hint()
            )
            world_sizes[arm.name] = nproc or size
            check_all(config, world_sizes[arm.name])
    problems.raise_if_any()
    return world_sizes


def _unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs still to be made. Raises UserError where a finished one is of another configuration,
    which the report would compare as if it were of this."""
    from gspo_megatron.observe.ablation import is_finished

    todo, foreign = [], []
    for planned in runs:
        if not is_finished(planned.folder, planned.config.training.steps):
            todo.append(planned)
        elif (differing := _differences(planned)) != []:
            foreign.append(
                f"{planned.folder}: holds a finished run of another configuration "
                f"({', '.join(differing[:3])}); move it away, or give another -o"
            )
    if foreign:
        raise UserError("\n".join(foreign))
    return todo


def _differences(planned: PlannedRun) -> list[str]:
    """The keys in which a finished run's configuration is not the one planned."""
    from gspo_megatron.config import load_config

    def values(config: Config) -> dict[str, object]:
        sections = config.model_dump(exclude={"logging"})
        return {f"{s}.{key}": value for s, keys in sections.items() for key, value in keys.items()}

    try:
        there = values(load_config(planned.folder / "config.resolved.yaml"))
    except UserError:
        return ["config.resolved.yaml is missing or of another version"]
    wanted = values(planned.config)
    return [f"{key}: {there[key]} there" for key in wanted if there[key] != wanted[key]]


@dataclass
class _Outcome:
    failed: list[str]
    told_to_end: int = 0  # the exit code, after a signal to this program


def _make(config_path: str, todo: Sequence[PlannedRun], world_sizes: dict[str, int]) -> _Outcome:
    """Each run by the ordinary `train` command, in processes of its own."""
    from gspo_megatron.cli.launch import launch

    outcome = _Outcome([])
    for number, planned in enumerate(todo, start=1):
        name = f"{planned.arm.name}, seed {planned.seed}"
        say(f"\nrun {number} of {len(todo)}: {name}")
        command = [sys.executable, "-m", "gspo_megatron", "train", config_path, *planned.overrides]
        code = launch(command, world_sizes[planned.arm.name])
        if code in _TOLD_TO_END:
            outcome.told_to_end = code
            return outcome
        if code != 0:
            outcome.failed.append(f"{name} (exit code {code}); {planned.folder}")
            say(f"{name} failed with exit code {code}; the others go on")
    return outcome


def _submit(
    arguments: argparse.Namespace,
    arms: Sequence[Arm],
    todo: Sequence[PlannedRun],
    out: Path,
    world_sizes: dict[str, int],
) -> int:
    from gspo_megatron.cli.slurm_array import submit

    if not todo:
        say("all runs are finished; --report-only writes the report")
        return 0
    runs = [[arguments.config, *planned.overrides] for planned in todo]
    named = ["--arms", *arguments.arms] if arguments.arms else []
    report = [arguments.config, *arguments.overrides, *named, "--seeds", str(arguments.seeds)]
    report += ["-o", str(out), "--report-only"]
    sizes = [world_sizes[planned.arm.name] for planned in todo]
    jobs = submit(out, runs, report, arguments.slurm, sizes)
    say(f"job {jobs.array}: {len(todo)} runs, one a task of the array; logs in {jobs.folder}")
    say(f"job {jobs.report}: the report, after them")
    return 0


def _report(arms: Sequence[Arm], runs: Sequence[PlannedRun], out: Path) -> int:
    from gspo_megatron.observe import ablation
    from gspo_megatron.observe.ablation_report import write_ablation_report

    without_replay = baselines(runs)
    reported = []
    for arm in arms:
        own = [planned for planned in runs if planned.arm == arm]
        reported.append(
            ablation.Arm(
                name=arm.name,
                settings=arm.overrides,
                steps=own[0].config.training.steps,
                folders={planned.seed: planned.folder for planned in own},
                baseline=without_replay.get(arm.name),
            )
        )
    measured = runs[0].config.routing.volatility
    written = write_ablation_report(reported, out, volatility_switched_on=measured)
    for line in written.findings:
        say(f"- {line}")
    for path in written.paths:
        say(f"report  {path}")
    return 0
