"""`gspo-megatron train`, `pretrain`, `sft` and `reward-model`: train as one rank of a run, or
launch all its ranks on this machine."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli.arguments import Commands, add_nproc, config_parser, loading, not_negative
from gspo_megatron.errors import UserError
from gspo_megatron.observe.metrics_files import METRICS_FILE
from gspo_megatron.process import ranks
from gspo_megatron.process.cores import usable_cores
from gspo_megatron.process.failures import INTERRUPTED, STOPPED
from gspo_megatron.process.nodes import node_of_job, wait_for_master
from gspo_megatron.process.signals import SAVES

if TYPE_CHECKING:
    from gspo_megatron.cli.check_inputs import Checked
    from gspo_megatron.config import Config
    from gspo_megatron.config.stages import AnyConfig
    from gspo_megatron.process.nodes import Node

# For each command, its stage and what it does.
STAGES = {
    "train": ("rl", "train a model by reinforcement learning"),
    "pretrain": ("pretrain", "pre-train a model on tokenized corpora"),
    "sft": ("sft", "fine-tune a model on conversations, or on prompts with answers"),
    "reward-model": (
        "reward_model",
        "train a preference model on pairs of responses, or on ratings: a score for each response",
    ),
}


def add_parser(commands: Commands) -> None:
    for name, (_, text) in STAGES.items():
        parser = config_parser(commands, name, partial(run, name), text)
        add_nproc(parser)
        parser.add_argument(
            "--fresh",
            action="store_true",
            help="start a new run: the run folder must be empty or absent. Without --fresh the run "
            "is resumed from the newest checkpoint in its folder, if there is one",
        )
        if name == "train":
            parser.add_argument(
                "--from-step",
                type=not_negative,
                metavar="N",
                help="CONFIG.yaml is a run folder: continue its checkpoint of step N as a new run, "
                "in logging.dir (default: RUN-from-N), with changed values of keys that "
                "training.phases may change",
            )
            parser.add_argument(
                "--only-make",
                action="store_true",
                help="with --from-step: make the folder of the new run, and do not train. Its "
                "branch.yaml is the configuration to start, for example by sbatch",
            )
        if name != "pretrain":
            keys = "that training.phases may change" if name == "train" else "of data and optimizer"
            parser.add_argument(
                "--change",
                action="store_true",
                help=f"resume the run with changed values of keys {keys}, from the next step on; "
                "without --change, changed values are refused",
            )


def run(name: str, arguments: argparse.Namespace) -> int:
    """Train as a rank if the environment says so. Otherwise train as the only rank, or launch all
    ranks here.

    Returns the exit code. Raises UserError with all problems of the configuration, its files or the
    run to resume, before any process group or other process exists.
    """
    from gspo_megatron.checkpoint.resume import preview
    from gspo_megatron.cli.check_inputs import all_problems, check_all, check_run
    from gspo_megatron.config import check_config, load
    from gspo_megatron.config.hub import fetch_weights, hold_commits
    from gspo_megatron.config.phases import hidden_overrides, phase_configs

    stage, fresh = STAGES[name][0], arguments.fresh
    change = getattr(arguments, "change", False)
    node = node_of_job(os.environ)
    env_size = ranks.world_size_of_rank(os.environ)
    if getattr(arguments, "from_step", None) is None:
        if getattr(arguments, "only_make", False):
            arguments.parser.error("--only-make: only with --from-step")
    else:
        arguments.config, arguments.overrides = _branch(arguments, env_size, node), []
        if arguments.only_make:
            return 0
    command, reporting = command_of(name, arguments), contextlib.nullcontext()
    find_start = partial(preview, fresh=fresh, change=change, command=command)
    if env_size is None:  # ranks leave these checks to the process that started them
        nproc = arguments.nproc and arguments.nproc * (node.count if node else 1)
        reporting = all_problems(nproc, find_start=find_start)
    with reporting:
        schema: Any = load.STAGES[stage]
        config: Any = load.load_config(arguments.config, arguments.overrides, schema)
    world_size = ranks.decide_world_size(config, arguments.nproc, env_size, node)
    inputs = None
    if env_size is None:
        try:
            checked = check_run(config, world_size, find_start=find_start, with_weights=True)
        except UserError as error:
            advice = _advice(config, arguments.config) if stage == "rl" else ""
            raise UserError(f"{error}{advice}") from error
        if change and checked.start is not None:
            step = checked.start.next_step
            # an override that the run has had from its start is no mistake
            for line in hidden_overrides(config, arguments.overrides, step):
                print(f"warning: {line}", file=sys.stderr, flush=True)
        if _is_finished(checked, command):
            return 0
        config, inputs = checked.config, checked.inputs
        hold_commits(config)
    elif stage == "rl":
        for phase in phase_configs(config):
            check_config(phase, world_size, for_training=True)
            fetch_weights(phase)
    else:
        config, inputs = check_all(config, world_size, find_start=find_start)
        fetch_weights(config)
    if env_size is None and world_size > 1:
        from gspo_megatron.process.launcher import launch

        command = [sys.executable, "-m", "gspo_megatron", name, arguments.config]
        command += arguments.overrides + ["--fresh"] * fresh + ["--change"] * change
        # After a signal, a run that saves checkpoints finishes its step, saves itself and ends.
        if node is not None and node.count > 1:
            wait_for_master(node)
        saves = config.checkpoint.interval > 0
        code = launch(command, world_size, saves_on_signals=saves, node=node)
        if code == INTERRUPTED:
            _tell_interrupted(config)
        return code
    if env_size is None:
        os.environ[SAVES] = "1"
        # If a run has several ranks, the launcher sets OMP_NUM_THREADS for each of them.
        if usable_cores() < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    try:
        return 0 if _train(stage, config, inputs, fresh, change) else STOPPED
    except KeyboardInterrupt:
        if env_size is None:
            _tell_interrupted(config)
        raise


def _branch(arguments: argparse.Namespace, env_size: int | None, node: Node | None) -> str:
    """Make the branch that --from-step asks for, or find it, and return its configuration file."""
    from gspo_megatron.checkpoint.branch import begin_branch

    if arguments.fresh:
        arguments.parser.error("--fresh: not with --from-step, which begins with a checkpoint")
    if env_size is not None or (node is not None and node.count > 1):
        raise UserError(
            "--from-step: one of several ranks or machines cannot make a branch; make it by the "
            "same command with --only-make, and start RUN-from-N/branch.yaml"
        )
    path = str(begin_branch(Path(arguments.config), arguments.from_step, arguments.overrides))
    print(f"branch of {arguments.config} after step {arguments.from_step}: {path}", flush=True)
    return path


def _train(stage: str, config: Any, inputs: Any, fresh: bool, change: bool) -> bool:
    """Train as a rank of the run. Returns False if the run was stopped and saved."""
    if stage == "rl":
        with loading():
            from gspo_megatron.rl.run import run_training

        return run_training(config, fresh=fresh, change=change)
    with loading():
        from gspo_megatron.supervised.run import run_stage

    return run_stage(config, inputs, fresh=fresh, change=change)


def _tell_interrupted(config: AnyConfig) -> None:
    """Print what is left of a run that Ctrl-C has ended at once."""
    from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
    from gspo_megatron.checkpoint.resume import run_folder

    saved = positions(run_folder(config) / CHECKPOINTS)
    if saved:
        outcome = f"the same command resumes the run from {saved[0].name}"
    elif config.checkpoint.interval:
        outcome = "nothing was saved"
    else:
        outcome = "nothing was saved, because checkpoint.interval = 0"
    print(f"interrupted: {outcome}", file=sys.stderr, flush=True)


def command_of(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return the words that start a run, without --fresh. Messages to the user append overrides to
    these words."""
    nproc = getattr(arguments, "nproc", None)
    words = ["gspo-megatron", name, *([] if nproc is None else [f"--nproc={nproc}"])]
    return [*words, arguments.config, *arguments.overrides]


