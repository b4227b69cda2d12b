"""`gspo-megatron ablate`: trains variants of one configuration, each with several seeds, and writes
a report that compares them. The runs are made on this machine, one after another, or as a Slurm job
array."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import gspo_megatron
from gspo_megatron.cli.arguments import Commands, add_nproc, config_parser, positive
from gspo_megatron.cli.variants import (
    OBJECTIVES,
    REPLAYS,
    PlannedRun,
    Variant,
    choose_variants,
    for_each_variant,
    plan_runs,
    seeds_found,
)
from gspo_megatron.errors import UserError
from gspo_megatron.process import ranks
from gspo_megatron.process.failures import STOPPED

if TYPE_CHECKING:
    from gspo_megatron.config import Config

SEEDS = 3
MAX_SEEDS = 1000  # a larger number is probably a typing error
# Exit codes of a launcher that was stopped by Ctrl-C, a closed terminal, SIGTERM, or a signal at
# which a run saves itself.
_STOPPED_BY_SIGNAL = (130, 129, 143, STOPPED)
_SLURM_FOLDER = ".slurm"  # in the ablation's folder; no variant can have such a name
# flushed, so that the text comes before the output of the next run
_say = partial(print, flush=True)
_ACCOUNTING_NAMES = ("--account", "--partition", "--qos", "--chdir", "-A", "-p", "-q", "-D")
_ACCOUNTING = re.compile(r"--(account|partition|qos|chdir)(=.*)?|-[ApqD].*")
_NTASKS = re.compile(r"-n\d*|--ntasks(-per-\w+)?(=.*)?")


def add_parser(commands: Commands) -> None:
    text = "train variants of a configuration with several seeds each, and compare them"
    parser = config_parser(commands, "ablate", run, text)
    usual = ", ".join(o if r == "off" else f"{o}+{r}" for o in OBJECTIVES for r in REPLAYS)
    parser.add_argument(
        "--variants",
        "--arms",  # the name in earlier versions
        nargs="+",
        default=[],
        metavar="VARIANT",
        help=f"names of the variants to train (default: {usual}; if the configuration has another "
        "objective, also the same variants of that objective; gspo_token in place of gspo if turns "
        "have rewards). A .yaml file among them defines other variants: a mapping from names to "
        "mappings from section.key to a value",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        metavar="K",
        help="the number of runs of each variant; their seeds are training.seed and the numbers "
        f"after it (default: {SEEDS}, and with --report-only all that are there)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="the folder of the report and of the runs, DIR/VARIANT/seed_N (default: logging.dir)",
    )
    add_nproc(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--print-commands",
        action="store_true",
        help="run nothing; print the command of each unfinished run, one per line",
    )
    instead.add_argument(
        "--slurm",
        metavar="OPTIONS",
        help="submit the unfinished runs as a Slurm job array, one run per task, and the report as "
        "a job that follows it; OPTIONS are for sbatch: --slurm='--nodes=1 --gpus-per-node=8'",
    )
    instead.add_argument(
        "--report-only", action="store_true", help="run nothing; write the report of finished runs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the ablation. Returns 1 if a run failed, and 128 + n after signal n. After a signal, the
    same command continues the ablation."""
    from gspo_megatron.config import load_config

    if ranks.world_size_of_rank(os.environ) is not None:
        raise UserError(
            "ablate starts the ranks of its runs itself: start it once, outside torchrun and srun; "
            "--print-commands prints the commands of the runs for the tasks of a job"
        )
    config = load_config(arguments.config, arguments.overrides)
    variants = choose_variants(arguments.variants, config)
    out = Path(arguments.output or str(config.logging.dir))
    count, first = arguments.seeds or SEEDS, config.training.seed
    if count > MAX_SEEDS:
        raise UserError(f"--seeds {count}: allowed: 1 to {MAX_SEEDS}")
    seeds: Sequence[int] = range(first, first + count)
    if arguments.report_only and arguments.seeds is None:
        seeds = seeds_found(variants, out) or seeds
    runs = plan_runs(arguments.config, arguments.overrides, variants, seeds, out)
    if arguments.report_only:
        return _report(variants, runs, out)
    here = not arguments.print_commands and arguments.slurm is None
    world_sizes = _check(variants, runs, arguments.nproc, here=here)
    todo = _unfinished(runs)
    if arguments.slurm is not None:
        return _submit(arguments, todo, out, world_sizes)
    if arguments.print_commands:
        nproc = [] if arguments.nproc is None else ["--nproc", str(arguments.nproc)]
        for planned in todo:
            words = ["gspo-megatron", "train", arguments.config, *planned.overrides, *nproc]
            print(shlex.join(words))
        return 0
    _say(f"{len(variants)} variants x {len(seeds)} seeds = {len(runs)} runs in {out}")
    if len(todo) < len(runs):
        _say(f"{len(runs) - len(todo)} are finished and stay as they are")
    failed, stopped = _train(arguments.config, todo, world_sizes)
    if stopped:
        _say("stopped before all runs were done; the same command continues from here")
        return stopped
    if len(failed) < len(runs):
        _report(variants, runs, out)
    for name in failed:
        _say(f"failed: {name}")
    return 1 if failed else 0


