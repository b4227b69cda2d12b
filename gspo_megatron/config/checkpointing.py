"""The section `checkpoint`: when a run is saved, and which saves stay."""

from __future__ import annotations

from pydantic import Field

from gspo_megatron.config.section import NotNegative, Positive, Section, Text


class CheckpointSection(Section):
    """Saving and resuming."""

    interval: NotNegative = Field(
        0,
        description="steps between checkpoints, of the warm start too; another at each one's end, "
        "and when the run is told to stop; 0: none",
    )
    keep_last: Positive | None = Field(3, description="the newest so many stay; null: all do")
    keep_best: NotNegative = Field(
        0, description="besides, those with the highest `best_metric` at their step"
    )
    keep_every: NotNegative = Field(
        0, description="besides, those whose step is a multiple of this; 0: none"
    )
    best_metric: Text = Field(
        "evaluation/accuracy", description="a figure of metrics.jsonl; the higher the better"
    )
    asynchronous: bool = Field(
        False,
        description="write while training goes on, which waits for the copy in host memory only",
    )
