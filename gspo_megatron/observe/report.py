"""Writes report.html for one run or a comparison, and prints the summary at the end of a run."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jinja2 import Environment, PackageLoader
from rich import box
from rich import table as rich_table
from rich.console import Console

from gspo_megatron.config.load import parse_yaml
from gspo_megatron.errors import ConfigError, DataError, UserError, format_value
from gspo_megatron.files import make_folder, write_atomically
from gspo_megatron.observe.advice import Finding, advise, write_steps
from gspo_megatron.observe.history import history
from gspo_megatron.observe.metrics_files import (
    CHANGES_FILE,
    RL,
    STAGES,
    Record,
    Run,
    changed_configs,
    groups,
    load_runs,
    phase_of,
    read_samples,
    series,
    steps_done,
)
from gspo_megatron.observe.progress import MISSING, console_for, duration, fixed, number, percent
from gspo_megatron.observe.suite_table import only_suites, print_suites
from gspo_megatron.observe.trackers import flattened
from gspo_megatron.observe.windows import SMALLEST_WINDOW, window, window_means

_logger = logging.getLogger(__name__)

_LONG_RUN = 2 * SMALLEST_WINDOW  # steps; the values of a shorter run are not averaged
_MEANS = (
    f"In runs of {_LONG_RUN} or more steps, figures of a step are shown as means over a tenth of "
    f"the steps, at least {SMALLEST_WINDOW}: over the first ones, the last ones and the best."
)
_SAMPLES_SHOWN = 12
_CONFIG_FILE, _ENVIRONMENT = "config.resolved.yaml", "environment.json"


# --- documents ------------------------------------------------------------------------------------


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False  # True: cells are texts, aligned to the left, with their line breaks


class Picture(NamedTuple):
    path: Path  # a PNG file
    description: str

    def base64(self) -> str:
        return b64encode(self.path.read_bytes()).decode("ascii")


class Folded(NamedTuple):
    """Text that appears when the reader clicks on its title."""

    title: str
    text: str


class ReportSection(NamedTuple):
    title: str
    items: Sequence[str | Table | Picture | Folded]  # a string is a paragraph


def render_html(
    title: str,
    subtitle: str,
    sections: Sequence[ReportSection],
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Return an HTML document that needs no other file. `tiles`: (name, value), in large print."""
    environment = Environment(
        loader=PackageLoader("gspo_megatron.observe"), autoescape=True, trim_blocks=True
    )
    template = environment.get_template("report.html.j2")
    return template.render(title=title, subtitle=subtitle, sections=sections, tiles=tiles)


# --- the main metrics of a run --------------------------------------------------------------------


class _Metric(NamedTuple):
    name: str
    keys: tuple[str, ...]  # the first key that the run has is used
    best: Callable[..., int] | None  # max or min; None: neither high nor low is better
    write: Callable[[float | None], str]
    is_noisy: bool = True  # for long runs, show means over several steps


_REWARD = _Metric("reward", ("reward/mean",), max, fixed)
_HELD_OUT_REWARD = _Metric("held-out reward", ("evaluation/reward",), max, fixed, False)
_ACCURACY = _Metric("held-out accuracy", ("evaluation/accuracy",), max, percent, False)
_IN_ORDER = _Metric("pairs in the right order", ("evaluation/accuracy",), max, percent, False)
_HELD_OUT_LOSS = _Metric("held-out loss", ("evaluation/loss",), min, number, False)
_CLIPPED = _Metric("clip fraction", ("clip/token/binding", "clip/sequence/binding"), None, percent)
_LOSS = _Metric("loss", ("loss",), None, number)
_GRAD_NORM = _Metric("gradient norm", ("grad_norm",), None, number)
_THROUGHPUT = _Metric("tokens/s", ("perf/tokens_per_second",), max, number)
_STEP_TIME = _Metric("step time", ("perf/step_seconds",), min, duration)
_RL_METRICS = (
    _REWARD,
    _ACCURACY,
    _HELD_OUT_REWARD,
    _LOSS,
    _GRAD_NORM,
    _CLIPPED,
    _THROUGHPUT,
    _STEP_TIME,
)
_SUPERVISED_METRICS = (_HELD_OUT_LOSS, _LOSS, _IN_ORDER, _GRAD_NORM, _THROUGHPUT, _STEP_TIME)

