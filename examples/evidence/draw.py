"""Make the figures and tables of docs/evidence.md, evidence_tables.md and stability_frontier.md
from the kept JSON lines.

    python examples/evidence/draw.py           # draws docs/evidence/*.png, fills in the tables
    python examples/evidence/draw.py --check   # exit code 1 if the pages have other tables

In a page, a table is between <!-- table NAME --> and <!-- end -->. If a result has several seeds,
its value is the mean over the seeds, and its bounds are the lowest and the highest bound of the
seeds' intervals.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import frontier_figure
import matplotlib
import numpy as np
import records
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import norm, t

from gspo_megatron.observe.plots import MUTED, PALETTE, STYLE
from gspo_megatron.process.failures import run_script

Record = Mapping[str, Any]
PAGE = records.HERE.parents[1] / "docs" / "evidence.md"
PICTURES = PAGE.with_suffix("")
PAGES = tuple(
    PAGE.with_name(f"{name}.md") for name in ("evidence", "evidence_tables", "stability_frontier")
)

UNCLIPPED = ("gspo unclipped", "grpo unclipped", "product unclipped")
CLIPPED = ("gspo ±0.1/√L", "grpo", "gspo", "gmpo")
COLOURS = dict(zip((*UNCLIPPED, *CLIPPED), PALETTE, strict=False))
PAPER_CLIP = 3.5e-4  # half of the width of GSPO's clip range, 1 - 3e-4 to 1 + 4e-4


def interval(values: Sequence[Sequence[float]]) -> list[float]:
    """The [value, low, high] over several seeds, from the [value, low, high] of each seed."""
    table = np.array(values, dtype=float)
    return [float(table[:, 0].mean()), float(table[:, 1].min()), float(table[:, 2].max())]


def text(value: Sequence[float], digits: int = 2) -> str:
    """The text of [value, low, high] in a table."""
    middle, low, high = (f"{each:.{digits}f}" for each in value)
    return f"{middle} [{low}, {high}]"


def percent(value: float) -> str:
    return f"{100 * value:.2g}%" if 100 * value < 10 else f"{100 * value:.0f}%"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


# --- gradients ------------------------------------------------------------------------------------


def select(lines: Sequence[Record], mismatch: str, length: int, updates: int) -> list[Record]:
    """The lines of this mismatch, length and number of updates, one for each seed."""
    return [
        line
        for line in lines
        if (line["setting"]["mismatch"], line["setting"]["length"], line["updates"])
        == (mismatch, length, updates)
    ]


def places(lines: Sequence[Record], mismatch: str) -> list[tuple[int, int]]:
    """The measured pairs (length, updates), in order."""
    found = {
        (line["setting"]["length"], line["updates"])
        for line in lines
        if line["setting"]["mismatch"] == mismatch
    }
    return sorted(found)


def replicated(lines: Sequence[Record]) -> list[Record]:
    """The lines whose length was measured with several seeds."""
    seeds: dict[int, set[int]] = {}
    for line in lines:
        seeds.setdefault(line["setting"]["length"], set()).add(line["setting"]["seed"])
    return [line for line in lines if len(seeds[line["setting"]["length"]]) > 1]


def of_arm(lines: Sequence[Record], arm: str, figure: str) -> list[float]:
    if (arm, figure) == ("product unclipped", "projection"):
        figure = "plain"  # with the control variate the value would be 1
    return interval([line["arms"][arm][figure] for line in lines])


def clipped(lines: Sequence[Record], arm: str) -> float:
    return float(np.mean([line["arms"][arm]["clipped_tokens"] for line in lines]))


def ratio(lines: Sequence[Record], figure: str) -> float:
    return float(np.mean([line["ratios"][figure] for line in lines]))


def ratio_table(lines: Sequence[Record]) -> list[str]:
    rows = []
    for length, updates in places(lines, "none"):
        here = select(lines, "none", length, updates)
        rows.append(
            [
                *(str(length), str(updates), str(len(here))),
                f"{ratio(here, 'token_deviation'):.3f}",
                f"{ratio(here, 'sequence_deviation'):.4f}",
                f"{ratio(here, 'independent_deviation'):.4f}",
                f"{ratio(here, 'correlation'):.4f}",
                *(
                    percent(ratio(here, f"{level}_sample_share"))
                    for level in ("token", "sequence", "product")
                ),
            ]
        )
    header = ["tokens", "updates", "seeds", "sd of log w", "sd of log s", "sd of log w / √L"]
    header += ["correlation", "share, token", "share, sequence", "share, product"]
    return table(header, rows)


def arms_table(lines: Sequence[Record], figure: str, arms: Sequence[str]) -> list[str]:
    rows = []
    for length, updates in places(lines, "none"):
        here = select(lines, "none", length, updates)
        row = [str(length), str(updates)]
        for arm in arms:
            if figure == "clipped_tokens":
                row.append(percent(clipped(here, arm)))
            elif figure in here[0]["arms"][arm]:
                row.append(text(of_arm(here, arm, figure)))
            else:
                row.append("")
        rows.append(row)
    return table(["tokens", "updates", *arms], rows)


def by_seed(lines: Sequence[Record], length: int, arm: str, base: str) -> list[float]:
    """The logarithms of the signal of `arm` divided by the signal of `base`, one for each seed: the
    mean over engines and over 1, 4 and 16 updates."""
    gaps: dict[int, list[float]] = {}
    for line in lines:
        arms = line["arms"]
        known = {arm, base} <= arms.keys() and line["updates"] in (1, 4, 16)
        if known and line["setting"]["length"] == length:
            gap = math.log(arms[arm]["signal_ratio"][0] / arms[base]["signal_ratio"][0])
            gaps.setdefault(line["setting"]["seed"], []).append(gap)
    return [float(np.mean(each)) for each in gaps.values()]


def summary_table(lines: Sequence[Record]) -> list[str]:
    """The table of one arm's signal-to-noise ratio divided by that of another arm, with Student's
    interval over seeds."""
    pairs = [("grpo", "gspo"), ("grpo + r2", "grpo"), ("gspo + r2", "gspo")]
    pairs += [("grpo + r3", "grpo"), ("gspo + r3", "gspo")]
    rows = []
    for length in sorted({line["setting"]["length"] for line in replicated(lines)}):
        found = [
            by_seed(lines, length, *(name.replace("po", "po unclipped") for name in pair))
            for pair in pairs
        ]
        rows.append([str(length), str(len(found[0])), *(text(exponentials(f)) for f in found)])
    return table(["tokens", "seeds", *(f"{arm} over {base}" for arm, base in pairs)], rows)


def exponentials(values: Sequence[float]) -> list[float]:
    """The exponentials of the mean and of the bounds of Student's interval: [mean, low, high]."""
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return [float(np.exp(np.mean(values) + shift)) for shift in (0.0, -half, half)]


