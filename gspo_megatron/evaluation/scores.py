"""Computes the records and figures of an evaluation suite, with several responses to each problem.

Symbols: n responses to a problem, c correct ones, N problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo_megatron.config.schema import SuiteSection
from gspo_megatron.observe.intervals import bootstrap_interval
from gspo_megatron.observe.metrics_files import written_answer
from gspo_megatron.types import Sample


@dataclass(frozen=True)
class ProblemResponses:
    """All responses to a problem. A response whose call of the reward failed has the reward NaN,
    and does not count."""

    rewards: Sequence[float]  # [n]
    correct: Sequence[bool]  # [n]
    answers: Sequence[str | None]  # [n], the reward's `read_answer`; None if there is no answer
    truncated: Sequence[bool]  # [n]
    lengths: Sequence[int]  # [n], tokens

    def failures_wrong(self) -> ProblemResponses:
        """Return a copy in which responses with a failed reward are wrong: reward 0, no answer."""
        failed = [math.isnan(reward) for reward in self.rewards]
        return replace(
            self,
            rewards=[0.0 if bad else x for x, bad in zip(self.rewards, failed, strict=True)],
            correct=[x and not bad for x, bad in zip(self.correct, failed, strict=True)],
            answers=[None if bad else x for x, bad in zip(self.answers, failed, strict=True)],
        )

    def scored(self) -> ProblemResponses:
        """Return a copy with only the responses that have a reward."""
        places = [i for i, reward in enumerate(self.rewards) if not math.isnan(reward)]
        return ProblemResponses(
            **{name: [column[i] for i in places] for name, column in vars(self).items()}
        )


def response_record(
    sample: Sample,
    reward: float,
    parts: Mapping[str, float],
    reason: str,
    correct_at: float,
) -> dict[str, Any]:
    """Return a response as a record of evaluation.jsonl. `reward` is NaN if its call failed."""
    is_scored = not math.isnan(reward)
    return {
        "row_id": sample.row_id,
        "prompt": sample.prompt,
        "answer": written_answer(sample),
        "response": sample.response,
        **({"transcript": sample.transcript} if sample.transcript else {}),
        "reward": reward if is_scored else None,
        **({"parts": dict(parts)} if parts and is_scored else {}),
        **({"reason": reason} if reason else {}),
        "correct": reward >= correct_at if is_scored else None,
        "truncated": sample.truncated,
        "num_tokens": sample.num_tokens,
    }


def of_records(records: Iterable[Mapping[str, Any]]) -> list[ProblemResponses]:
    """Group the records of a suite in evaluation.jsonl by problem."""
    problems: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        problems.setdefault(record["problem"], []).append(record)
    return [
        ProblemResponses(
            [math.nan if each["reward"] is None else each["reward"] for each in responses],
            [bool(each["correct"]) for each in responses],
            [each["read_answer"] for each in responses],
            [each["truncated"] for each in responses],
            [each["num_tokens"] for each in responses],
        )
        for responses in problems.values()
    ]


def pass_at_k(correct: int, responses: int, k: int) -> float:
    """Estimate the chance that at least one of k responses is correct.

    `correct` of the `responses` were correct. This is the unbiased estimator
    1 − C(n−c, k) / C(n, k) of the Codex paper (arXiv 2107.03374, eq. 1).

    Raises ValueError unless 0 <= correct <= responses and 1 <= k <= responses.
    """
    if not (0 <= correct <= responses and 1 <= k <= responses):
        raise ValueError(f"pass@{k} of {correct} correct of {responses} responses")
    return 1.0 - math.comb(responses - correct, k) / math.comb(responses, k)


def majority_at_k(correct: Sequence[bool], answers: Sequence[str | None]) -> float:
    """Return 1.0 if the most frequent answer is correct, else 0.0.

    If several answers share the first place, return the mean over them. Responses without an answer
    do not count; if no response has an answer, the result is 0.0. If an answer has correct and
    wrong responses, its value is the share of correct ones. All answers with a correct response
    count as one answer, even if they are written differently, because a reward compares values, not
    texts.
    """
    pairs = [pair for pair in zip(answers, correct, strict=True) if pair[0] is not None]
    correct_answers = {answer for answer, is_correct in pairs if is_correct}
    votes: dict[str | None, list[bool]] = {}
    for answer, is_correct in pairs:
        key = None if answer in correct_answers else answer
        votes.setdefault(key, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(each) / most for each in votes.values() if len(each) == most]
    return sum(winners) / len(winners) if winners else 0.0


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 … up to `most`, and `most` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def suite_figures(
    problems: Sequence[ProblemResponses],
    samples: int,
    seed: int = 0,
    *,
    failed_is_wrong: bool = False,
) -> dict[str, float]:
    """Return the figures of a suite with `samples` responses to each problem, by name.

    mean, ci_low, ci_high: mean reward with its 95% interval
    pass_at_K: for K = 1, 2, 4 … samples
    maj_at_SAMPLES: if samples > 1 and some response has an answer
    truncated: share of the responses
    length: mean number of tokens
    problems: number of problems in these figures
    failed: number of failed reward calls
    left_out: number of problems that are not in the figures

    A problem with a failed call is left out of all figures. With `failed_is_wrong`, the
    problem stays in the figures, and the response of the failed call counts as wrong. Raises
    ValueError if no problem is left, or if every call failed.
    """
    scored = [problem.scored() for problem in problems]
    failed = sum(len(a.rewards) - len(b.rewards) for a, b in zip(problems, scored, strict=True))
    if failed_is_wrong and any(problem.rewards for problem in scored):
        scored = [problem.failures_wrong() for problem in problems]
    whole = [problem for problem in scored if len(problem.rewards) == samples]
    if not whole:
        raise ValueError(f"no problem has {samples} responses with rewards")
    means = [float(np.mean(problem.rewards)) for problem in whole]
    low, high = bootstrap_interval(means, seed)
    figures = {"mean": float(np.mean(means)), "ci_low": low, "ci_high": high}
    for k in powers_of_two(samples):
        chances = [pass_at_k(sum(problem.correct), samples, k) for problem in whole]
        figures[f"pass_at_{k}"] = float(np.mean(chances))
    if samples > 1 and any(answer is not None for each in whole for answer in each.answers):
        votes = [majority_at_k(problem.correct, problem.answers) for problem in whole]
        figures[f"maj_at_{samples}"] = float(np.mean(votes))
    figures["truncated"] = float(np.mean([each.truncated for each in whole]))
    figures["length"] = float(np.mean([each.lengths for each in whole]))
    figures["problems"] = float(len(whole))
    return figures | {"failed": float(failed), "left_out": float(len(problems) - len(whole))}


def figures_of_records(
    records: Iterable[Mapping[str, Any]], suite: SuiteSection, seed: int = 0
) -> dict[str, float]:
    """Return the figures of a suite from its records. See `suite_figures`."""
    is_wrong = suite.failed == "wrong"
    return suite_figures(of_records(records), suite.samples, seed, failed_is_wrong=is_wrong)