# The columns of a comparison: (value, metric). A terminal has room only for a few.
_IN_TERMINAL = 4
_BOTH = ("last", "best")
_RL_COLUMNS = (
    *((kind, metric) for metric in (_REWARD, _ACCURACY) for kind in _BOTH),
    *(("last", metric) for metric in (_GRAD_NORM, _CLIPPED, _THROUGHPUT)),
)
_SUPERVISED_COLUMNS = (
    *((kind, _HELD_OUT_LOSS) for kind in _BOTH),
    *(("last", metric) for metric in (_LOSS, _GRAD_NORM, _THROUGHPUT)),
)


class Summary(NamedTuple):
    """The first, last and best value of a metric in a run, or None. For a noisy metric of a long
    run, these values are means over `steps` steps."""

    metric: _Metric
    first: float | None
    last: float | None
    best: float | None  # best finite value
    best_step: int | None
    not_finite: int  # number of steps at which the metric was NaN or infinite
    steps: int = 1  # number of steps in each mean
    of_steps: int = 0  # number of steps with a value


def main_phase(records: Sequence[Record]) -> str:
    """Return the phase to report: the first of STAGES that has records, else RL."""
    phases = {phase_of(record) for record in records}
    return next((each for each in STAGES if each in phases), RL)


def summarize(records: Sequence[Record], phase: str = RL) -> list[Summary]:
    """Summarize the main metrics of a phase in a fixed order, including metrics without values."""
    metrics = _RL_METRICS if phase == RL else _SUPERVISED_METRICS
    return [_summarize(records, metric, phase) for metric in metrics]


def _summarize(records: Sequence[Record], metric: _Metric, phase: str) -> Summary:
    curves = (series(records, key, phase) for key in metric.keys)
    steps, values = next((curve for curve in curves if curve[0]), ([], []))
    not_finite = sum(not math.isfinite(value) for value in values)
    count = len(values)
    averaged = window(count) if metric.is_noisy and count >= _LONG_RUN else 1
    steps, values = steps[averaged - 1 :], window_means(values, averaged)
    finite = {step: value for step, value in zip(steps, values) if math.isfinite(value)}
    best = best_step = None
    if metric.best is not None and finite:
        best_step = metric.best(finite, key=finite.__getitem__)
        best = finite[best_step]
    first, last = (values[0], values[-1]) if values else (None, None)
    return Summary(metric, first, last, best, best_step, not_finite, averaged, count)


def wall_seconds(records: Sequence[Record]) -> float | None:
    """Return the seconds spent in the steps of all phases; None if the run did not time them."""
    seconds = [
        value
        for phase in {phase_of(record) for record in records}
        for value in series(records, "perf/step_seconds", phase)[1]
        if math.isfinite(value)
    ]
    return sum(seconds) if seconds else None


def correct_at(folders: Sequence[Path]) -> str:
    """Write as text the smallest reward that `evaluation/accuracy` counts as correct."""
    least = {_config_of(each).get("evaluation", {}).get("correct_at", 1.0) for each in folders}
    return f"reward ≥ {least.pop():g}" if len(least) == 1 else "reward ≥ evaluation.correct_at"


def _name(metric: _Metric, folders: Sequence[Path]) -> str:
    return f"{metric.name} ({correct_at(folders)})" if metric is _ACCURACY else metric.name