def replay_table(lines: Sequence[Record]) -> list[str]:
    """The step and the noise of the token ratios, with and without replay."""
    rows = []
    for mismatch in records.MISMATCHES:
        for length, updates in places(lines, mismatch):
            if updates not in (1, 4, 16):
                continue
            here = select(lines, mismatch, length, updates)
            row = [mismatch, str(length), str(updates)]
            row.append(percent(np.mean([line["changed_experts"] for line in here])))
            row += [
                f"{ratio(here, 'token_deviation'):.3f}",
                f"{ratio(here, 'r2_token_deviation'):.3f}",
            ]
            for base in ("grpo unclipped", "gspo unclipped"):
                for suffix in ("", " + r2", " + r3"):
                    known = base + suffix in here[0]["arms"]
                    row.append(text(of_arm(here, base + suffix, "signal_ratio")) if known else "")
            rows.append(row)
    header = ["engine", "tokens", "updates", "experts changed", "sd of log w", "with r2"]
    header += ["grpo", "grpo + r2", "grpo + r3", "gspo", "gspo + r2", "gspo + r3"]
    return table(header, rows)


def old_policy_table(lines: Sequence[Record]) -> list[str]:
    pairs = {
        "gspo": ("gspo", "gspo, rollout"),
        "gspo ±0.1/√L": ("gspo ±0.1/√L", "gspo ±0.1/√L, rollout", "gspo ±0.1/√L, sequence_tis"),
        "grpo": ("grpo", "grpo, rollout", "grpo, token_tis", "grpo, icepop"),
    }
    rows = []
    for mismatch in records.MISMATCHES[1:]:
        for length, updates in places(lines, mismatch):
            here = select(lines, mismatch, length, updates)
            if updates not in (1, 4):
                continue
            for name, arms in pairs.items():
                cells = [text(of_arm(here, arm, "projection")) for arm in arms]
                cells += [""] * (3 - len(cells))
                share = f"{percent(clipped(here, arms[0]))}, {percent(clipped(here, arms[1]))}"
                rows.append([mismatch, str(length), str(updates), name, *cells[:3], share])
    header = ["engine", "tokens", "updates", "objective", "old: recomputed", "old: rollout"]
    return table([*header, "recomputed, corrected", "clipped tokens: recomputed, rollout"], rows)


