"""`gspo-megatron verify`: the same gradients on every layout, on this model and this machine."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli import ranks
from gspo_megatron.cli.arguments import Commands, add_config, new_parser
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config, Layout

# Sums of a few hundred fp32 terms in another order differ by some 1e-6 of their size. In float64
# the routers of Megatron-Core still compute their softmax and their losses in float32.
TOLERANCES = {"fp32": 2e-5, "fp64": 1e-6}
_LINES_SHOWN = 8  # of parameters that differ in what is not finite
TOKEN_BUDGET = 64  # small, so that every replica has several micro-batches


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "verify",
        run,
        "hold loss and gradients of one policy update on several layouts against a reference",
        list_name="overrides",
    )
    add_config(parser)
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help="as tp=2,pp=2; the configuration's own, and each dimension by itself, unless given",
    )
    parser.add_argument(
        "--reference", default="tp=1", metavar="LAYOUT", help="what is right (default: one rank)"
    )
    parser.add_argument(
        "--precision",
        choices=tuple(TOLERANCES),
        default="fp32",
        help="of weights and activations, whatever the run will use: in bf16 experts change by "
        "rounding alone, which hides what is to be seen (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="largest relative error of a parameter's gradient (default: "
        + ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())
        + ")",
    )
    parser.add_argument(
        "--from-dump",
        type=Path,
        metavar="DIR",
        help="compute a step of a run again, instead of random sequences: a folder of "
        "RUN/dumps (training.dump_batches). Its loss is printed beside the one that was logged",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="with --from-dump, the weights; the run's newest checkpoint that is not of a later "
        "step unless given, or where there is none the weights that the run began with",
    )
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # what a rank is told
    parser.add_argument("--cut", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--updates", action="store_true", help=argparse.SUPPRESS)


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Print a table, and on the last line the worst error; exit code 1 beyond the tolerance."""
    from gspo_megatron.config import Layout, check_config, load_config

    if arguments.tolerance is None:
        arguments.tolerance = TOLERANCES[arguments.precision]
    precision = f"training.precision={arguments.precision}"
    config = load_config(arguments.config, [*arguments.overrides, precision])
    if arguments.result is not None:
        return _be_a_rank(config, arguments)
    if ranks.world_size_of_rank(os.environ) is not None or ranks.is_slurm_task(os.environ):
        raise UserError(
            "verify starts the ranks of each layout itself: start it once, outside torchrun and "
            "srun"
        )
    reference = Layout.parse(arguments.reference)
    if arguments.layouts:
        layouts = [Layout.parse(text) for text in arguments.layouts]
    else:
        layouts = _usual_layouts(config)
    problems = []
    for layout in (reference, *layouts):
        try:
            check_config(_on(config, layout), layout.world_size)
        except ConfigError as error:
            problems += [f"layout {layout}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)
    if arguments.from_dump is not None:
        return _verify_dump(arguments, config, reference, layouts)
    if arguments.checkpoint is not None:
        raise UserError("--checkpoint: nothing reads it without --from-dump")
    worst, _ = _compare_all(arguments, config, reference, layouts)
    return _conclude(arguments, layouts, worst)


def _verify_dump(
    arguments: argparse.Namespace, config: Config, reference: Layout, layouts: Sequence[Layout]
) -> int:
    """The same of a dumped step, with its loss."""
    from rich.console import Console

    from gspo_megatron.checkpoint.resume import weights_fit
    from gspo_megatron.data.inputs import model_vocab_size
    from gspo_megatron.data.tokenizers import load_tokenizer
    from gspo_megatron.rl.dumps import Dump, find_weights

    dump = Dump.read(arguments.from_dump)
    vocab_size = model_vocab_size(config, load_tokenizer(config.data.tokenizer))
    problems = dump.problems(config, vocab_size)
    if problems:
        raise ConfigError(problems)
    weights = find_weights(dump, config, arguments.checkpoint)
    if weights.checkpoint is not None:
        weights_fit(weights.checkpoint, config, vocab_size)
    arguments.updates = weights.is_start and arguments.precision != "fp64"
    arguments.optimizer = weights.optimizer and arguments.updates
    arguments.checkpoint = None if weights.checkpoint is None else str(weights.checkpoint)
    console = Console(soft_wrap=True)
    for line in weights.notes:
        console.print(f"warning: {line}", markup=False)
    console.print(f"step {dump.step}, weights: {weights.text}", markup=False)
    if not arguments.updates:
        console.print("all mini-batches at these weights: the loss is not that of the run")
    elif arguments.precision != dump.precision:
        console.print(f"the run computed in {dump.precision}: its loss differs by rounding")
    worst, loss = _compare_all(arguments, config, reference, layouts)
    logged = dump.logged_loss()
    beside = "" if logged is None else f" logged_loss={logged:.9g}"
    return _conclude(arguments, layouts, worst, f" step={dump.step} loss={loss:.9g}{beside}")


def _conclude(
    arguments: argparse.Namespace, layouts: Sequence[Layout], worst: float, more: str = ""
) -> int:
    """The last line, and the exit code."""
    good = worst <= arguments.tolerance
    print(
        f"layouts={len(layouts)} worst_error={worst:.2e} tolerance={arguments.tolerance:.2e} "
        f"equal={int(good)}{more}"
    )
    return 0 if good else 1


def _on(config: Config, layout: Layout) -> Config:
    from gspo_megatron.config import apply_layout

    return apply_layout(config, layout)


def _usual_layouts(config: Config) -> list[Layout]:
    """The configuration's own layout, and two of each kind of parallelism that fits the model.

    Raises UserError where its own is one for a cluster.
    """
    from gspo_megatron.config import Layout, check_config

    own = config.layout()
    if own.world_size > max(ranks.RANKS_WITHOUT_ASKING, os.cpu_count() or 1):
        raise UserError(
            f"layout {own}: takes {own.world_size} ranks, which is much for one machine; name "
            "the layouts to compare, as in --layouts tp=2 pp=2,ep=2"
        )
    found = [] if own.world_size == 1 else [own]
    for text in ("dp=2", "tp=2", "pp=2", "ep=2", "cp=2"):
        layout = Layout.parse(text)
        try:
            check_config(_on(config, layout), layout.world_size)
        except ConfigError:
            continue
        if layout not in found:
            found.append(layout)
    return found


def _compare_all(
    arguments: argparse.Namespace, config: Config, reference: Layout, layouts: Sequence[Layout]
) -> tuple[float, float]:
    """The worst error of all layouts, and the reference's loss."""
    from rich.console import Console
    from rich.table import Table

    from gspo_megatron.verify.parity import compare

    cut = _common_cut(config, (reference, *layouts))
    console = Console()
    table = Table("layout", "ranks")
    table.add_column("worst parameter", overflow="fold")  # a name cut short names nothing
    for name in ("its error", "loss", "grad norm", ""):
        table.add_column(name)
    worst, notes = 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        expected = _measure(arguments, reference, cut, Path(folder))
        for layout in layouts:
            console.print(f"[dim]{layout} on {layout.world_size} ranks ...[/dim]")
            result = _measure(arguments, layout, cut, Path(folder))
            errors = compare(expected["gradients"], result["gradients"], not_finite=True)
            name, error = errors[0]
            notes += [f"{layout}: {text}" for text in _not_finite(result, expected)]
            others = [_error(result, expected, key) for key in ("loss", "grad_norm")]
            largest = max(error, result["replica_error"], *others)
            worst = max(worst, largest)
            verdict = "ok" if largest <= arguments.tolerance else "DIFFERS"
            figures = [f"{value:.1e}" for value in (error, *others)]
            table.add_row(str(layout), str(layout.world_size), name, *figures, verdict)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return worst, expected["loss"]


def _error(result: Mapping[str, Any], expected: Mapping[str, Any], key: str) -> float:
    """Of a figure; a loss near 0 is held against the size of the terms that it is a sum of. What is
    not finite has none where it is the same on both sides, and an infinite one elsewhere, as the
    loss has where the steps ended in different mini-batches."""
    if key == "loss" and result["lost_in"] != expected["lost_in"]:
        return math.inf
    scale = abs(expected[key])
    if key == "loss":
        scale = max(scale, expected["loss_scale"])
    difference = abs(result[key] - expected[key])
    if result[key] == expected[key] or (math.isnan(result[key]) and math.isnan(expected[key])):
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf


def _not_finite(result: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """For people: what is not finite here and there alike, and what on one side alone."""
    import torch

    from gspo_megatron.verify.parity import where_not_finite

    alike, differing, lines = [], [], []
    ends = [side["lost_in"] or "none" for side in (result, expected)]
    if ends != ["none", "none"]:
        lines.append(
            f"the step ends in mini-batch {ends[0]} (the reference's: {ends[1]}), whose gradient "
            "norm is not finite: there is no loss of the whole step"
        )
    for key in ("loss", "grad_norm"):
        pair = [torch.tensor(side[key], dtype=torch.float64) for side in (result, expected)]
        where = where_not_finite(*pair)
        name = key.replace("_", " ")
        if where is not None:
            differing.append(f"{name}: {where}")
        elif not math.isfinite(expected[key]):
            alike.append(name)
    count = 0
    for name, wanted in expected["gradients"].items():
        where = where_not_finite(result["gradients"][name], wanted)
        if where is not None:
            differing.append(f"{name}: {where}")
        count += where is None and not bool(wanted.isfinite().all())
    if count:
        alike.append(f"{count} of {len(expected['gradients'])} gradients")
    told = [f"not finite in other places than the reference: {text}" for text in differing]
    more = len(told) - _LINES_SHOWN
    lines += [*told[:_LINES_SHOWN], f"... and {more} more"] if more > 0 else told
    if alike:
        lines.append(
            f"not finite, in the same places as the reference: {', '.join(alike)}; "
            "the errors are those of the rest"
        )
    return lines


def _common_cut(config: Config, layouts: Sequence[Layout]) -> tuple[int, int]:
    """(replicas, multiple): micro-batches that every layout can run alike, since the routers' aux
    losses depend on what is in a micro-batch."""
    from gspo_megatron.config import resolve_parallel

    replicas, multiple = 1, 1
    for layout in layouts:
        parallel = resolve_parallel(_on(config, layout), layout.world_size)
        replicas = math.lcm(replicas, parallel.data_parallel_size)
        if layout.vpp:
            multiple = math.lcm(multiple, layout.pp)
    return replicas, multiple


def _measure(
    arguments: argparse.Namespace, layout: Layout, cut: tuple[int, int], folder: Path
) -> dict[str, Any]:
    """Run one update on `layout` in processes of its own; what its rank 0 found."""
    import torch

    from gspo_megatron.cli.launch import launch

    path = folder / f"{layout}.pt"
    command = [sys.executable, "-m", "gspo_megatron", "verify", arguments.config]
    command += [*arguments.overrides, "--layouts", str(layout)]
    command += ["--precision", arguments.precision]
    if arguments.from_dump is not None:
        command += ["--from-dump", str(arguments.from_dump)]
        command += [f"--{name}" for name in ("optimizer", "updates") if getattr(arguments, name)]
    if arguments.checkpoint is not None:
        command += ["--checkpoint", arguments.checkpoint]
    command += ["--result", str(path), "--cut", *map(str, cut)]
    code = launch(command, layout.world_size)
    if code in (129, 130, 143):  # a signal to this program, not a failure
        raise SystemExit(code)
    if code != 0:
        raise UserError(f"layout {layout}: the update failed with exit code {code}")
    return torch.load(path, weights_only=True)


def _be_a_rank(config: Config, arguments: argparse.Namespace) -> int:
    import torch

    from gspo_megatron.config import Layout
    from gspo_megatron.data.inputs import model_vocab_size
    from gspo_megatron.data.tokenizers import load_tokenizer
    from gspo_megatron.platform.groups import start_processes, stop_processes
    from gspo_megatron.rl.dumps import Dump
    from gspo_megatron.verify.dumped_step import run_dumped_step
    from gspo_megatron.verify.parity import Cut, run_update
    from gspo_megatron.verify.synthetic import synthetic_batch

    assert ranks.world_size_of_rank(os.environ) is not None
    config = _on(config, Layout.parse(arguments.layouts[0]))
    vocab_size = model_vocab_size(config, load_tokenizer(config.data.tokenizer))
    replicas, multiple = arguments.cut
    started = start_processes()
    if arguments.from_dump is None:
        batch = synthetic_batch(config.objective, vocab_size)
        result = run_update(config, vocab_size, batch, Cut(replicas, TOKEN_BUDGET, multiple))
    else:
        result = run_dumped_step(
            config,
            vocab_size,
            Dump.read(arguments.from_dump, contents=False),
            None if arguments.checkpoint is None else Path(arguments.checkpoint),
            Cut(replicas, config.training.micro_batch_tokens, multiple),
            optimizer=arguments.optimizer,
            updates=arguments.updates,
        )
    if started.is_main:
        found = {
            "gradients": result.gradients,
            "replica_error": result.replica_error,
            "loss": result.metrics["loss"],
            "loss_scale": result.loss_scale,
            "grad_norm": result.metrics["grad_norm"],
            "lost_in": result.lost_in,
        }
        torch.save(found, arguments.result)
    stop_processes()
    return 0