def _summary_table(folder: Path, records: Sequence[Record]) -> Table:
    rows = []
    for entry in summarize(records, main_phase(records)):
        if not entry.of_steps:
            continue
        name, write = _name(entry.metric, [folder]), entry.metric.write
        if entry.steps > 1:
            name += f", means of {entry.steps}"
        if entry.not_finite:
            name += f" (not finite at {entry.not_finite} steps)"
        step = MISSING if entry.best_step is None else str(entry.best_step)
        rows.append([name, write(entry.first), write(entry.last), write(entry.best), step])
        if entry.metric is _ACCURACY and (interval := _last_interval(records)):
            low, high, prompts = interval
            rows.append([f"  95% interval, n = {prompts:.0f}", "", f"{low} to {high}", "", ""])
    return Table(["", "first", "last", "best", "at step"], rows)


def _last_interval(records: Sequence[Record]) -> tuple[str, str, float] | None:
    """Return the interval of the last held-out accuracy and its number of prompts; None for runs of
    earlier versions, which did not record the interval."""
    names = ("evaluation/accuracy_low", "evaluation/accuracy_high", "evaluation/prompts")
    curves = [series(records, name)[1] for name in names]
    if not all(curves):
        return None
    low, high, prompts = (curve[-1] for curve in curves)
    return percent(low), percent(high), prompts


def _terminal_table(run: Run) -> rich_table.Table:
    steps = steps_done(run.records, main_phase(run.records))
    summary = _summary_table(run.path, run.records)
    title, head = f"{run.name}: {steps} step{'s' * (steps != 1)}", summary.head
    rows = [*summary.rows, ["time of steps", "", duration(wall_seconds(run.records)), "", ""]]
    if summary.rows and not steps:  # an evaluation, with one value of each metric
        title, head = run.name, ["", "value"]
        rows = [[row[0], row[2]] for row in summary.rows]
    table = rich_table.Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in head:
        justify = "right" if name else "left"
        style = "bold" if name == "last" else None
        table.add_column(name, justify=justify, style=style, no_wrap=bool(name))
    for row in rows:
        table.add_row(*row)
    return table


# --- report.html ----------------------------------------------------------------------------------