def draw_ratios(lines: Sequence[Record]) -> Figure:
    """A plot of the noise of ratios by length, with the theoretical values."""
    figure, (left, right) = panels(2)
    lengths = sorted({length for length, _ in places(lines, "none")})
    for colour, updates in zip(PALETTE, (1, 4, 16), strict=False):
        found = [(length, select(lines, "none", length, updates)) for length in lengths]
        found = [(length, here) for length, here in found if here]
        if not found:
            continue
        x = [length for length, _ in found]
        of = {
            name: [ratio(here, name) for _, here in found]
            for name in ("token_deviation", "sequence_deviation", "correlation")
        }
        left.plot(x, of["token_deviation"], "s:", color=colour, ms=4, lw=0.8)
        left.plot(x, of["sequence_deviation"], "o", color=colour, label=f"{updates} updates")
        dense = np.geomspace(min(x), max(x))
        token = np.interp(np.log(dense), np.log(x), of["token_deviation"])
        left.plot(dense, token / np.sqrt(dense), "-", color=colour, lw=1)
        c = np.interp(np.log(dense), np.log(x), of["correlation"])
        left.plot(dense, token * np.sqrt((1 + (dense - 1) * c) / dense), "--", color=colour, lw=0.8)
        for style, level in (("s:", "token"), ("o-", "sequence"), ("^--", "product")):
            shares = [ratio(here, f"{level}_sample_share") for _, here in found]
            right.plot(x, shares, style, color=colour, ms=4, lw=1)
    left.set(
        xscale="log", yscale="log", xlabel="tokens of a response", title="Spread of log-ratios"
    )
    left.set_ylabel("■ token, ● sequence; lines: theory")
    right.set(xscale="log", xlabel="tokens of a response", title="Effective sample share")
    right.set_ylabel("■ token  ● sequence  ▲ product")
    left.legend(loc="lower left")
    for axes in (left, right):
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
    return figure


def draw_gradients(lines: Sequence[Record]) -> Figure:
    """A plot of the step along the policy gradient, and of the signal divided by the signal of
    "gspo unclipped". The horizontal axis is the number of updates."""
    lines = replicated(lines)
    lengths = sorted({length for length, _ in places(lines, "none")})
    figure, axes = panels(len(lengths), rows=2)
    axes = np.array(axes).reshape(2, len(lengths))
    for column, length in enumerate(lengths):
        ks = [k for at, k in places(lines, "none") if at == length]
        for arm in (*UNCLIPPED, *CLIPPED[:3]):
            cells = [select(lines, "none", length, k) for k in ks]
            for row, name in enumerate(("projection", "signal_ratio")):
                values = np.array([of_arm(here, arm, name) for here in cells])
                style = "-" if arm in UNCLIPPED else "--"
                errors = np.abs(values[:, 1:] - values[:, :1]).T
                axes[row, column].errorbar(
                    ks, values[:, 0], errors, fmt="o" + style, ms=3, lw=1.2, elinewidth=0.7,
                    color=COLOURS[arm], label=arm,
                )  # fmt: skip
        top, bottom = axes[0, column], axes[1, column]
        top.set(title=f"{length} tokens", xscale="log", ylim=(-1.5, 2))
        top.axhline(1, color=MUTED, lw=0.8)
        bottom.set(xscale="log", yscale="log", ylim=(1e-3, 10), xlabel="updates")
        for each in (top, bottom):
            each.set_xticks(ks, [str(k) for k in ks])
            each.minorticks_off()
    axes[0, 0].set_ylabel("step along the policy gradient\n(1: unbiased)")
    axes[1, 0].set_ylabel("signal-to-noise\nover gspo unclipped's")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=7)
    return figure


def draw_replay(lines: Sequence[Record]) -> Figure:
    """A plot of the signal with replay divided by the signal without replay. The horizontal axis is
    the share of changed experts. There is a point for each seed, engine, length and number of
    updates."""
    figure, axes = panels(2)
    for each, name in zip(axes, ("grpo", "gspo"), strict=True):
        base = f"{name} unclipped"
        for colour, suffix in zip(PALETTE, (" + r2", " + r3"), strict=False):
            here = [line for line in replicated(lines) if base + suffix in line["arms"]]
            x = [100 * float(np.mean(line["changed_experts"])) for line in here]
            signals = [
                [line["arms"][a]["signal"][0] for a in (base + suffix, base)] for line in here
            ]
            ratios = [with_replay / without for with_replay, without in signals]
            each.scatter(x, ratios, s=12, color=colour, alpha=0.7, label=name + suffix)
        each.axhline(1, color=MUTED, lw=0.8)
        each.set(title=name, xlabel="experts changed since sampling, %", yscale="log")
        each.set_ylim(0.4, 2.5)
        each.set_yticks([0.5, 1, 2], ["0.5", "1", "2"])
        each.minorticks_off()
        each.legend()
    axes[0].set_ylabel("signal-to-noise\nwith replay over without")
    return figure