def _check(
    variants: Sequence[Variant], runs: Sequence[PlannedRun], nproc: int | None, *, here: bool
) -> dict[str, int]:
    """Check the configuration and inputs of every variant, as `train` does. Returns the number of
    ranks of each variant. Raises ConfigError with the problems of all variants."""
    from gspo_megatron.cli.check_inputs import check_all

    # one run of each variant is enough: seeds do not change the check
    configs = {run.variant.name: run.config for run in runs}

    def check(variant: Variant) -> int:
        config = configs[variant.name]
        hint = ranks.decide_world_size(config, nproc, None) if here else config.world_size_hint()
        check_all(config, size := nproc or hint)
        return size

    return for_each_variant(variants, check)


def _unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not finished. Raises UserError if the configuration of a finished
    run differs from the planned configuration, because the report would use this run anyway."""
    from gspo_megatron.observe.ablation import is_finished

    todo, foreign = [], []
    for planned in runs:
        if not is_finished(planned.folder, planned.config.training.steps):
            todo.append(planned)
        elif differing := _differences(planned):
            foreign.append(
                f"{planned.folder}: holds a finished run of another configuration "
                f"({', '.join(differing[:3])}); move it away, or give another folder with -o"
            )
    if foreign:
        raise UserError("\n".join(foreign))
    return todo


def _differences(planned: PlannedRun) -> list[str]:
    """Return the keys in which a finished run's configuration differs from the planned one."""
    from gspo_megatron.config import load_config
    from gspo_megatron.config.load import parse_yaml

    def values(config: Config) -> dict[str, object]:
        sections = config.model_dump(exclude={"logging"})
        return {f"{s}.{key}": value for s, keys in sections.items() for key, value in keys.items()}

    path = planned.folder / "config.resolved.yaml"
    try:
        recorded = values(load_config(path))
        written = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UserError:
        return ["config.resolved.yaml is missing or of another version"]
    planned_values = values(planned.config)
    for section in ("environment", "reward"):
        if "name" not in (written.get(section) or {}):  # the run did not read it
            del planned_values[f"{section}.name"]
    return [
        f"{key}: {recorded[key]} there"
        for key, value in planned_values.items()
        if recorded[key] != value
    ]


def _train(
    config_path: str, todo: Sequence[PlannedRun], world_sizes: dict[str, int]
) -> tuple[list[str], int]:
    """Make each run by the ordinary `train` command, in new processes. Returns the runs that
    failed, and the exit code if a signal stopped a run (else 0)."""
    from gspo_megatron.process.launcher import launch

    failed: list[str] = []
    for number, planned in enumerate(todo, start=1):
        _say(f"\nrun {number} of {len(todo)}: {planned.name}")
        command = [sys.executable, "-m", "gspo_megatron", "train", config_path, *planned.overrides]
        code = launch(command, world_sizes[planned.variant.name])
        if code in _STOPPED_BY_SIGNAL:
            return failed, code
        if code != 0:
            failed.append(f"{planned.name} (exit code {code}); {planned.folder}")
            _say(f"{planned.name} failed with exit code {code}; the other runs continue")
    return failed, 0


def _report(variants: Sequence[Variant], runs: Sequence[PlannedRun], out: Path) -> int:
    from gspo_megatron.observe.ablation import VariantRuns, write_ablation_report

    reported = []
    for variant in variants:
        own = [planned for planned in runs if planned.variant == variant]
        folders = {planned.seed: planned.folder for planned in own}
        steps = own[0].config.training.steps
        reported.append(VariantRuns(variant.name, variant.overrides, steps, folders))
    path, findings = write_ablation_report(reported, out)
    for line in findings:
        _say(f"- {line}")
    _say(f"report  {path}")
    return 0