def write_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write OUT/report.html, a single file with its pictures inside, and return its path.

    One run is shown in full, with its pictures also in OUT/plots. Several runs are compared. Runs
    whose names differ only by the seed are shown as mean and standard deviation.

    Raises DataError if a folder holds no run or a damaged run, and UserError if `out_dir` cannot be
    written.
    """
    assert run_dirs, "a report of no run"
    runs = load_runs(run_dirs)
    path = Path(out_dir) / "report.html"
    try:
        make_folder(path.parent)
    except OSError as error:
        raise UserError(f"{out_dir}: cannot be a folder: {error.strerror}") from error
    page = _report_one(runs[0], Path(out_dir)) if len(runs) == 1 else _report_several(runs)
    # Sampled text may hold lone surrogates.
    return write_atomically(path, page.encode("utf-8", errors="replace"))


def finish_run(run_dir: str | Path, stream: TextIO | None = None, *, plots: bool = True) -> None:
    """Write the run's plots and report, then print its summary and the paths.

    `stream` defaults to stdout. With plots=False only the summary is printed. If a plot or the
    report fails, print the error; the finished run does not fail.
    """
    run_dir, console = Path(run_dir), console_for(stream)
    lines = [f"run     {run_dir}"]
    if plots:
        try:
            lines.append(f"report  {write_report([run_dir], run_dir)}")
        except Exception as error:
            _logger.debug("the report was not written", exc_info=True)
            lines.append(f"report  not written: {type(error).__name__}: {error}")
    [run] = load_runs([run_dir])
    if not only_suites(run.records):
        console.print(_terminal_table(run))
    print_suites(run_dir, console)
    _print_warnings(console, [run])
    for line in lines:
        # soft_wrap keeps each path on one line, so that a user can copy it.
        console.print(line, soft_wrap=True, markup=False)


def print_results(run_dirs: Sequence[str | Path], stream: TextIO | None = None) -> None:
    """Print the main metrics: a table for one run, or one line for each of several runs."""
    runs, console = load_runs(run_dirs), console_for(stream)
    if len(runs) == 1:
        console.print(_terminal_table(runs[0]))
        return
    for phase, members in _by_phase(runs).items():
        columns = (_RL_COLUMNS if phase == RL else _SUPERVISED_COLUMNS)[:_IN_TERMINAL]
        folders = [run.path for run in members]
        names = [f"{kind} {_name(metric, folders)}" for kind, metric in columns]
        table = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("run", overflow="fold")
        for name in ("steps", *names, "time of steps"):
            table.add_column(name, justify="right")
        for run in members:
            summaries = [(kind, m.write, _summarize(run.records, m, phase)) for kind, m in columns]
            cells = [write(getattr(summary, kind)) for kind, write, summary in summaries]
            steps, wall = str(steps_done(run.records, phase)), duration(wall_seconds(run.records))
            table.add_row(run.name, steps, *cells, wall)
        console.print(table)
    console.print(_MEANS)


def print_comparison(run_dirs: Sequence[str | Path], stream: TextIO | None = None) -> None:
    """Print the settings that differ between the runs, and the warnings about the runs."""
    runs, console = load_runs(run_dirs), console_for(stream)
    settings = _differing_settings(runs)
    if settings.rows:
        for line in _stages_differ(runs):
            console.print(line, soft_wrap=True)
        console.print("settings that differ:")
        _print_settings(console, settings)
    _print_warnings(console, runs)


def _print_settings(console: Console, settings: Table) -> None:
    """Print a table. If it is wider than the console, print a block of lines for each key."""
    table = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in settings.head:
        table.add_column(name, no_wrap=True)
    for row in settings.rows:
        table.add_row(*row)
    needed = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
    if needed <= console.width:
        console.print(table)
        return
    for key, *values in settings.rows:
        console.print(f"  {key}", soft_wrap=True)
        for name, value in zip(settings.head[1:], values, strict=True):
            console.print(f"    {name}: {value}", soft_wrap=True)


def _print_warnings(console: Console, runs: Sequence[Run]) -> None:
    for name, finding in _warnings(runs):
        console.print(f"warning: {name}: {finding}", markup=False)


def _report_one(run: Run, out: Path) -> str:
    # A run without plots need not wait for matplotlib.
    from gspo_megatron.observe.plots import plot_run
    from gspo_megatron.observe.timing_plots import plot_timeline

    records, phase = run.records, main_phase(run.records)
    tiles = [
        (
            _headline(entry, run),
            f"{entry.metric.write(entry.first)} → {entry.metric.write(entry.last)}",
        )
        for entry in summarize(records, phase)[:2]
        if entry.last is not None
    ]
    tiles.append(("steps", f"{steps_done(records, phase):,}"))
    tiles.append(("time of steps", duration(wall_seconds(records))))
    sections = [ReportSection("Metrics", [_summary_table(run.path, records)])]
    sections += [ReportSection("History", sentences)] if (sentences := history(run.path)) else []
    sections += warning_section([run])
    pictures = [*plot_run(run, out), plot_timeline(run, out / "plots" / "timeline.png")]
    if shown := [Picture(path, path.stem) for path in pictures if path is not None]:
        sections.append(ReportSection("Plots", [*shown]))
    if samples := read_samples(run.path):
        sections.append(ReportSection("Samples", [_sample_table(samples)]))
    sections.append(ReportSection("Details", _details(run)))
    return render_html(run.name, str(run.path), sections, tiles)


def _headline(entry: Summary, run: Run) -> str:
    """Return the caption of a tile: the metric, and the number of steps or prompts."""
    name = f"{_name(entry.metric, [run.path])}, first to last"
    if entry.steps > 1:
        return f"{name} {entry.steps} of {entry.of_steps} steps"
    interval = _last_interval(run.records) if entry.metric is _ACCURACY else None
    if interval is None:
        return name
    return f"{name} (n = {interval[2]:.0f}, 95% of the last {interval[0]} to {interval[1]})"


def _by_phase(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs by the phase to report, in the order in which the phases first appear."""
    by_phase: dict[str, list[Run]] = {}
    for run in runs:
        by_phase.setdefault(main_phase(run.records), []).append(run)
    return by_phase


