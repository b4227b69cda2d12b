"""`gspo-megatron verify`: compares the gradients of layouts, for this model on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, config_parser, number, positive
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.process import ranks

if TYPE_CHECKING:
    from gspo_megatron.config import Layout
    from gspo_megatron.verify.parity import Task
    from gspo_megatron.verify.results import StepResult

# If a few hundred fp32 terms are added in another order, the sum differs by some 1e-6 of its size.
# The gradients of q/k norms are sums whose terms nearly cancel: 6e-5 was seen in a trained model
# (and 1e-13 in fp64). Mistakes that were planted gave 1e-2 or more. With float64, Megatron-Core's
# routers still compute their softmax and their losses in float32.
TOLERANCES = {"fp32": 2e-4, "fp64": 1e-6}


def add_parser(commands: Commands) -> None:
    text = "compare loss and gradients of one policy update on several layouts with a reference"
    parser = config_parser(commands, "verify", run, text, source="CONFIG.yaml|RUN")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help="the layouts to compare, as tp=2,pp=2 (default: the configuration's, and two ranks "
        "of each kind of parallelism)",
    )
    parser.add_argument(
        "--reference",
        default="tp=1",
        metavar="LAYOUT",
        help="the layout to compare with (default: one rank)",
    )
    parser.add_argument(
        "--reference-on-cpu",
        action="store_true",
        help="compute the reference on the CPU, which compares the GPUs' kernels with the CPU's",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(TOLERANCES),
        default="fp32",
        help="the precision of weights and activations, whatever the run uses: in bf16, rounding "
        "alone changes the chosen experts, which hides real differences (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=number,
        metavar="X",
        help="the largest relative error allowed in a parameter's gradient (default: "
        + ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())
        + ")",
    )
    parser.add_argument(
        "--step",
        type=positive,
        metavar="N",
        help="compute step N of the run again, from the inputs that the run has kept of it "
        "(training.keep_step_inputs), instead of random sequences; prints its loss beside the "
        "run's",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="with --step: the checkpoint with the weights (default: the newest one of the run "
        "that is not from a later step, else the weights that the run began with)",
    )
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)  # only for the ranks


def run(arguments: argparse.Namespace) -> int:
    """Print what is compared, a table, and on the last line the largest error. Returns 1 if that
    error is above the tolerance."""
    from gspo_megatron.config import Layout, load_config
    from gspo_megatron.config.hub import fetch_weights
    from gspo_megatron.config.phases import at_step
    from gspo_megatron.data.inputs import model_vocab_size
    from gspo_megatron.data.tokenizers import load_tokenizer

    if arguments.task is not None:
        from gspo_megatron.verify.parity import run_task

        run_task(arguments.task)
        return 0
    if ranks.world_size_of_rank(os.environ) is not None:
        raise UserError(
            "verify starts the ranks of each layout: start it once, outside torchrun and srun"
        )
    precision = f"training.precision={arguments.precision}"
    source = Path(arguments.config)
    file = source / "config.resolved.yaml" if source.is_dir() else source
    config = at_step(load_config(file, [*arguments.overrides, precision]), arguments.step or 1)
    reference = Layout.parse(arguments.reference)
    from gspo_megatron.verify.parity import (
        Task,
        check_layouts,
        common_cut,
        decide_share_prompts,
        usual_layouts,
    )

    layouts = [Layout.parse(text) for text in arguments.layouts]
    layouts = layouts or usual_layouts(config, ranks.RANKS_WITHOUT_ASKING)
    every = [reference, *layouts]
    check_layouts(config, every)
    fetch_weights(config)
    config = decide_share_prompts(config, every)
    if arguments.checkpoint is not None and arguments.step is None:
        raise UserError("--checkpoint: it has no effect without --step")
    is_step = arguments.step is not None
    vocab_size = model_vocab_size(config, load_tokenizer(config.data.tokenizer))
    task = Task(config, vocab_size, common_cut(config, every, is_step=is_step))
    if is_step:
        run_folder = source if source.is_dir() else Path(str(config.logging.dir))
        task = _task_of_step(arguments, task, run_folder)
    tolerance = arguments.tolerance
    tolerance = TOLERANCES[arguments.precision] if tolerance is None else tolerance
    on_cpu = arguments.reference_on_cpu
    worst, loss = _compare_all(str(file), task, every, tolerance, on_cpu=on_cpu)
    good = worst <= tolerance
    print("for scripts:")
    line = f"layouts={len(layouts)} worst_error={worst:.2e} tolerance={tolerance:.2e}"
    line += f" equal={int(good)}"
    if task.kept is not None:
        logged = task.kept.logged_loss()
        line += f" step={task.kept.step} loss={loss:.9g}"
        line += "" if logged is None else f" logged_loss={logged:.9g}"
    print(line)
    return int(not good)


def _task_of_step(arguments: argparse.Namespace, task: Task, run_folder: Path) -> Task:
    """Return the task with the inputs and the weights of a step, and print which weights these are.
    Raises UserError if the inputs or the weights do not fit."""
    from gspo_megatron.checkpoint.resume import weights_fit
    from gspo_megatron.rl.step_inputs import StepInputs, find_weights

    kept = StepInputs.read(run_folder, arguments.step)
    problems = kept.problems(task.config, task.vocab_size)
    if problems:
        raise ConfigError(problems)
    weights = find_weights(kept, task.config, arguments.checkpoint)
    if weights.checkpoint is not None:
        weights_fit(weights.checkpoint, task.config, task.vocab_size)
    updates = weights.is_start and arguments.precision != "fp64"
    lines = [f"warning: {line}" for line in weights.notes]
    lines.append(f"step {kept.step}, weights: {weights.text}")
    if not updates:
        lines.append("all mini-batches use these weights: the loss is not that of the run")
    elif arguments.precision != kept.precision:
        lines.append(f"the run computed in {kept.precision}: its loss differs by rounding")
    print("\n".join(lines), flush=True)  # flushed, so that it comes before the output of the ranks
    return dataclasses.replace(
        task,
        kept=kept,
        checkpoint=weights.checkpoint,
        optimizer=weights.optimizer and updates,
        updates=updates,
    )


def _compare_all(
    config_file: str,
    task: Task,
    layouts: Sequence[Layout],
    tolerance: float,
    *,
    on_cpu: bool,
) -> tuple[float, float]:
    """Compute the task on every layout, and print a table. The first layout is the reference, which
    uses no GPU if `on_cpu` is set. Returns the largest error, and the reference's loss."""
    from gspo_megatron.cli.check_tables import console, new_table, print_lines
    from gspo_megatron.verify.results import compare, describe_not_finite, metric_error

    names = (">ranks", ">loss\nerror", ">grad norm\nerror", ">largest error\nof a gradient", "")
    table = new_table(None, "layout", *names)
    worst, notes = 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        expected = _measure(config_file, task, layouts[0], Path(folder), on_cpu=on_cpu)
        for layout in layouts[1:]:
            print(f"{layout} on {layout.world_size} ranks ...", flush=True)
            result = _measure(config_file, task, layout, Path(folder))
            errors = compare(expected.gradients, result.gradients, not_finite=True)
            name, error = errors[0]
            if error > 0:
                notes.append(f"{layout}: the gradient with the largest error is that of {name}")
            notes += [f"{layout}: {text}" for text in describe_not_finite(result, expected)]
            if result.replica_error > tolerance:
                copies = f"copies of one gradient differ by {result.replica_error:.1e}"
                notes.append(f"{layout}: {copies} between the ranks that hold it")
            others = [metric_error(result, expected, key) for key in ("loss", "grad_norm")]
            largest = max(error, result.replica_error, *others)
            worst = max(worst, largest)
            verdict = "ok" if largest <= tolerance else "DIFFERS"
            values = [f"{value:.1e}" for value in (*others, error)]
            table.add_row(str(layout), str(layout.world_size), *values, verdict)
    reference, ranks_of_it = layouts[0], layouts[0].world_size
    place = f"{ranks_of_it} rank{'s' * (ranks_of_it > 1)}{' on the CPU' * on_cpu}"
    text = (
        f"One update of the policy on each layout, compared with the same update on {reference} "
        f"({place}). All errors are relative differences; up "
        f"to {tolerance:g} counts as equal, because sums in another order round differently."
    )
    print_lines([("", text)], 0)
    console().print(table, markup=False)
    print_lines((("", note) for note in notes), 0)
    return worst, expected.metrics["loss"]


def _measure(
    config_file: str, task: Task, layout: Layout, folder: Path, *, on_cpu: bool = False
) -> StepResult:
    """Compute the task on `layout`, in new processes. These see no GPU if `on_cpu` is set."""
    from gspo_megatron.config import apply_layout
    from gspo_megatron.process.launcher import launch

    path = folder / f"{layout}.task"
    of_layout = dataclasses.replace(task, config=apply_layout(task.config, layout))
    path.write_bytes(pickle.dumps(of_layout))
    command = [sys.executable, "-m", "gspo_megatron", "verify", config_file, "--task", str(path)]
    hidden = ["env", "CUDA_VISIBLE_DEVICES="] if on_cpu else []
    code = launch([*hidden, *command], layout.world_size)
    if code in (129, 130, 143):  # a signal to this program, not a failure
        raise SystemExit(code)
    if code != 0:
        raise UserError(f"layout {layout}: the update failed with exit code {code}")
    return pickle.loads(path.with_suffix(".result").read_bytes())