def _is_finished(checked: Checked, command: Sequence[str]) -> bool:
    """Return whether the run in the run folder is finished and exported. If so, print this, and
    write the report if it is missing, or older than the metrics: the last start was then killed
    between its last checkpoint and the report."""
    from gspo_megatron.checkpoint.resume import finished_text, run_folder
    from gspo_megatron.config import Config

    config: Any = checked.config
    start = checked.start
    if start is None or start.state is None or not start.is_finished:
        return False
    exported = None if isinstance(config, Config) else config.export.hf_path
    if exported and not (Path(exported) / "config.json").exists():
        return False
    folder = run_folder(config)
    if config.logging.plots and _last_written(folder / METRICS_FILE) > _last_written(
        folder / "report.html"
    ):
        from gspo_megatron.observe.report import finish_run

        finish_run(folder)
    print(finished_text(config, start.state, command), flush=True)
    return True


def _last_written(path: Path) -> int:
    """Return a file's time of change; 0 without the file."""
    return path.stat().st_mtime_ns if path.exists() else 0


def _advice(config: Config, config_path: str) -> str:
    """Name the script beside an example's configuration if files that the script makes are
    missing."""
    files = itertools.chain(*config.input_files().values())
    needed = (config.data.tokenizer, config.model.checkpoint_path, *files)
    script = Path(config_path).with_name("run.sh")
    if not script.is_file() or all(path is None or Path(path).exists() for path in needed):
        return ""
    return f"\n{script}: makes the files that this configuration needs; run it first"
