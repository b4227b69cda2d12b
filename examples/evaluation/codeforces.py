"""Make the problems for the suite of codeforces.yaml, and rate the responses to them.

    python examples/evaluation/codeforces.py problems FILE ... -o data/evaluation/codeforces.jsonl
    python examples/evaluation/codeforces.py rating EVALUATION.jsonl --standings FOLDER

FILE is a file of the dataset open-r1/codeforces. `gspo-megatron evaluate` writes EVALUATION.jsonl.
FOLDER has two answers of Codeforces' web interface for each contest: ID.standings.json
(contest.standings) and ID.ratings.json (contest.ratingChanges).

The rating of the model is an estimate (CodeElo, arXiv 2501.01257): the mean of the model's ratings
in the single contests. The Elo formula expects a participant of rating R on place 1 + Σ_i 1 / (1 +
10^((R − R_i) / 400)), where i are the other participants. The model's rating in a contest is the R
for which this formula gives the place that the model's score would have had. The model did not
really compete, so times of submission are unknown. arXiv 2602.05891 finds that the order of
submissions changes such a rating by 394 points, and the choice of contests by 1,122. The printed
interval covers only the choice of contests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

from gspo_megatron.data.rows import Problems, read_rows
from gspo_megatron.errors import DataError
from gspo_megatron.files import write_atomically
from gspo_megatron.observe.intervals import bootstrap_interval
from gspo_megatron.process.failures import run_script

FIELDS = ("id", "contest_start", "title", "description", "official_tests")
# the fields of a row that the reward `code` reads
JUDGED_BY = ("official_tests", "generated_checker", "input_mode")
PARTS = (
    ("", "description"),
    ("Input", "input_format"),
    ("Output", "output_format"),
    ("Note", "note"),
)
LIMITS = (("time_limit", "s"), ("memory_limit", "MB"))

LEAST, MOST = 0.0, 4000.0  # the range in which ratings are searched
# the share of a problem's points that a right submission always gets, even after many wrong ones
LEAST_SHARE = 0.3

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Contest:
    """The standings of a contest with rated participants, without the model."""

    ratings: Sequence[float]  # [participants], before the contest
    scores: Sequence[float]  # [participants], their points

    def place(self, score: float) -> float:
        """The place, counted from 1, that a score would have had. Participants with equal scores
        share the middle of their places."""
        scores = np.asarray(self.scores, dtype=np.float64)
        return 1.0 + float((scores > score).sum()) + float((scores == score).sum()) / 2

    def expected_place(self, rating: float) -> float:
        """The place that the Elo formula expects for a rating."""
        above = np.asarray(self.ratings, dtype=np.float64)
        return 1.0 + float((1.0 / (1.0 + 10.0 ** ((rating - above) / 400.0))).sum())

    def rating_of(self, score: float) -> float:
        """The rating for which the Elo formula expects the place of `score`. It is limited to the
        range from LEAST to MOST, because no finite rating belongs to the first or the last
        place."""
        place = self.place(score)
        if place <= self.expected_place(MOST):
            return MOST
        if place >= self.expected_place(LEAST):
            return LEAST
        return float(brentq(lambda rating: self.expected_place(rating) - place, LEAST, MOST))


def score_of(
    points: Sequence[float], attempts: Sequence[Sequence[bool]], penalty: float = 50.0
) -> float:
    """The points of the model in a contest. attempts[p] says which of the model's submissions to
    problem p are right, in their order. A solved problem gives its points, minus `penalty` for each
    wrong submission before the first right one, but at least 30% of its points. The time of a
    submission has no effect."""
    total = 0.0
    for worth, submitted in zip(points, attempts, strict=True):
        if any(submitted):
            wrong = list(submitted).index(True)
            total += max(worth - penalty * wrong, LEAST_SHARE * worth)
    return total


def statement(row: Row) -> str:
    """A problem as the participants read it."""
    limits = [f"{row[key]:g} {unit}" for key, unit in LIMITS if row.get(key) is not None]
    parts = [" - ".join([row["title"], *limits])]
    for heading, name in PARTS:
        if row.get(name):
            parts.append(f"{heading}\n{row[name]}".strip())
    for example in row.get("examples") or []:
        for key in ("input", "output"):
            parts.append(f"Example {key}\n{example[key].strip()}")
    if row.get("input_mode") == "file":
        parts.append("Read from the file input.txt and write to the file output.txt.")
    return "\n\n".join(parts)


def is_judged(row: Row) -> bool:
    """Whether the problem belongs to a known contest, and tests of input and output can tell right
    programs from wrong ones."""
    can_run = row.get("executable") is not False and row["contest_start"] is not None
    return can_run and bool(row["official_tests"]) and not row.get("interaction_format")


def generated_tests(folder: Path, contest: str) -> dict[str, list[dict[str, str]]]:
    """The generated tests of each problem. The dataset has one file of tests for each contest."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    path = folder / f"test_cases_{int(contest):04d}.parquet"
    if path.exists():
        for row in rows_of(path, ("problem_id", "input", "output")):
            found[row["problem_id"]].append({key: row[key] for key in ("input", "output")})
    return found


