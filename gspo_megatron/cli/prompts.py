"""`gspo-megatron prompts`: shows the results of a run's policy on each of its prompts, and writes a
file of the prompts that are still useful."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli.arguments import Commands, new_parser, number, positive
from gspo_megatron.errors import DataError, printable
from gspo_megatron.files import write_atomically

if TYPE_CHECKING:
    from gspo_megatron.data.selection import PromptFigures

_QUARTERS = (0.25, 0.5, 0.75, 1.0)


def add_parser(commands: Commands) -> None:
    text = "show how well the policy of a run solves each prompt, and write a file of some prompts"
    parser = new_parser(commands, "prompts", run, text)
    parser.add_argument("run_folder", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--top", type=positive, default=10, metavar="N", help="prompts in each list (default: 10)"
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="a new JSON Lines file with the rows of data.prompts whose last pass rate lies within "
        "the two bounds; rows without a pass rate are kept",
    )
    for name, what in (("min", "lowest"), ("max", "highest")):
        parser.add_argument(
            f"--{name}-pass-rate",
            type=partial(number, wanted="a share of 0 to 1", most=1.0),
            metavar="X",
            help=f"with --write: the {what} pass rate of the prompts that are kept, 0 to 1",
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, and write the file. Raises UserError."""
    from gspo_megatron.data.selection import figures_of
    from gspo_megatron.observe.metrics_files import DRAWS_FILE, read_draws

    low, high = arguments.min_pass_rate, arguments.max_pass_rate
    if arguments.write is None and (low is not None or high is not None):
        arguments.parser.error("--min-pass-rate, --max-pass-rate: only with --write")
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    if low > high:
        arguments.parser.error(f"--min-pass-rate {low:g}: above --max-pass-rate {high:g}")
    folder = Path(arguments.run_folder)
    records = read_draws(folder)
    if not records:
        wrong = "no groups of responses; allowed: the folder of an RL run with a finished step"
        raise DataError(f"{folder / DRAWS_FILE}: {wrong}")
    figures, names = figures_of(records), {each["prompt"]: each["row_id"] for each in records}
    _print_totals(records, figures)
    _print_rates(figures)
    _print_lists(figures, names, arguments.top)
    if saved := _saved(records):
        print(f"\n{saved}")
    if arguments.write is not None:
        print(f"\n{_write(folder, Path(arguments.write), figures, low, high)}")
    return 0


def _print_totals(records: Sequence[dict[str, Any]], figures: dict[str, PromptFigures]) -> None:
    responses = sum(each.responses for each in figures.values())
    spread = sum(each["spread"] for each in records) / len(records)
    print(
        f"{responses:,} responses to {len(figures):,} prompts in {len(records):,} groups, up to "
        f"step {records[-1]['step']:,}; rewards differ in {spread:.1%} of the groups"
    )


def _print_rates(figures: dict[str, PromptFigures]) -> None:
    """Print how many prompts have each range of pass rates in their last draw."""
    rates = [each.last_rate for each in figures.values() if not math.isnan(each.last_rate)]
    print("\npass rate of the last draw   prompts")
    rows = [("none solved", sum(rate == 0 for rate in rates))]
    low = 0.0
    for high in _QUARTERS:
        inside = sum(low < rate <= high and rate < 1 for rate in rates)
        rows.append((f"up to {high:.0%}" if high < 1 else "below 100%", inside))
        low = high
    rows.append(("all solved", sum(rate == 1 for rate in rates)))
    if unknown := len(figures) - len(rates):
        rows.append(("no rewards", unknown))
    for name, count in rows:
        print(f"{name:28} {count:7,}  {count / len(figures):6.1%}")