def _submit(
    arguments: argparse.Namespace,
    todo: Sequence[PlannedRun],
    out: Path,
    world_sizes: dict[str, int],
) -> int:
    if not todo:
        _say("all runs are finished; --report-only writes the report")
        return 0
    runs = [[arguments.config, *planned.overrides] for planned in todo]
    named = ["--variants", *arguments.variants] if arguments.variants else []
    report = [arguments.config, *arguments.overrides, *named]
    report += ["--seeds", str(arguments.seeds or SEEDS), "-o", str(out), "--report-only"]
    sizes = [world_sizes[planned.variant.name] for planned in todo]
    array, report_job, folder = submit(out, runs, report, arguments.slurm, sizes)
    _say(f"job {array}: {len(todo)} runs, one per task of the array; logs in {folder}")
    _say(f"job {report_job}: the report, after the runs")
    return 0


def submit(
    out: Path,
    runs: Sequence[Sequence[str]],
    report: Sequence[str],
    options: str,
    world_sizes: Sequence[int],
) -> tuple[str, str, Path]:
    """Submit the runs as a job array, with the user's `options`, and the report as a job that
    starts after the array.

    Writes one file for each run into a new folder, with the arguments of `train`, and a NUL after
    each argument, because an argument may have several lines. One more file has the arguments of
    `ablate` for the report. Returns the numbers of both jobs, and the folder. Raises UserError if
    sbatch is missing or refuses the job, or if the runs need different numbers of tasks.
    """
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--slurm {options!r}: {error}") from error
    script = Path(gspo_megatron.__file__).parents[1] / "slurm" / "ablation.sbatch"
    if not script.is_file():
        raise UserError(f"--slurm: no {script}; run `ablate` from a checkout of the repository")
    tasks: list[str] = []
    if not any(_NTASKS.fullmatch(word) for word in words):
        sizes = sorted(set(world_sizes))
        if len(sizes) > 1:
            raise UserError(
                f"--slurm: the variants' layouts take {', '.join(map(str, sizes))} ranks, but all "
                "tasks of an array have the same size; submit the variants one by one with "
                "--variants, or give --ntasks=N if their layouts leave dp open"
            )
        tasks = [f"--ntasks={sizes[0]}"]
    # Each array has a new folder, because tasks of an earlier array may still have to read their
    # files.
    folders = (out / _SLURM_FOLDER / str(number) for number in itertools.count(1))
    folder = next(path for path in folders if not path.exists())
    folder.mkdir(parents=True)
    for name, words_of in [*((str(i), run) for i, run in enumerate(runs)), ("report", report)]:
        (folder / name).write_text("".join(f"{word}\0" for word in words_of), encoding="utf-8")
    array_options = [f"--output={folder}/%a.log", "--array", f"0-{len(runs) - 1}", *tasks, *words]
    array = _sbatch([*array_options, str(script), str(folder)])
    # The report is one process without a GPU. So its job gets only the options about accounting.
    accounting = list(_of_accounting(words))
    after = [f"--dependency=afterany:{array}", "--ntasks=1", f"--output={folder}/report.log"]
    try:
        report_job = _sbatch([*after, *accounting, str(script), str(folder), "report"])
    except UserError as error:
        raise UserError(
            f"{error}\nthe runs are already submitted, as job {array}: do not submit them again; "
            "--report-only writes their report when the job has ended"
        ) from error
    return array, report_job, folder


def _of_accounting(words: Sequence[str]) -> Iterator[str]:
    """Return the options about accounting, in each form that sbatch reads: `--account=a`,
    `--account a`, `-A a`, `-Aa`."""
    takes_next = False
    for word in words:
        if takes_next or _ACCOUNTING.fullmatch(word):
            yield word
        takes_next = not takes_next and word in _ACCOUNTING_NAMES


def _sbatch(arguments: Sequence[str]) -> str:
    """Submit a job and return its number."""
    command = ["sbatch", "--parsable", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--slurm: `{shlex.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise UserError(f"--slurm: `{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # sbatch may print ";CLUSTER" after the number