def rows_of(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """All rows of a file, with only these fields. Raises DataError."""
    problems = Problems()
    found = []
    for where, row in read_rows(path, [("a problem", name) for name in names], problems):
        missing = [name for name in names if name not in row]
        if missing:
            problems.add(where, f"no field {missing[0]!r}")
        found.append(row)
    problems.raise_if_any()
    return found


def write_problems(files: Sequence[Path], output: Path, tests: Path | None) -> None:
    """Write the problems that can be judged, with prompt and date."""
    lines, left_out, incomplete = [], 0, 0
    for row in [row for file in files for row in rows_of(file, FIELDS)]:
        if not is_judged(row):
            left_out += 1
            continue
        start = datetime.datetime.fromtimestamp(row["contest_start"], datetime.timezone.utc)
        kept = {name: row.get(name) for name in JUDGED_BY}
        added = generated_tests(tests, row["id"].split("/")[0])[row["id"]] if tests else []
        kept["official_tests"] = [*kept["official_tests"], *added]
        incomplete += row.get("official_tests_complete") is False and not added
        known = {"id": row["id"], "contest_date": start.date().isoformat()}
        lines.append(json.dumps({**known, "prompt": statement(row), **kept}) + "\n")
    write_atomically(output, "".join(lines).encode())
    print(f"{output}: {len(lines)} problems; {left_out} left out, which tests cannot judge")
    if incomplete:
        print(f"{incomplete} of them lack official tests, so wrong programs may pass (--tests)")


def attempts_of(path: Path, suite: str) -> dict[str, dict[str, list[bool]]]:
    """For each contest and problem, whether the responses are correct, in their order. A response
    without a reward does not count."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    records = rows_of(path, ())
    for record in sorted(records, key=lambda record: record.get("sample", 0)):
        if record.get("suite") == suite and record["correct"] is not None:
            contest, slash, index = record["row_id"].partition("/")
            if not slash:
                raise DataError(f"{path}: row_id {record['row_id']!r}; allowed: CONTEST/INDEX")
            found[contest][index].append(record["correct"])
    if not found:
        raise DataError(f"{path}: has no responses of the suite {suite!r}; --suite names another")
    return found


def told(folder: Path, name: str) -> Any:
    """An answer of Codeforces' web interface, read from its file. Raises DataError."""
    path = folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))["result"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is no answer of codeforces.com/api with a result") from error


def judged_contest(
    folder: Path, number: str, attempts: Mapping[str, Sequence[bool]]
) -> tuple[Contest, float]:
    """The contest, and the model's score in it. Participants without an earlier rating (0) are left
    out, because their strength is not known."""
    standings = told(folder, f"{number}.standings.json")
    ratings = {each["handle"]: each["oldRating"] for each in told(folder, f"{number}.ratings.json")}
    places = []
    for row in standings["rows"]:
        handle, kind = row["party"]["members"][0]["handle"], row["party"]["participantType"]
        if kind == "CONTESTANT" and ratings.get(handle, 0) > 0:
            places.append((ratings[handle], row["points"]))
    if not places:
        raise DataError(f"{folder}: contest {number} has no participants with ratings")
    problems = standings["problems"]
    # without points, the score is the number of solved problems
    has_points = all("points" in problem for problem in problems)
    points = [problem.get("points", 1.0) if has_points else 1.0 for problem in problems]
    tries = [attempts.get(problem["index"], []) for problem in problems]
    score = score_of(points, tries, penalty=50.0 if has_points else 0.0)
    return Contest(*map(list, zip(*places, strict=True))), score


def print_rating(path: Path, folder: Path, suite: str) -> None:
    ratings = []
    for number, attempts in sorted(attempts_of(path, suite).items()):
        if not (folder / f"{number}.standings.json").exists():
            print(f"contest {number}: left out, no {folder / number}.standings.json")
            continue
        contest, score = judged_contest(folder, number, attempts)
        solved = sum(map(any, attempts.values()))
        place = f"place {contest.place(score):g} of {len(contest.scores) + 1}"
        rating = contest.rating_of(score)
        print(
            f"contest {number}: {solved} problems, {score:g} points, {place}, rating {rating:.0f}"
        )
        ratings.append(rating)
    if not ratings:
        raise DataError(f"{folder}: has standings of none of the contests")
    low, high = bootstrap_interval(ratings, 0)
    interval = f"{low:.0f} to {high:.0f} over {len(ratings)} contests"
    print(f"rating {np.mean(ratings):.0f}, 95% interval {interval}; an offline estimate")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    problems = commands.add_parser("problems", help="write the prompts of the suite")
    problems.add_argument("files", type=Path, nargs="+", metavar="FILE")
    problems.add_argument("-o", "--output", type=Path, required=True)
    problems.add_argument("--tests", type=Path, help="the dataset's folder generated_tests")
    rating = commands.add_parser("rating", help="print the estimate")
    rating.add_argument("evaluation", type=Path, metavar="EVALUATION.jsonl")
    rating.add_argument("--standings", type=Path, required=True, metavar="FOLDER")
    rating.add_argument("--suite", default="codeforces")
    given = parser.parse_args(arguments)
    if given.command == "problems":
        write_problems(given.files, given.output, given.tests)
    else:
        print_rating(given.evaluation, given.standings, given.suite)


if __name__ == "__main__":
    sys.exit(run_script(main))
