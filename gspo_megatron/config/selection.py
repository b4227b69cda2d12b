"""The section data.selection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from gspo_megatron.config.section import Positive, Section, shapes
from gspo_megatron.errors import format_value

Share = Annotated[float, Field(ge=0, le=1)]


class SelectionSection(Section):
    """Which prompts a step uses."""

    by: Literal["uniform", "pass_rate"] = shapes(
        "uniform",
        "uniform: all prompts in turn; pass_rate: prompts whose last responses were solved neither "
        "too often nor too seldom, and new prompts",
    )
    low: Share = shapes(0.01, "the lowest pass rate of the band: share of solved responses")
    high: Share = shapes(0.99, "the highest pass rate of the band")
    floor: Share = shapes(
        0.1,
        "share of a step's prompts that are drawn at random, from all prompts that are not retired",
    )
    retire_after: Positive | None = shapes(
        None,
        "number of draws in a row with all responses solved, after which a prompt is retired; "
        "null: never",
    )
    revive_after: Positive | None = shapes(
        None, "number of steps after which a retired prompt is drawn once more; null: never"
    )
    correct_at: float | None = shapes(
        None, "a response with at least this reward is solved; null: as evaluation.correct_at"
    )

    @property
    def is_on(self) -> bool:
        """Whether the results of earlier draws decide which prompts are chosen."""
        return self.by != "uniform"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each key of the section that does not fit the other keys, and why."""
        idle = {
            "by = uniform": () if self.is_on else ("low", "high", "floor", "retire_after"),
            "retire_after = null": ("revive_after",) if self.retire_after is None else (),
        }
        for reason, names in idle.items():
            wrong = f"nothing reads it with data.selection.{reason}"
            for name, problem in self.unread(names, wrong):
                yield f"data.selection.{name}", problem
        if self.is_on and self.low > self.high:
            yield "data.selection.low", f"above high; allowed: at most {format_value(self.high)}"