# --- an engine's likelihoods ----------------------------------------------------------------------


def expected_outside(deviation: float, length: int) -> float:
    """The share of sequences outside the paper's clip range, if the log-ratios of tokens were
    independent and normal."""
    return float(2 * norm.sf(PAPER_CLIP / (deviation / math.sqrt(length))))


def engine_rows(lines: Sequence[Record]) -> list[tuple[str, int, list[Record]]]:
    """Tuples of dtype, length, and the measurements of each seed."""
    found = []
    for dtype in ("bfloat16", "float32"):
        here = [line for line in lines if line["dtype"] == dtype]
        for length in map(int, here[0]["lengths"]) if here else ():
            found.append((dtype, length, [line["lengths"][str(length)] for line in here]))
    return found


def likelihood_table(lines: Sequence[Record]) -> list[str]:
    rows = []
    for dtype, length, here in engine_rows(lines):
        deviation = np.mean([each["ratios"]["token_deviation"] for each in here])
        rows.append(
            [
                *(dtype, str(length), str(len(here)), f"{deviation:.2g}"),
                f"{interval([each['sequence_abs'] for each in here])[0]:.2g}",
                text([100 * x for x in interval([each["outside_paper"] for each in here])], 0),
                f"{100 * expected_outside(deviation, length):.0f}",
                text([100 * x for x in interval([each["outside_scaled"] for each in here])], 0),
            ]
        )
    header = ["vLLM", "tokens", "seeds", "sd of token differences", "mean of abs(log s)"]
    header += ["outside the paper's range, %", "if independent, %", "outside ±0.1/√L, %"]
    return table(header, rows)


def draw_likelihoods(lines: Sequence[Record]) -> Figure:
    figure, (left, right) = panels(2)
    for colour, dtype in zip(PALETTE, ("bfloat16", "float32"), strict=False):
        found = [row for row in engine_rows(lines) if row[0] == dtype]
        if not found:
            continue
        x = [length for _, length, _ in found]
        spread = [np.mean([each["ratios"]["sequence_deviation"] for each in h]) for *_, h in found]
        token = [np.mean([each["ratios"]["token_deviation"] for each in h]) for *_, h in found]
        left.plot(x, spread, "o", color=colour, label=f"vLLM in {dtype}")
        left.plot(x, np.array(token) / np.sqrt(x), "-", color=colour, lw=1)
        value = 100 * np.array([interval([e["outside_paper"] for e in h]) for *_, h in found])
        errors = np.abs(value[:, 1:] - value[:, :1]).T
        right.errorbar(x, value[:, 0], errors, fmt="o", color=colour, ms=4)
        theory = [100 * expected_outside(d, length) for d, length in zip(token, x, strict=True)]
        right.plot(x, theory, "-", color=colour, lw=1)
    left.axhline(PAPER_CLIP, color=MUTED, lw=0.8, ls="--")
    left.set(xscale="log", yscale="log", title="Spread of log s before any update")
    left.set_ylabel("sd; line: sd of log w / √L; - -: clip")
    right.set(
        xscale="log", title="Outside the paper's range, %", ylabel="line: normal, independent"
    )
    left.legend()
    for axes in (left, right):
        axes.set_xlabel("tokens of a response")
        axes.set_xticks([8, 32, 128, 256], ["8", "32", "128", "256"])
        axes.minorticks_off()
    return figure


# --- volatility -----------------------------------------------------------------------------------


def changed(lines: Sequence[Record], experts: int, rate: float, updates: int) -> np.ndarray:
    """The share of experts that changed: [seeds, layers]."""
    return np.array(
        [
            line["changed_experts"][str(updates)]
            for line in lines
            if (line["setting"]["experts"], line["setting"]["learning_rate"]) == (experts, rate)
        ]
    )


def grid(lines: Sequence[Record]) -> list[tuple[int, float]]:
    """The measured pairs (experts, learning rate)."""
    pairs = {(line["setting"]["experts"], line["setting"]["learning_rate"]) for line in lines}
    return sorted(pairs)


