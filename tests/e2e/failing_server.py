"""Runs that ask a model server of vLLM's kind for rewards or for a teacher's log-probs. The server
fails in the middle of the run. Then the run ends with one line, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.resuming import assert_same_run, records
from tests.unit.rollout.model_server import Answer

STEPS, GOOD_STEPS = 4, 2  # all steps of the run; those before the failure


def assert_no_finished_step_is_lost(
    train_with: Callable[..., str],
    path: Path,
    undisturbed: Path,
    right: Answer,
    fault: tuple[Answer, str],
) -> str:
    """Train with a server that is wrong after GOOD_STEPS steps, and then with the right one. The
    result must be that of the `undisturbed` run. Returns the line about the failure.

    train_with(answer, path, expect=code) runs the command and returns its stderr."""
    run, (wrong, said) = path.parent / "run", fault

    def answer(given: dict[str, Any]) -> Any:
        metrics = run / "metrics.jsonl"  # also has step 0
        finished = metrics.read_text().count("\n") - 1 if metrics.exists() else 0
        return wrong(given) if finished >= GOOD_STEPS else right(given)

    lines = train_with(answer, path, expect=2).splitlines()
    [failed] = [line for line in lines if "in the last of 2 calls" in line]
    assert said in failed
    assert [record["step"] for record in records(run)] == [*range(GOOD_STEPS + 1)]
    train_with(right, path)
    assert [record["step"] for record in records(run)] == [*range(STEPS + 1)]
    assert_same_run(run, undisturbed, f"rl_{STEPS:08d}")
    return failed
