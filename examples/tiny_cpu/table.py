"""A table of losses and accuracies for each stage. The script fails if the accuracies by
transformers and by the run differ.

    python table.py PRETRAIN_RUN SFT_RUN RL_RUN

answer.py must have written RL_RUN/answers.json before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import read_metrics
from gspo_megatron.process.failures import run_script

TOLERANCE = 0.02  # largest difference between the accuracies in the run and in transformers
EXAMPLES = 5  # the number of prompts that are shown
STAGES = ("pre-training", "fine-tuning", "GSPO")
HEADINGS = ("stage", "steps", "seconds", "held-out loss", "transformers", "this run")


def values(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def write(rows: list[tuple[str, ...]]) -> None:
    """Print the rows as a table: the first column aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=len(STAGES), metavar="RUN")
    runs = parser.parse_args().runs
    records = [read_metrics(run) for run in runs]
    path = runs[-1] / "answers.json"
    try:
        answers = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    models = list(answers["models"].values())
    reported = values(records[-1], "evaluation/accuracy")
    # Before its first step, the GSPO run evaluates the fine-tuned model.
    of_runs = (None, reported[0], reported[-1])
    rows: list[tuple[str, ...]] = [HEADINGS]
    for stage, found, model, accuracy in zip(STAGES, records, models, of_runs, strict=True):
        losses = values(found, "evaluation/loss")
        rows.append(
            (
                stage,
                str(found[-1]["step"]),
                f"{sum(values(found, 'perf/step_seconds')):.0f}",
                f"{losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "-",
                f"{model['accuracy']:.1%}",
                "-" if accuracy is None else f"{accuracy:.1%}",
            )
        )
    print("\nThe last two columns: share of held-out prompts with exactly the right answer.\n")
    write(rows)
    print("\nAnswers by transformers:\n")
    shown = [(row["prompt"], row["answer"]) for row in answers["prompts"][:EXAMPLES]]
    given = zip(*(model["answers"] for model in models), strict=True)
    write([("prompt", "right", *STAGES), *(a + b for a, b in zip(shown, given, strict=False))])
    for stage, model, accuracy in zip(STAGES, models, of_runs, strict=True):
        if accuracy is not None and abs(model["accuracy"] - accuracy) > TOLERANCE:
            print(f"\n{stage}: transformers and the run differ by more than {TOLERANCE:.0%}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
