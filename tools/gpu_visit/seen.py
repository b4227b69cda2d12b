"""Put the results of visits into docs/gpu.md: `python tools/gpu_visit/seen.py [--check]`.

Each visit is a JSON file in docs/gpu_visits, as run.py writes it. The page's table has a row for
each step: whether it has succeeded on a GPU, when, on which GPU, and its figures. `--check` changes
nothing, and fails if the table does not match the files. `seen.py --add VISIT.json NAME` first
copies a result to docs/gpu_visits/NAME.json, without the names of the host and its folders.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, VISITS = ROOT / "docs" / "gpu.md", ROOT / "docs" / "gpu_visits"
BEGIN, END = "<!-- visits: begin -->", "<!-- visits: end -->"
MOST_FIGURES = 6  # the most figures of a step in the table; the JSON file has all figures
# The most important figures, which come first.
IMPORTANT = (
    *("equal", "worst_error", "tensors", "train_share_of_matmul", "logprob_share_of_matmul"),
    *("generated_per_second", "trained_tokens_per_second", "peak_memory_gb", "estimated_memory_gb"),
    *("launches_per_micro_batch", "waits_per_micro_batch", "memory", "time_ratio_straightforward"),
    *("error", "fastest", "loss", "grad_norm", "mismatch/abs_mean", "perf/step_seconds", "seconds"),
)


def visits() -> list[dict[str, Any]]:
    """Return all results, the oldest first."""
    loaded = [json.loads(path.read_text()) for path in sorted(VISITS.glob("*.json"))]
    return sorted(loaded, key=lambda visit: visit["machine"]["date"])


def table(results: list[dict[str, Any]]) -> str:
    """Return the table in Markdown. A step's row is about the last visit in which the step
    succeeded, or else about the last visit in which it was tried."""
    rows = ["| step | seen on a GPU | what it said |", "| --- | --- | --- |"]
    names = list(dict.fromkeys(name for visit in results for name in visit["steps"]))
    for name in names:
        there = [visit for visit in results if name in visit["steps"]]
        tried = [visit for visit in there if visit["steps"][name]["status"] != "left out"]
        well = [visit for visit in tried if visit["steps"][name]["status"] == "ok"]
        if not tried:
            rows.append(f"| `{name}` | no | {there[-1]['steps'][name]['says']} |")
            continue
        visit = (well or tried)[-1]
        record, machine = visit["steps"][name], visit["machine"]
        where = f"{machine['gpu_name']}, {machine['date']}"
        answer = f"yes ({where})" if well else f"no: {record['status']} ({where})"
        rows.append(f"| `{name}` | {answer} | {_said(record)} |")
    return "\n".join(rows)


def _said(record: dict[str, Any]) -> str:
    figures = record.get("figures")
    if not figures:
        if record["status"] == "ok" and "passed" not in record["says"]:
            return record["shows"]
        return record["says"].replace("|", "\\|")
    names = [name for name in IMPORTANT if name in figures] or list(figures)
    shown = (
        f"{name} {figures[name]:.3g}"
        if isinstance(figures[name], float)
        else f"{name} {figures[name]}"
        for name in names[:MOST_FIGURES]
    )
    return ", ".join(shown)


def add(source: Path, name: str) -> None:
    """Copy a result without the names that identify a machine."""
    visit = json.loads(source.read_text())
    for secret in ("system", "host", "command", "time", "world_size", "slurm"):
        visit["machine"].pop(secret, None)
    text = json.dumps(visit, indent=1)
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)  # folders of that machine
    (VISITS / f"{name}.json").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument(
        "--add", nargs=2, metavar=("VISIT.json", "NAME"), help="copy a result first"
    )
    arguments = parser.parse_args()
    if arguments.add:
        add(Path(arguments.add[0]), arguments.add[1])
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table(visits())}\n{END}{after}"
    if arguments.check:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
