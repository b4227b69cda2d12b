"""The report of an ablation: report.html, report.md and plots/*.png, with what was found in words.

The words say what the figures show by the rules of `ablation`, and nothing about why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_megatron.errors import DataError
from gspo_megatron.observe import ablation as figures
from gspo_megatron.observe import formats, html
from gspo_megatron.observe.ablation import Arm, LoadedArm, Measure, Spread
from gspo_megatron.observe.ablation_findings import compared, differences, findings
from gspo_megatron.observe.ablation_plots import layers_of, plot_arms, plot_volatility

Writer = Callable[["float | None"], str]

_MIB = 2**20


@dataclass(frozen=True)
class WrittenReport:
    """Where the report is, and what it says in short."""

    paths: list[Path]
    findings: list[str]


@dataclass(frozen=True)
class _Table:
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class _Section:
    title: str
    content: list[str | _Table | Path]  # paragraphs, tables, pictures


def write_ablation_report(
    arms: Sequence[Arm], out: Path, *, volatility_switched_on: bool
) -> WrittenReport:
    """Write OUT/report.html, OUT/report.md and OUT/plots.

    Raises DataError when no run is finished, or a metrics file is damaged.
    """
    loaded = figures.load_arms(arms)
    if not any(arm.runs for arm in loaded):
        raise DataError(f"{out}: no run of any arm has come to its end; there is nothing to report")
    pictures = [
        plot_arms(loaded, out / "plots" / "arms.png"),
        plot_volatility(loaded, out / "plots" / "volatility.png"),
    ]
    found = findings(loaded)
    sections = _sections(loaded, found, [p for p in pictures if p], volatility_switched_on)
    runs = sum(len(arm.runs) for arm in loaded)
    title = f"Ablation: {len(arms)} arms, {runs} runs"
    page = html.page(title, [html.heading(title, str(out)), *map(_as_html, sections)])
    text = "\n\n".join([f"# {title}", *(_as_markdown(section, out) for section in sections)])
    paths = [out / "report.html", out / "report.md"]
    for path, content in zip(paths, (page, text + "\n"), strict=True):
        path.write_text(content, encoding="utf-8")
    return WrittenReport(paths, found)


def _sections(
    arms: Sequence[LoadedArm], found: list[str], pictures: list[Path], volatility: bool
) -> list[_Section]:
    present = [arm for arm in arms if arm.runs]
    sections = [_Section("What was found", [*found])]
    sections.append(_Section("Outcome", [_outcome(present)]))
    compared = _comparisons(present)
    if compared.rows:
        sections.append(_Section("Comparisons", [figures.APART_RULE, compared]))
    sections.append(_Section("Plots", [*pictures]))
    sections.append(_Section("Inside the updates", [_inside(present)]))
    if any(layers_of(arm) for arm in present):
        sections.append(_Section("Volatility by layer", [_by_layer(present)]))
    costs = _costs(present)
    if costs.rows:
        note = "The step that is timed holds rollout, log-probs and updates."
        if volatility:
            note += " Volatility is measured in every arm; what that costs is in both sides."
        sections.append(_Section("Cost of replay", [note, costs]))
    rules = [figures.COLLAPSE_RULE]
    if volatility:
        rules.append(
            "`routing.volatility` was switched on in every arm, so that all are measured alike."
        )
    rules.append("Each figure is the mean over seeds, ± the sample standard deviation over them.")
    sections.append(_Section("Rules and settings", [*rules, _settings(arms)]))
    return sections


def written(found: Spread | None, write: Writer) -> str:
    """Mean ± deviation."""
    if found is None:
        return formats.MISSING
    if found.deviation is None or not math.isfinite(found.mean):
        return write(found.mean)
    return f"{write(found.mean)} ± {write(found.deviation)}"


def _table(arms: Sequence[LoadedArm], columns: Sequence[tuple[str, Measure, Writer]]) -> _Table:
    """A row an arm; columns that no run has figures for are left out."""
    shown = [column for column in columns if any(arm.values(column[1]) for arm in arms)]
    rows = []
    for arm in arms:
        spreads = [figures.spread(list(arm.values(measure).values())) for _, measure, _ in shown]
        cells = [written(s, write) for s, (_, _, write) in zip(spreads, shown, strict=True)]
        rows.append([arm.name, *cells])
    return _Table(["arm", *(name for name, _, _ in shown)], rows)


def _outcome(arms: Sequence[LoadedArm]) -> _Table:
    accuracy, reward = "evaluation/accuracy", "reward/mean"
    table = _table(
        arms,
        [
            ("held out before", figures.first(accuracy), formats.percent),
            ("held out at the end", figures.last(accuracy), formats.percent),
            ("best held out", figures.largest(accuracy), formats.percent),
            ("reward at the end", figures.last_window(reward), formats.fixed),
            ("largest fall of reward", figures.largest_fall, formats.fixed),
        ],
    )
    collapsed = [
        f"{sum(figures.collapse(run) is not None for run in arm.runs.values())} of {len(arm.runs)}"
        for arm in arms
    ]
    rows = [[*row, text] for row, text in zip(table.rows, collapsed, strict=True)]
    return _Table([*table.head, "collapsed"], rows)


def _comparisons(arms: Sequence[LoadedArm]) -> _Table:
    """A row a pair: difference ± half of its interval, and where it is told apart."""
    subjects = compared(arms)
    cells: dict[tuple[str, str], list[str]] = {}
    for column, subject in enumerate(subjects):
        for found in differences(arms, subject):
            row = cells.setdefault(
                (found.arm, found.other),
                [
                    f"{found.arm} − {found.other}",
                    str(found.seeds),
                    *[formats.MISSING] * len(subjects),
                ],
            )
            text = subject.write_difference(found.mean)
            if found.half_width is not None:
                text += f" ± {subject.write_difference(found.half_width)}"
            row[2 + column] = text + (", apart" if found.told_apart else "")
    names = [f"{s.name},{s.unit}" if s.unit else s.name for s in subjects]
    return _Table(["difference of", "seeds", *names], list(cells.values()))


def _inside(arms: Sequence[LoadedArm]) -> _Table:
    mean, number, percent = figures.mean, formats.number, formats.percent
    return _table(
        arms,
        [
            ("tokens clipped", mean("clip/token/binding"), percent),
            ("sequences clipped", mean("clip/sequence/binding"), percent),
            ("token ratio p01", mean("ratio/token/p01"), formats.fixed),
            ("token ratio p99", mean("ratio/token/p99"), formats.fixed),
            ("largest token ratio", figures.largest("ratio/token/max"), number),
            ("sequence ratio p01", mean("ratio/sequence/p01"), formats.fixed),
            ("sequence ratio p99", mean("ratio/sequence/p99"), formats.fixed),
            ("mismatch", mean("mismatch/abs_mean"), number),
            ("volatility", mean("routing/volatility"), percent),
            ("tokens changed", mean("routing/tokens_changed"), percent),
            ("grad norm, median", figures.median("grad_norm"), number),
            ("grad norm, largest", figures.largest("grad_norm"), number),
            ("entropy at the end", figures.last_window("policy/entropy"), formats.fixed),
        ],
    )


def _by_layer(arms: Sequence[LoadedArm]) -> _Table:
    keys = {layer: key for arm in arms for layer, key in layers_of(arm).items()}
    columns = [(f"layer {n}", figures.mean(keys[n]), formats.percent) for n in sorted(keys)]
    return _table(arms, columns)


def _costs(arms: Sequence[LoadedArm]) -> _Table:
    by_name = {arm.name: arm for arm in arms}
    rows = []
    for arm in arms:
        baseline = by_name.get(arm.arm.baseline or "")
        found = figures.cost(arm, baseline) if baseline else None
        if found is None:
            continue
        memory, stored = found.memory, found.bytes_stored
        rows.append(
            [
                f"{found.arm} over {found.baseline}",
                formats.duration(found.step_seconds),
                f"{100 * statistics.fmean(found.time):+.1f}%",
                f"{100 * min(found.time):+.1f}% to {100 * max(found.time):+.1f}%",
                f"{statistics.fmean(memory) / _MIB:+.1f} MiB" if memory else formats.MISSING,
                formats.MISSING if stored is None else f"{stored:,.0f} B",
            ]
        )
    head = ["", "median step", "longer by", "over seeds", "peak memory", "routes kept a step"]
    return _Table(head, rows)


def _settings(arms: Sequence[LoadedArm]) -> _Table:
    rows = []
    for arm in arms:
        runs = [f"seed {seed}" for seed in arm.runs]
        runs += [f"seed {seed}: {why}, left out" for seed, why in arm.unfinished.items()]
        rows.append([arm.name, " ".join(arm.arm.settings), "; ".join(runs)])
    return _Table(["arm", "settings", "runs"], rows)


def _as_html(section: _Section) -> str:
    cards = []
    for item in section.content:
        if isinstance(item, _Table):
            cards.append(html.card(html.table(item.head, item.rows)))
        elif isinstance(item, Path):
            cards.append(html.card(html.image(item, item.stem)))
        else:
            cards.append(html.paragraph(item))
    return html.section(section.title, *cards)


def _as_markdown(section: _Section, out: Path) -> str:
    parts = [f"## {section.title}"]
    for item in section.content:
        if isinstance(item, _Table):
            lines = [item.head, ["---"] * len(item.head), *item.rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        elif isinstance(item, Path):
            parts.append(f"![{item.stem}]({item.relative_to(out).as_posix()})")
        else:
            parts.append(item)
    return "\n\n".join(parts)