def _print_lists(figures: dict[str, PromptFigures], names: dict[str, str], top: int) -> None:
    """Print the hardest prompts, and the prompts that were never or always solved."""
    known = [(each.pass_rate, -each.draws, names[key], each) for key, each in figures.items()]
    known = sorted((each for each in known if each[3].responses), key=lambda each: each[:3])
    lists = {
        "hardest of those ever solved": [each for each in known if 0 < each[0] < 1],
        "dead: never solved": [each for each in known if each[0] == 0],
        "dead: always solved": [each for each in known if each[0] == 1],
    }
    for title, prompts in lists.items():
        print(f"\n{title}: {len(prompts):,} prompts")
        if not prompts:
            continue
        print("  draws  pass rate   last  reward  tokens  last step  row")
        for rate, _, name, each in prompts[:top]:
            reward, length = each.reward / each.responses, each.length / each.draws
            print(
                f"{each.draws:7,} {rate:10.1%} {each.last_rate:6.0%} {reward:7.3f} {length:7.1f} "
                f"{each.last_step:10,}  {printable(name)}"
            )


def _saved(records: Sequence[dict[str, Any]]) -> str | None:
    """Return a text that says how many responses data.selection has saved.

    Returns None if data.selection has chosen no prompts at random. The text compares the run with
    uniform draws of prompts. It assumes that with uniform draws, rewards would differ in the same
    share of groups as among the prompts that this run chose at random. Retired prompts are never
    chosen at random, so the share with uniform draws may be smaller, but not larger."""
    first = next((each["step"] for each in records if each.get("explored")), None)
    if first is None:
        return None
    since_then = [each for each in records if each["step"] >= first]
    explored = [each for each in since_then if each.get("explored")]
    useful, at_random = (sum(each["spread"] for each in of) for of in (since_then, explored))
    summary = (
        f"data.selection, from step {first:,}: rewards differ in {useful / len(since_then):.1%} of "
        f"{len(since_then):,} groups, and in {at_random / len(explored):.1%} of the "
        f"{len(explored):,} chosen at random"
    )
    if not at_random:
        return summary
    uniform_groups = useful * len(explored) / at_random
    saved = round(100 * (1 - len(since_then) / uniform_groups))
    return (
        f"{summary}:\nas many such groups of uniform draws would take about "
        f"{uniform_groups:,.0f} groups, so "
        f"{f'{saved}%' if saved > 0 else 'none'} of the responses are saved"
    )


def _write(
    folder: Path, out: Path, figures: dict[str, PromptFigures], low: float, high: float
) -> str:
    """Write the rows to keep. Returns a line that says what was written."""
    from gspo_megatron.config import load_config
    from gspo_megatron.data.inputs import prompt_forms
    from gspo_megatron.data.prompts import load_prompts
    from gspo_megatron.data.rows import Problems, json_line, read_rows
    from gspo_megatron.data.selection import identity
    from gspo_megatron.observe.metrics_files import changed_configs

    if out.exists():
        raise DataError(f"--write {out}: is there already; allowed: a new file")
    newest = [folder / "config.resolved.yaml", *changed_configs(folder).values()][-1]
    config = load_config(newest)
    form, key = prompt_forms(config)["data.prompts"], "data.prompts"
    lines, left_out, unknown = [], 0, 0
    for path in config.input_files()[key]:
        names = {
            prompt.source: identity(prompt)
            for prompt in load_prompts(path, form.fields, form.chat_template)
        }
        for where, row in read_rows(Path(path), form.fields.settings(), Problems()):
            known = figures.get(names[where])
            rate = math.nan if known is None else known.last_rate
            unknown += math.isnan(rate)
            if math.isnan(rate) or low <= rate <= high:
                lines.append(json_line(row))
            else:
                left_out += 1
    if not lines:
        raise DataError(f"--write {out}: no prompt is left; allowed: other bounds")
    write_atomically(out, "".join(lines).encode())
    return (
        f"{out}: {len(lines):,} prompts, {unknown:,} of them without a pass rate; {left_out:,} "
        f"left out, with a last pass rate outside of {low:g} to {high:g}"
    )