def _report_several(runs: Sequence[Run]) -> str:
    by_phase, sections = _by_phase(runs), []
    with tempfile.TemporaryDirectory() as scratch:
        for phase, members in by_phase.items():
            path = Path(scratch) / f"{phase}.png"
            suffix = f" ({phase})" if len(by_phase) > 1 else ""
            sections += _compare(members, phase, suffix, path)
        settings = _differing_settings(runs)
        if settings.rows:
            items = [*_stages_differ(runs), settings]
            sections.append(ReportSection("Settings that differ", items))
        sections += warning_section(runs)
        sections += [ReportSection(run.name, _details(run)) for run in runs]
        names = ", ".join(run.name for run in runs)
        return render_html(f"{len(runs)} runs compared", names, sections)


def _compare(runs: Sequence[Run], phase: str, suffix: str, path: Path) -> list[ReportSection]:
    """Compare runs of one phase. `suffix` goes into the headings; the plot is saved to `path`."""
    from gspo_megatron.observe.plots import COMPARISONS, plot_comparison

    by_group, sections = groups(runs), []
    if plot_comparison(runs, path, COMPARISONS[phase]) is not None:
        sections.append(ReportSection(f"Curves{suffix}", [Picture(path, f"curves{suffix}")]))
    columns = _RL_COLUMNS if phase == RL else _SUPERVISED_COLUMNS
    folders = [run.path for run in runs]
    names = [f"{kind} {_name(metric, folders)}" for kind, metric in columns]

    def cells(members: Sequence[Run]) -> list[str]:
        """Return mean and spread over the runs for each column, or the values of a single run."""
        return [
            mean_and_spread(
                [getattr(_summarize(run.records, m, phase), kind) for run in members], m.write
            )
            for kind, m in columns
        ]

    if len(by_group) < len(runs):
        rows = [[name, str(len(of_group)), *cells(of_group)] for name, of_group in by_group.items()]
        table = Table(["runs", "seeds", *names], rows)
        sections.append(ReportSection(f"Over seeds{suffix}", [table]))
    rows = []
    for run in runs:
        steps, wall = str(steps_done(run.records, phase)), duration(wall_seconds(run.records))
        rows.append([run.name, steps, *cells([run]), wall])
    table = Table(["run", "steps", *names, "time of steps"], rows)
    return [*sections, ReportSection(f"Each run{suffix}", [_MEANS, table])]


def mean_and_spread(values: Sequence[float | None], write: Callable[[float | None], str]) -> str:
    """Write mean and sample standard deviation. If some runs have no value, write no mean."""
    present = [value for value in values if value is not None]
    if not present:
        return MISSING
    if len(present) < len(values):
        return "not in all runs"
    if len(present) < 2 or not all(map(math.isfinite, present)):
        return write(statistics.fmean(present))
    return f"{write(statistics.fmean(present))} ± {write(statistics.stdev(present))}"


def _warnings(runs: Sequence[Run]) -> list[tuple[str, Finding]]:
    """Return the findings about all runs, each with the name of its run."""
    return [
        (run.name, finding)
        for run in runs
        for finding in advise(
            run.records,
            _config_of(run.path),
            main_phase(run.records),
            {first: _read_config(path) for first, path in changed_configs(run.path).items()},
        )
    ]


def warning_section(runs: Sequence[Run]) -> list[ReportSection]:
    """Return a section with the warnings about the runs; an empty list without warnings."""
    rows = [
        [name, finding.metric, write_steps(finding.steps), finding.text, finding.advice]
        for name, finding in _warnings(runs)
    ]
    head = ["run", "metric", "steps", "what", "advice"]
    return [ReportSection("Warnings", [Table(head, rows, is_text=True)])] if rows else []