def volatility_table(lines: Sequence[Record]) -> list[str]:
    rows = []
    for experts, rate in grid(lines):
        once = changed(lines, experts, rate, 1)
        seeds = once.mean(1)
        rows.append(
            [
                *(str(experts), f"{rate:g}", str(len(once)), f"{100 * seeds.mean():.1f}"),
                " · ".join(f"{100 * seed:.1f}" for seed in seeds),
                " · ".join(f"{100 * layer:.1f}" for layer in once.mean(0)),
                *(f"{100 * changed(lines, experts, rate, k).mean():.0f}" for k in (4, 16)),
            ]
        )
    header = ["experts", "learning rate", "seeds", "after 1 update, %", "by seed"]
    return table([*header, "by layer, 1 to 4", "after 4, %", "after 16, %"], rows)


def draw_volatility(lines: Sequence[Record]) -> Figure:
    figure, (left, right) = panels(2)
    for colour, experts in zip(PALETTE, sorted({e for e, _ in grid(lines)}), strict=False):
        rates = [rate for e, rate in grid(lines) if e == experts]
        seeds = [100 * changed(lines, experts, rate, 1).mean(1) for rate in rates]
        values = np.array([[s.mean(), s.mean() - s.min(), s.max() - s.mean()] for s in seeds])
        left.errorbar(
            rates, values[:, 0], values[:, 1:].T, fmt="o-", color=colour, ms=4,
            label=f"{experts} experts",
        )  # fmt: skip
        if 1e-3 in rates:
            layers = 100 * changed(lines, experts, 1e-3, 1).mean(0)
            right.plot(range(1, 1 + len(layers)), layers, "o-", color=colour, ms=4)
    for axes in (left, right):
        axes.axhline(10, color=MUTED, lw=0.8, ls="--")
        axes.set_ylim(bottom=0)
    left.set(xscale="log", xlabel="learning rate", title="Experts changed by one update, %")
    left.set_ylabel("dashes: the paper's 10%")
    left.legend()
    right.set(xlabel="layer", title="By layer, learning rate 1e-3", xticks=range(1, 5))
    return figure


# --- all together ---------------------------------------------------------------------------------


def panels(columns: int, rows: int = 1) -> tuple[Figure, Any]:
    """A figure with this number of columns and rows of plots."""
    figure = Figure(figsize=(3.1 * max(columns, 2), 2.7 * rows), layout="constrained")
    axes: Axes | np.ndarray = figure.subplots(rows, columns)
    return figure, axes


def all_tables() -> dict[str, list[str]]:
    """The lines of each table, by its name in the page."""
    gradients, engine, moved = (
        records.read(records.RESULTS / f"{name}.jsonl")
        for name in ("gradients", "likelihoods", "volatility")
    )
    runs = records.read(records.RESULTS / "frontier.jsonl")
    return {
        "old policy runs": frontier_figure.old_runs_table(runs),
        "replay cost": frontier_figure.replay_cost_table(runs),
        **{name: make(runs) for name, make in frontier_figure.TABLES.items()},
        "summary": summary_table(gradients),
        "ratios": ratio_table(gradients),
        "projection, unclipped": arms_table(gradients, "projection", UNCLIPPED),
        "signal, unclipped": arms_table(gradients, "signal_ratio", UNCLIPPED[1:]),
        "cosine": arms_table(gradients, "cosine", (*UNCLIPPED, *CLIPPED[:3])),
        "projection, clipped": arms_table(gradients, "projection", CLIPPED),
        "clipped": arms_table(gradients, "clipped_tokens", CLIPPED),
        "replay": replay_table(gradients),
        "old policy": old_policy_table(gradients),
        "likelihoods": likelihood_table(engine),
        "volatility": volatility_table(moved),
    }


FIGURES: dict[str, tuple[str, Callable[[Sequence[Record]], Figure]]] = {
    "ratios": ("gradients", draw_ratios),
    "gradients": ("gradients", draw_gradients),
    "replay": ("gradients", draw_replay),
    "likelihoods": ("likelihoods", draw_likelihoods),
    "volatility": ("volatility", draw_volatility),
}


def draw_all(folder: Path) -> None:
    """Write every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, (results, make) in FIGURES.items():
            lines = records.read(records.RESULTS / f"{results}.jsonl")
            make(lines).savefig(folder / f"{name}.png", dpi=95)
    frontier_figure.draw(records.read(records.RESULTS / "frontier.jsonl"), folder / "frontier.png")


def filled(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The page with its tables replaced."""

    def replace(match: re.Match[str]) -> str:
        lines = tables[match[1]]
        return f"<!-- table {match[1]} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->"

    return re.sub(r"<!-- table ([^>]+?) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare the tables")
    arguments = parser.parse_args()
    tables = all_tables()
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    wanted = {path: filled(page, tables) for path, page in pages.items()}
    if arguments.check:
        return int(wanted != pages)
    draw_all(PICTURES)
    for path, page in wanted.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