def _config_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a run's configuration; empty if the folder has no such file. Raises
    DataError if the file is not a configuration."""
    path = folder / _CONFIG_FILE
    return _read_config(path) if path.is_file() else {}


def _read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration. Raises DataError."""
    try:
        sections = parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path)) or {}
    except ConfigError as error:
        raise DataError(str(error)) from error
    if isinstance(sections, dict) and all(isinstance(each, dict) for each in sections.values()):
        return sections
    raise DataError(f"{path}: not the configuration of a run; move it away for a report without")


def _differing_settings(runs: Sequence[Run]) -> Table:
    """Return the configuration keys whose values differ, except those of `logging`. Leave out runs
    without a configuration. If the stages of the runs differ, compare only their common keys."""
    configs: dict[str, dict[str, str]] = {}
    for run in runs:
        if sections := _config_of(run.path):
            configs[run.name] = {
                key: value if isinstance(value, str) else format_value(value)
                for key, value in flattened(sections).items()
                if not key.startswith("logging.")
            }
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    if _stages_differ(runs):
        keys = {key: None for key in keys if all(key in config for config in configs.values())}
    rows = []
    for key in keys:
        values = [config.get(key, MISSING) for config in configs.values()]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return Table(["key", *configs], rows, is_text=True)


def _stages_differ(runs: Sequence[Run]) -> list[str]:
    """Return a note above the settings if the runs are of different stages; else an empty list."""
    stages = _by_phase(runs)
    note = f"The stages differ ({', '.join(stages)}): only keys that all runs have are compared."
    return [note] if len(stages) > 1 else []


def _sample_table(samples: Sequence[Record]) -> Table:
    """Return a table of the first and the last recorded responses."""
    half = _SAMPLES_SHOWN // 2
    shown = samples if len(samples) <= _SAMPLES_SHOWN else [*samples[:half], *samples[-half:]]
    rows = []
    for sample in shown:
        truncated = " [truncated]" if sample.get("truncated") else ""
        names = ("step", "prompt", "response", "answer")
        texts = ("" if (value := sample.get(name)) is None else str(value) for name in names)
        step, prompt, response, answer = texts
        if sample.get("turns"):
            response = conversation(sample)
        reward = fixed(sample.get("reward"))
        rows.append([step, prompt, response + truncated, answer, reward])
    return Table(["step", "prompt", "response", "answer", "reward"], rows, is_text=True)


def conversation(sample: Mapping[str, Any]) -> str:
    """Write the turns of an episode as text: speaker, text, tool calls and reward of each turn."""
    lines, branch = [], 0
    for turn in sample["turns"]:
        if turn.get("branch", 0) != branch:
            branch = turn["branch"]
            lines.append("— the history as it was rewritten —")
        worth = "" if turn.get("reward") is None else f" [reward {turn['reward']:g}]"
        calls = f" {turn['tool_calls']}" if "tool_calls" in turn else ""
        # Further lines are indented, so that no text inside a turn looks like a turn.
        text = "\n    ".join(turn["text"].splitlines())
        lines.append(f"{turn['role']}: {text}{calls}{worth}")
    if sample.get("error"):
        lines.append("failed: " + "\n    ".join(str(sample["error"]).splitlines()))
    return "\n".join(lines)


def _details(run: Run) -> list[str | Table | Picture | Folded]:
    """Return the run's configuration, changes and environment files as foldable texts."""
    files = {"Configuration": _CONFIG_FILE, "Changes": CHANGES_FILE, "Environment": _ENVIRONMENT}
    return [
        Folded(title, (run.path / name).read_text(encoding="utf-8", errors="replace"))
        for title, name in files.items()
        if (run.path / name).is_file()
    ] or ["No configuration was kept with this run."]
